"""What crosses the seam to a CUDA module, without a GPU: layout.h knows every field of the structs that are shared, the tests'
own structs follow from it, and a module with another layout is refused with a sentence that says what differs."""

import os
import re
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "..")
BUILD = os.environ.get("RA_BUILD", "build")
PROGRAM = os.environ.get("RINGATTN", os.path.join(BUILD, "ringattn"))
SANITIZED = bool(os.environ.get("RA_SANITIZED"))
HEADERS = ("include/ringattn.h", "include/ringattn_cuda.h", "src/core/span.h", "src/core/box.h", "src/core/item.h", "src/device/kernel.h")
HEADERS += ("src/device/cuda/backend.h",)
sys.path.insert(0, os.path.join(HERE, "gpu"))
from seam import Seam  # noqa: E402


def module(name):
    return os.path.join(BUILD, "tests", name, "libringattn_cuda.so")


def fields_in_headers():
    """{struct: its fields in order}, read from the text of the headers."""
    found = {}
    for header in HEADERS:
        with open(os.path.join(SOURCE, header), encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read(), flags=re.S)
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, flags=re.S):
            found[name] = []
            for declaration in filter(None, map(str.strip, body.split(";"))):
                pointer = re.search(r"\(\*(\w+)\)", declaration)
                parts = re.sub(r"\[.*?\]", "", declaration).split(",")
                found[name] += [pointer[1]] if pointer else [re.findall(r"\w+", part)[-1] for part in parts]
    return found


class Layout(unittest.TestCase):
    @unittest.skipIf(SANITIZED, "a sanitized module does not load into a plain interpreter")
    def test_every_field_of_a_shared_struct_is_a_fact_of_the_layout(self):
        expected, seam = fields_in_headers(), Seam(module("stand_in"))
        self.assertGreater(len(seam.structs), 8)
        for name, struct in seam.structs.items():
            self.assertEqual([field[0] for field in struct._fields_], expected[name], name)

    @unittest.skipIf(SANITIZED, "a sanitized module does not load into a plain interpreter")
    def test_a_field_that_does_not_exist_cannot_be_set(self):
        step = Seam(module("stand_in")).structs["ra_forward_step"]()
        step.single = True
        with self.assertRaisesRegex(AttributeError, "ra_forward_step has no field singel"):
            step.singel = True

    def test_a_module_of_another_layout_is_refused_and_says_what_differs(self):
        environment = dict(os.environ, RINGATTN_MODULE_PATH=os.path.dirname(module("stale")))
        command = [PROGRAM, "bench", "--seq", "8", "--heads", "1", "--head-dim", "8", "--pass", "fwd", "--device", "cuda"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        self.assertEqual(answer.returncode, 6, answer.stdout + answer.stderr)
        self.assertRegex(answer.stderr, r"stale/libringattn_cuda.so belongs to another version of ringattn")
        self.assertRegex(answer.stderr, r"\"struct ra_problem \d+\" there, \"struct ra_problem \d+\" here")

    def test_a_module_that_lacks_a_function_is_refused_by_its_name(self):
        environment = dict(os.environ, RINGATTN_MODULE_PATH=os.path.dirname(module("partial")))
        answer = subprocess.run([PROGRAM, "info"], capture_output=True, text=True, timeout=60, check=False, env=environment)
        self.assertIn("it has no count", answer.stdout + answer.stderr)


if __name__ == "__main__":
    unittest.main()
