#!/bin/bash
# Installs the Python package into a virtual environment and runs its tests there.
#   tools/test_python.sh [options of pytest]
# The environment is build/venv-python (or RINGATTN_VENV) and is kept for the next time. Tests that need torch run where the interpreter
# (PYTHON, python3 by default) has it; where CI is set torch, transformers and mpi4py are installed, and leaving them out is a failure.
set -eu
cd "$(dirname "$0")/.."
venv=${RINGATTN_VENV:-build/venv-python}
python=${PYTHON:-python3}

if [ ! -x "$venv/bin/python" ]; then
    mkdir -p "$(dirname "$venv")"
    "$python" -m venv --system-site-packages "$venv"
fi
venv=$(cd "$venv" && pwd)
has() { "$venv/bin/python" -c "import $1" 2>/dev/null; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

case "${CI:-}" in
true | 1)
    has torch || pip install torch==2.13.0
    has transformers || pip install transformers
    has mpi4py || pip install mpi4py || echo "mpi4py cannot be installed here"
    ;;
esac
for module in numpy pytest hypothesis matplotlib; do
    has $module || pip install $module
done

# The library is built in a directory that is kept, so that only what changed is compiled again.
pip install --no-deps --force-reinstall --config-settings=build-dir=build/wheel .
cd build # away from the sources: what is tested is what was installed
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider ../python/tests "$@"
