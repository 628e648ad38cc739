"""Few query rows against many keys (decoding), against the definition in float64."""

import math
import unittest

from kit import BF16, DEVICE, F16, HOPPER, SMALL, backend, draw, kernel, torch  # isort: skip
from definition import Desc
from forward_case import ForwardCase

PATH = "few" if HOPPER else None  # elsewhere the other kernels hold the same
LONG = 3000 if SMALL else 20000


class Few(ForwardCase):
    def few(self, *args, **more):
        self.case(*args, path=PATH, **more)

    def test_one_query_meets_the_bound_at_every_length(self):
        for nk in (512, 513, 1000, 4099) if SMALL else (512, 513, 527, 1000, 4099, 16384, 131072):
            for d in (64, 128):
                self.few(1, 1, nk, 32, 8, d, Desc())
                self.few(3, 1, nk, 8, 2, d, Desc(causal=True), F16)

    def test_tiles_of_every_height_meet_the_bound(self):
        shapes = (1, 1, 1), (1, 1, 16), (1, 1, 17), (16, 1, 1), (16, 1, 4), (4, 4, 33), (6, 2, 5), (6, 2, 21), (2, 2, 64)
        for h, hk, nq in shapes:
            for d in (64, 128):
                for causal in (False, True):
                    self.few(2, nq, 700, h, hk, d, Desc(causal=causal), BF16 if causal else F16)

    def test_every_head_dimension_meets_the_bound(self):
        for d in (8, 40, 72, 104) if SMALL else range(8, 129, 8):
            self.few(1, 3, 1000, 8, 2, d, Desc(causal=True))
            self.few(1, 3, 1000, 8, 2, d, Desc(), F16, state=True)

    def test_more_rows_fewer_keys_and_other_dimensions_go_to_the_other_kernels(self):
        for nq, nk, h, d, more in (
            (65, 700, 1, 64, {}),
            (17, 700, 4, 64, {}),
            (1, 511, 4, 64, {}),
            (1, 700, 4, 136, {}),
            (1, 700, 4, 63, {}),
            (1, 700, 4, 64, {"dropout": 0.2, "seed": 3}),
        ):
            self.case(1, nq, nk, h, 1, d, Desc(causal=True, **more), slack=2.0)
            self.assertNotEqual(backend.path, "few")
        for wanted in ("sm80", "sm90a") if HOPPER else ("sm80",):
            with kernel(wanted):
                self.case(1, 1, 700, 8, 2, 64, Desc(), path=wanted)

    def test_windows_ranges_and_unequal_lengths_meet_the_bound(self):
        for d in (64, 128):
            for state in (False, True):
                self.few(2, 9, LONG, 4, 2, d, Desc(window=(700, 50)), state=state)
                self.few(1, 16, 2000, 4, 1, d, Desc(window=(0, 0)), state=state)
                self.few(1, 5, 2000, 4, 1, d, Desc(window=(3, -1)), state=state)
                ranges = Desc(key_begin=[0, 100, 1650], key_end=[1700, 300, 1650], causal=True)
                self.few(3, 7, 1700, 4, 2, d, ranges, poison=True, state=state)
        lengths = Desc(key_end=[LONG, 1, 0, 900, 64, LONG // 2], causal=False)  # parts follow the lengths of batch entries
        self.few(6, 2, LONG, 8, 2, 128, lengths, poison=True)
        begin = [i % 40 for i in range(70)]
        self.few(70, 1, 600, 2, 1, 64, Desc(key_begin=begin, key_end=[600 - i for i in begin]))

    def test_patterns_meet_the_bound_and_fill_their_holes(self):
        for state in (False, True):
            for causal in (False, True):
                three = Desc(branches=[(0, 1), (0, 2), (0, 4)], causal=causal)
                self.few(2, 11, 2500, 6, 3, 128, three, poison=True, state=state)
                many = Desc(branches=[(1000, 1), (2000, 2), (2500, 3), (0, 4), (0, 5)], causal=causal)
                self.few(1, 9, 2500, 10, 5, 64, many, poison=True, state=state)
                self.few(1, 13, 2500, 4, 2, 64, Desc(branches=[(0, 3)], causal=causal, offset="residue"), state=state)
                rows = Desc(branches=[(0, 3), (1250, 2)], causal=causal, dilate_queries=False)
                self.few(1, 13, 2500, 4, 2, 128, rows, poison=True, state=state)
        for causal in (False, True):
            mix = Desc(branches=[(0, 1), (2048, 2), (1024, 1), (0, 4)], combine="mix", causal=causal)
            self.few(2, 6, 2500, 4, 2, 128, mix, state=True)

    def test_a_nan_in_a_value_reaches_exactly_the_rows_that_attend_to_it(self):
        for bad in (math.nan, math.inf):
            q, k, v = draw(1, 12, 8, 128, BF16), draw(1, LONG, 2, 128, BF16), draw(1, LONG, 2, 128, BF16)
            v[0, LONG - 5, 1] = bad  # at the position of query row 7
            out, _ = self.forward(q, k, v, Desc(causal=True))
            self.assertFalse(out[0, :, :4].isnan().any())
            self.assertFalse(out[0, :7].isnan().any())
            self.assertFalse(torch.isfinite(out[0, 7:, 4:]).any())

    def test_vast_scores_are_scores(self):
        for top in (1e6, 3e12, 2.9e38):
            for sign in (1, -1):
                q, k = (torch.zeros(1, n, 2, 64, device=DEVICE, dtype=BF16) for n in (3, 2000))
                v = draw(1, 2000, 2, 64, BF16)
                q[..., 0], k[..., 0] = top**0.5, sign * top**0.5
                out, lse = self.forward(q, k, v, Desc(scale=1.0))
                score = sign * q[0, 0, 0, 0].double() ** 2
                self.assertLessEqual((lse.double() - score - math.log(2000)).abs().max().item(), 2e-5 * top)
                mean = v.double().mean(1, keepdim=True)
                self.assertLessEqual((out.double() - mean).abs().max().item(), 1e-2)
        for spread in (2, 8, 16):
            q, k, v = (draw(1, n, 4, 128, BF16, s) for n, s in ((5, spread), (LONG, spread), (LONG, 1)))
            self.hold(q, k, v, Desc(), *self.forward(q, k, v, Desc()))

    def test_the_same_call_gives_the_same_bits(self):
        for b, nq, h, hk in ((1, 1, 32, 8), (4, 1, 32, 8), (1, 16, 32, 8), (1, 6, 4, 1)):
            q, k, v = draw(b, nq, h, 128, BF16), draw(b, LONG, hk, 128, BF16), draw(b, LONG, hk, 128, BF16)
            for state in (False, True):
                first = self.forward(q, k, v, Desc(causal=True), state)
                for _ in range(2 if SMALL else 20):
                    for x, y in zip(first, self.forward(q, k, v, Desc(causal=True), state)):
                        self.assertTrue(torch.equal(x, y))

    def test_any_order_of_heads_and_rows_in_memory_serves(self):
        for build in (
            lambda n, h: draw(2, n, h, 128, BF16),
            lambda n, h: draw(2, h, n, 128, BF16).transpose(1, 2),
            lambda n, h: draw(2, n, h, 136, BF16)[..., :128],
            lambda n, h: draw(2, 3 * n, h, 128, BF16)[:, ::3],
        ):
            q, k, v = build(2, 8), build(1500, 2), build(1500, 2)
            out, lse = self.forward(q, k, v, Desc(causal=True))
            self.assertEqual(backend.path, PATH or backend.path)
            self.hold(q, k, v, Desc(causal=True), out, lse)

    def test_a_step_follows_a_cache_that_grows(self):
        """The end of the keys is read at every call: neither step nor scratch are made anew."""
        room = 3000
        q, k, v = draw(2, 1, 8, 128, BF16), draw(2, room, 2, 128, BF16), draw(2, room, 2, 128, BF16)
        k[:], v[:] = math.nan, math.nan
        out, lse = torch.empty_like(q), torch.empty(2, 8, 1, device=DEVICE).transpose(1, 2)
        desc = Desc(key_begin=[0, 0], key_end=[1, 1])
        step = backend.prepare(q, k, v, desc, out, lse)
        length = 0
        for more in (1, 63, 1, 700, 1, 1000, 1, 1200):
            for t in (k, v):
                t[:, length : length + more] = draw(2, more, 2, 128, BF16)
            length += more
            desc.key_end = [length, max(0, length - 2)]
            for b, end in enumerate(desc.key_end):
                step.problem.contents.key_end[b] = end
            backend.run(step)
            backend.synchronize()
            self.assertEqual(backend.path, PATH or backend.path)
            self.hold(q, k, v, desc, out, lse)

    @unittest.skipIf(DEVICE == "cpu", "needs a GPU")
    def test_a_captured_graph_replays_the_step_on_new_data(self):
        q, k, v = draw(1, 1, 32, 128, BF16), draw(1, 5000, 8, 128, BF16), draw(1, 5000, 8, 128, BF16)
        self.replay(q, k, v, Desc())


if __name__ == "__main__":
    unittest.main()
