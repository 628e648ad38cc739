"""The command `ringattn`: the program that the wheel holds beside this file."""

from __future__ import annotations

import os
import sys


def main() -> int:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ringattn")
    try:
        os.execv(program, ["ringattn", *sys.argv[1:]])
    except OSError as error:
        print(f"ringattn: cannot run {program} ({error.strerror}); it needs jansson when it is built", file=sys.stderr)
    return 1
