"""Objects that are built, installed or packed into a wheel are no help to an attacker, as read from the objects themselves.

No run path has an empty or relative entry: that is the current directory of whoever runs the program, and a libmpi.so.40 there would
be loaded. And the flags of cmake/RingattnHardening.cmake took effect, where the build has them on.

    install_objects.py              the build in RA_BUILD, and what it installs
    install_objects.py FOLDER...    what lies there, a wheel's files for instance
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def readelf(*arguments):
    return subprocess.run(["readelf", "-W", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def is_elf(path):
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def linked_objects(folder):
    return [path for path in sorted(folder.rglob("*")) if path.suffix != ".o" and "CMakeFiles" not in path.parts and is_elf(path)]


def run_path_faults(path):
    for entries in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", readelf("-d", path)):
        for entry in entries.split(":"):
            if not entry.startswith(("/", "$ORIGIN")):
                yield f"its run path '{entries}' has the entry '{entry}'"


def link_faults(path):
    """What the linker's flags do."""
    head, segments, dynamic = readelf("-h", path), readelf("-l", path), readelf("-d", path)
    if not re.search(r"Type:\s+DYN", head):
        yield "its code has a fixed address (no PIE)"
    if "GNU_RELRO" not in segments:
        yield "its relocations stay writable (no RELRO)"
    if not re.search(r"\(FLAGS(_1)?\).*\b(BIND_NOW|NOW)\b", dynamic):
        yield "it binds symbols while it runs (no BIND_NOW)"
    stack = re.search(r"GNU_STACK.*", segments)
    if not stack or "E" in stack[0].split()[6]:
        yield "its stack is executable"


def call_faults(path, fortified):
    """What the compiler's flags do: every one of ours has arrays on the stack, and copies or prints into them."""
    imports = set(re.findall(r"\bUND (\w+)", readelf("--dyn-syms", path)))
    if "__stack_chk_fail" not in imports:
        yield "no function of it has a stack protector"
    if fortified and not any(re.fullmatch(r"__\w+_chk", name) for name in imports):
        yield "no call of the C library is checked (_FORTIFY_SOURCE)"


# A linker keeps this note only where the C library's own start files have it, which Debian 12's lack: so each object is asked.
BRANCHES = {"X86-64": r"x86 feature:.*IBT, SHSTK", "AArch64": r"AArch64 feature:.*BTI, PAC"}


def branch_faults(path):
    machine = re.search(r"Machine:.*\b(X86-64|AArch64)", readelf("-h", path))
    if machine and not re.search(BRANCHES[machine[1]], readelf("-n", path)):
        yield "indirect branches of it are not protected"


def compiled_objects(build):
    """Those of what is installed, as the build makes them now: others may have stayed behind from an earlier tree."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        output = re.search(r" -o (\S+)", entry["command"])[1]
        if output.startswith(("CMakeFiles/ringattn_", "src/")) and (build / output).exists():
            yield build / output


def main(folders):
    faults, checked = [], 0

    def read(path, *kinds):
        nonlocal checked, faults
        checked += 1
        faults += [f"{path}: {fault}" for kind in kinds for fault in kind]

    for folder in folders:
        for path in linked_objects(pathlib.Path(folder)):
            read(path, run_path_faults(path), link_faults(path), call_faults(path, True))
    if folders:
        return checked, faults

    build = pathlib.Path(os.environ["RA_BUILD"])
    cache = dict(re.findall(r"^(\w+):\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE))
    hardened = cache["RA_HARDENING"] == "ON"
    fortified = not cache["RA_SANITIZE"] and cache["CMAKE_BUILD_TYPE"] != "Debug"
    for path in linked_objects(build):
        read(path, run_path_faults(path))
    with tempfile.TemporaryDirectory() as prefix:
        subprocess.run(["cmake", "--install", build, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
        for path in linked_objects(pathlib.Path(prefix)):
            read(path, run_path_faults(path), *([link_faults(path), call_faults(path, fortified)] if hardened else []))
    for path in compiled_objects(build) if hardened else []:
        read(path, branch_faults(path))
    return checked, faults


checked, faults = main(sys.argv[1:])
print(f"{checked} objects read, {len(faults)} faults", *faults, sep="\n")
sys.exit(1 if faults or checked < 2 else 0)
