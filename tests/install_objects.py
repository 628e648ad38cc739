"""No object that is built or installed looks for libraries in a folder that anybody may fill.

An empty or relative entry of a run path is the current directory of whoever runs the program: a libmpi.so.40 there would be loaded."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(os.environ["RA_BUILD"])


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


def main():
    faults, checked = [], 0
    with tempfile.TemporaryDirectory() as prefix:
        subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
        for folder in (BUILD, pathlib.Path(prefix)):
            for path in linked_objects(folder):
                checked += 1
                faults += [f"{path}: {fault}" for fault in run_path_faults(path)]
    print(f"{checked} objects read, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults or checked < 4 else 0


sys.exit(main())
