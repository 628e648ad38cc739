"""What the assembler said of the CUDA kernels when they were built: every kernel is there for each of its architectures, none
spills registers, and no wgmma waits for the one before it. Needs no GPU."""

import collections
import os
import re
import shutil
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "..", "src", "device", "cuda")
BUILD = os.environ.get("RA_BUILD", "build")
OBJECTS = os.path.join(BUILD, "src", "device", "cuda", "CMakeFiles")

# Each family's kernels, by head dimension, element type and variant.
EXPECTED = {
    ("forward_sm90", "sm_90a"): 5 * 2 * 2 + 2 * 2 + 3 * 2,  # with and without dropout; other shapes; few items
    ("forward_few", "sm_90a"): 2 * 3 * 2,  # 16, 32 and 64 rows
    ("merge_parts", "sm_90a"): 2 * 2,
    ("backward_sm90", "sm_90a"): 5 * 2 * 2,  # results and sums
    ("define_sm90", "sm_90a"): 5 * 2 * 2,
    ("forward_sm80", "sm_80"): 4 * 2 * 2,
    ("forward_sm80", "sm_90"): 4 * 2 * 2,
    ("forward_f32", "sm_80"): 3,
    ("forward_f32", "sm_90"): 3,
    ("backward_keys_sm80", "sm_80"): 3 * 2,
    ("backward_keys_sm80", "sm_90"): 3 * 2,
    ("backward_queries_sm80", "sm_80"): 3 * 2,
    ("backward_queries_sm80", "sm_90"): 3 * 2,
    ("backward_keys_f32", "sm_80"): 3,
    ("backward_keys_f32", "sm_90"): 3,
    ("backward_queries_f32", "sm_80"): 3,
    ("backward_queries_f32", "sm_90"): 3,
    ("zero_rows", "sm_80"): 3,
    ("zero_rows", "sm_90"): 3,
    ("delta_rows", "sm_80"): 3,
    ("delta_rows", "sm_90"): 3,
    ("convert_rows", "sm_80"): 3,
    ("convert_rows", "sm_90"): 3,
    ("fill_rows", "sm_80"): 3,
    ("fill_rows", "sm_90"): 3,
    ("empty_rows", "sm_80"): 1,
    ("empty_rows", "sm_90"): 1,
    ("finish_rows", "sm_80"): 3,
    ("finish_rows", "sm_90"): 3,
    ("pack_box", "sm_80"): 3,
    ("pack_box", "sm_90"): 3,
    ("unpack_add_box", "sm_80"): 2,
    ("unpack_add_box", "sm_90"): 2,
    ("add_sums", "sm_80"): 2,
    ("add_sums", "sm_90"): 2,
    ("merge_rows", "sm_80"): 1,
    ("merge_rows", "sm_90"): 1,
    ("generate_rows", "sm_80"): 3,
    ("generate_rows", "sm_90"): 3,
}

# Bytes that a function may spill and reload, by the first name that it contains. Hopper's backward kernel has sums of 128 to 192 registers
# a thread, and the assembler keeps some of what is left in memory; at D = 256 only what is used once a tile, around the calls there, and up
# to D = 64 only what is used when sums of a call of several steps are added to.
SPILLS = {
    "backward_sm90I6__halfNS_13WideBackShapeILi256": (76, 88),
    "backward_sm90I13__nv_bfloat16NS_13WideBackShapeILi256": (76, 88),
    "backward_sm90I6__halfNS_14ApartBackShapeILi64ELb0": (44, 16),
    "backward_sm90I13__nv_bfloat16NS_14ApartBackShapeILi64ELb0": (44, 16),
    "backward_sm90": (12, 12),
    "find_back_tileILi64": (20, 28),
    "sloped_key_interval": (0, 8),
}


def reports():
    """{source: text} of the kernels as they were last built."""
    found = {}
    for directory, _, names in os.walk(OBJECTS):
        for name in names:
            if name.endswith(".report") and "_lanes" not in directory:
                with open(os.path.join(directory, name), encoding="utf-8") as file:
                    found[name.split(".cu")[0]] = file.read()
    return found


class Kernels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.reports = reports()

    def test_every_kernel_assembles_for_each_of_its_architectures(self):
        found = collections.Counter()
        for text in self.reports.values():
            for mangled, architecture in re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", text):
                name = re.match(r"_ZN2ra\d+([a-z_0-9]+)[IE]", mangled)
                self.assertTrue(name, mangled)
                found[name[1], architecture] += 1
        self.assertEqual(dict(found), EXPECTED)

    def test_no_function_spills_registers(self):
        for source, text in self.reports.items():
            for function, stores, loads in re.findall(
                r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", text
            ):
                with self.subTest(source=source, function=function):
                    most = next((bytes for name, bytes in SPILLS.items() if name in function), (0, 0))
                    self.assertLessEqual(int(stores), most[0])
                    self.assertLessEqual(int(loads), most[1])
            self.assertTrue(re.search(r"spill stores", text) or "Compiling" not in text, source)

    def test_the_assembler_warns_of_nothing(self):
        """C7510: wgmma serialised; C7508: setmaxnreg ignored; and whatever else it thinks worth a word."""
        for source, text in self.reports.items():
            self.assertEqual(re.findall(r".*(?:warning|[Ww]arn|Potential Performance Loss|C75\d\d).*", text), [], source)


if __name__ == "__main__":
    folders = (KERNELS, os.path.join(KERNELS, "backward"))
    wanted = {name[:-3] for folder in folders for name in os.listdir(folder) if name.endswith(".cu")}
    if not shutil.which("nvcc") and not reports():
        print("skipped: nvcc was not found")
        sys.exit(77)
    missing = wanted - set(reports())
    if missing and os.environ.get("RINGATTN_LONG"):
        subprocess.run(["cmake", "--build", BUILD, "--target", "ringattn_cuda"], check=True, stdout=subprocess.DEVNULL)
        missing = wanted - set(reports())
    if missing:
        print(f"skipped: the CUDA kernels are not built ({', '.join(sorted(missing))}): make cuda, or RINGATTN_LONG=1")
        sys.exit(77)
    unittest.main()
