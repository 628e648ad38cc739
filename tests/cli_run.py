"""run and grad of random .npy files agree with an independent float64 reference, whatever the pattern and the ring."""
import itertools
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli"))
import kit
import reference

DIMS = [1, 3, 8, 16, 20, 33, 64, 80, 96, 128, 160, 256]
LAYOUTS = ["contiguous", "zigzag", "striped"]


def random_case(rng, combine, offset, dilate, causal, most=150):
    """A pattern and shapes that divide nothing, drawn around the modes that are given."""
    nk = int(rng.choice([0, 1, 2, 5, int(rng.integers(3, most)), int(rng.integers(3, most))]))
    nq = nk if rng.random() < 0.55 else int(rng.integers(0, most))
    hk = int(rng.integers(1, 4))
    hq = hk * int(rng.integers(1, 4))
    branches = int(rng.integers(1, 4)) if combine == "mix" else int(rng.integers(1, hk + 1))
    segments = [0 if rng.random() < 0.3 else int(rng.integers(1, max(2, nk + nk // 4 + 2))) for _ in range(branches)]
    rates = [int(rng.integers(1, 6)) for _ in range(branches)]
    window = (int(rng.integers(-1, nk + 1)), int(rng.integers(-1, nk + 1))) if rng.random() < 0.3 else None
    begin = int(rng.integers(0, nk + 1))
    key_range = (begin, int(rng.integers(begin, nk + 1))) if rng.random() < 0.3 else None
    dropout, seed = (0.25, int(rng.integers(0, 2**63))) if rng.random() < 0.2 else (0.0, 0)
    scale = float(rng.choice([0.3, 1.0, -0.5])) if rng.random() < 0.15 else None
    p = reference.Pattern(segments, rates, combine, offset, dilate, causal, window, key_range, scale, dropout, seed)
    dim = int(rng.choice(DIMS))
    how = {"ring": int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 64], p=[0.12] * 8 + [0.04])), "layout": str(rng.choice(LAYOUTS)),
           "bucket": [None, 1, 5, "auto"][rng.integers(0, 4)], "threads": int(rng.integers(1, 3)),
           "schedule": [None, "ring", "gather", "auto"][rng.integers(0, 4)]}
    if rng.random() < 0.2:
        how.update(placement="replicated", schedule=[None, "merge", "ring", "gather"][rng.integers(0, 4)])
    return p, kit.random_arrays(rng, int(rng.integers(1, 3)), nq, nk, hq, hk, dim), how


class RunAgrees(kit.Case):
    def sweep(self, rounds, seed, dtypes):
        rng = np.random.default_rng(seed)
        modes = list(itertools.product(["heads", "mix"], ["branch", "head", "head-block", "residue"], [True, False],
                                       [True, False]))
        for n, (mode, dtype) in enumerate(itertools.product(modes * rounds, dtypes)):
            with self.subTest(n=n, mode=mode, dtype=dtype):
                p, arrays, how = random_case(rng, *mode)
                kit.check(self, p, *arrays, dtype=dtype, **how)

    def test_every_mode_agrees_in_f32(self):
        self.sweep(20 if kit.LONG else 2, 1, ["f32"])

    def test_every_mode_agrees_in_16_bits_and_f64(self):
        self.sweep(6 if kit.LONG else 1, 2, ["bf16", "f16", "f64"] if kit.LONG else ["bf16"])
        self.sweep(0 if kit.LONG else 1, 3, ["f64"])

    def test_every_head_dim_agrees(self):
        rng = np.random.default_rng(4)
        for dim in DIMS:
            with self.subTest(dim=dim):
                p = reference.Pattern([7, 0], [1, 2], causal=dim % 2 == 0)
                kit.check(self, p, *kit.random_arrays(rng, 1, 23, 23, 2, 2, dim), ring=3)

    def test_every_small_length_agrees(self):
        rng = np.random.default_rng(5)
        for n in range(0, 30, 1 if kit.LONG else 3):
            for layout in LAYOUTS:
                with self.subTest(n=n, layout=layout):
                    p = reference.Pattern([4, 6], [2, 1], combine="mix", causal=True)
                    kit.check(self, p, *kit.random_arrays(rng, 1, n, n, 2, 1, 8), ring=5, layout=layout, bucket=1)

    def test_lengths_of_a_few_hundred_agree(self):
        rng = np.random.default_rng(6)
        for nq, nk in ((389, 389), (101, 397), (311, 97)):
            with self.subTest(nq=nq, nk=nk):
                p = reference.Pattern([128, 0], [1, 4], causal=True)
                kit.check(self, p, *kit.random_arrays(rng, 1, nq, nk, 4, 2, 32), ring=7, layout="zigzag", bucket=17)

    def test_one_query_against_a_growing_cache_agrees(self):
        rng = np.random.default_rng(10)
        for nk in (1, 2, 7, 40, 41):
            for placement, schedule in (("sharded", None), ("replicated", "merge")):
                with self.subTest(nk=nk, placement=placement):
                    p = reference.Pattern(causal=True)
                    kit.check(self, p, *kit.random_arrays(rng, 1, 1, nk, 4, 2, 16), ring=3, placement=placement,
                              schedule=schedule)

    def test_more_ranks_than_rows_agree(self):
        rng = np.random.default_rng(7)
        for ring in (8, 64):
            for layout in LAYOUTS:
                with self.subTest(ring=ring, layout=layout):
                    kit.check(self, reference.Pattern(), *kit.random_arrays(rng, 1, 5, 5, 1, 1, 4), ring=ring, layout=layout)

    def test_scores_of_tens_stay_within_their_bound(self):
        rng = np.random.default_rng(8)
        q, k, v, dout = kit.random_arrays(rng, 1, 61, 61, 2, 2, 16)
        kit.check(self, reference.Pattern(scale=8.0), q, k, v, dout, ring=3)


class SameBits(kit.Case):
    def test_the_same_call_twice_and_any_number_of_threads_give_the_same_bits(self):
        rng = np.random.default_rng(9)
        q, k, v, dout = kit.random_arrays(rng, 2, 203, 203, 4, 2, 24)
        for name, array in (("q", q), ("k", k), ("v", v), ("dout", dout)):
            self.save(name + ".npy", array)
        for ring in (1, 4):
            for dtype in ("f32", "bf16"):
                seen = set()
                for threads in (1, 1, 2, 4):
                    names = ["dq", "dk", "dv", "out", "lse"]
                    outputs = [part for n in names for part in ("--" + n, self.path(n + ".npy"))]
                    self.ok("grad", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"), "--dout",
                            self.path("dout.npy"), *outputs, "--segment-lengths", "64,0", "--dilation-rates", "1,3",
                            "--combine", "mix",
                            "--causal", "--ring-size", ring, "--dtype", dtype, "--threads", threads)
                    seen.add(b"".join(self.load(n + ".npy").tobytes() for n in names))
                self.assertEqual(len(seen), 1, f"ring {ring}, {dtype}")


if __name__ == "__main__":
    kit.main()
