"""The CUDA backward kernels against the definition in float64, as test_forward.py for the forward pass."""

import itertools
import math
import unittest

from kit import BF16, DEVICE, F16, F32, OUT_BOUND, SMALL, backend, draw, kernel, keyless, torch, unread  # isort: skip
from definition import Desc, gradients, reference

NAMES = ("dq", "dk", "dv")
# Head dimensions whose kernel on Hopper has another shape each: up to 64, 96, 128, 192, 256.
SHAPES = (64, 256) if SMALL else (64, 96, 128, 192, 256)


class Backward(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(hash(self.id()) % 2**31)

    def inputs(self, b, nq, nk, h, hk, d, desc, dtype, poison, with_dlse):
        q, k, v = draw(b, nq, h, d, dtype), draw(b, nk, hk, d, dtype), draw(b, nk, hk, d, dtype)
        dout = draw(b, nq, h, d, dtype)
        dlse = torch.randn(b, h, nq, device=DEVICE).transpose(1, 2) if with_dlse else None
        out, lse, _, _ = reference(q, k, v, desc)
        out, lse = out.to(dtype), lse.float().transpose(1, 2).contiguous().transpose(1, 2)
        if poison:  # what no pair meets may hold anything
            k[unread(desc, b, nq, nk, h, hk)], v[unread(desc, b, nq, nk, h, hk)] = math.nan, math.inf
            q[keyless(desc, b, nq, nk, h, hk)], dout[keyless(desc, b, nq, nk, h, hk)] = math.inf, math.nan
        return q, k, v, out, lse, dout, dlse

    def backward(self, q, k, v, out, lse, dout, dlse, desc, sums=False):
        """(dq, dk, dv) with guard rows around them, which must stay untouched. sums: "fresh", if those of keys are not zeroed."""
        whole = [torch.full((x.shape[0], x.shape[1] + 2, *x.shape[2:]), 7.0, device=DEVICE, dtype=x.dtype) for x in (q, k, v)]
        results = [x[:, 1:-1] for x in whole]
        delta = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=DEVICE).transpose(1, 2)
        apart = [torch.full(x.shape, math.nan, device=DEVICE) for x in results] if sums else None
        problem = backend.problem(q, k, desc)
        for x in apart[:1] if sums == "fresh" else apart or results:
            backend.zero(problem, x)
        backend.delta(problem, dout, out, dlse, delta)
        step = backend.prepare_backward(q, k, v, desc, lse, dout, delta, results, apart)
        for i in range(step.item_count):
            step.items[i].fresh = sums == "fresh"
        backend.run(step)
        self.scratch = step.keep[2]
        for result, x in zip(results, apart or ()):
            backend.convert(problem, result, x)
        backend.synchronize()
        for x in whole:
            self.assertTrue((x[:, 0] == 7).all() and (x[:, -1] == 7).all(), "a guard row was written")
        return results

    def hold(self, found, q, k, v, dout, dlse, desc, slack=1.0):
        expected, size = gradients(q, k, v, dout, dlse, desc)
        for name, got, want, m in zip(NAMES, found, expected, size):
            self.assertTrue(torch.isfinite(got).all(), f"{name} is not finite")
            error = (got.double() - want).abs().max().item() if got.numel() else 0.0
            self.assertLessEqual(error, slack * OUT_BOUND[q.dtype] * m, name)

    def case(self, b, nq, nk, h, hk, d, desc, dtype=BF16, sums=False, poison=False, dlse=False, slack=1.0):
        with self.subTest(b=b, nq=nq, nk=nk, h=h, hk=hk, d=d, dtype=dtype, sums=sums, dlse=dlse, **desc.text()):
            q, k, v, out, lse, dout, dlse = self.inputs(b, nq, nk, h, hk, d, desc, dtype, poison, dlse)
            found = self.backward(q, k, v, out, lse, dout, dlse, desc, sums)
            self.hold(found, q, k, v, dout, dlse, desc, slack)

    # ------------------------------------------------------------------------------------------------ sizes and types

    def test_every_head_dimension_and_type_meets_its_bound(self):
        for d in (64, 128, 256) + (() if SMALL else (1, 3, 8, 24, 63, 72, 96, 127, 136, 160, 192, 200, 255)):
            for dtype in (BF16, F16, F32):
                for causal in (False, True):
                    self.case(1, 200, 270, 2, 1, d, Desc(causal=causal), dtype)

    def test_lengths_around_the_tiles_meet_the_bound(self):
        for n in (1, 63, 65) if SMALL else (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 193):
            for dtype, d in [(F32, 64)] + [(BF16, d) for d in SHAPES]:
                self.case(1, n, n, 1, 1, d, Desc(causal=True), dtype)
                self.case(1, 1, n, 2, 1, d, Desc(), dtype)

    def test_query_heads_of_a_group_are_summed(self):
        for dtype in (BF16, F16, F32):
            self.case(2, 150, 150, 8, 2, 64, Desc(causal=True), dtype)
            for d in (128, 256) if SMALL else (128, 136, 192, 256):
                self.case(1, 150, 150, 6, 1, d, Desc(), dtype)

    # ---------------------------------------------------------------------------------------------------------- masks

    def test_hoppers_kernel_meets_the_bound_by_itself(self):
        """What is not finite it leaves to be defined pair by pair; on finite numbers nothing is left."""
        if torch.cuda.get_device_capability() != (9, 0):
            self.skipTest("needs a Hopper GPU")
        dims = (40, 96, 128, 160, 256) if SMALL else (40, 64, 96, 104, 128, 136, 160, 192, 200, 256)
        for dtype in (BF16,) if SMALL else (BF16, F16):
            for d, sums in itertools.product(dims, (False, True)):
                for n, h, hk, desc in (
                    (700, 4, 4, Desc()),
                    (1000, 8, 2, Desc(causal=True)),
                    (900, 2, 2, Desc(window=(100, 50))),
                    (900, 2, 2, Desc(window=(-1, 70))),
                    (2048, 3, 3, Desc(branches=[(512, 1), (1024, 2), (2048, 4)], causal=True)),
                    (900, 4, 2, Desc(branches=[(128, 1), (256, 2), (512, 4)], combine="mix", causal=True)),
                ):
                    if desc.combine == "mix" and not sums:
                        continue
                    with self.subTest(dtype=dtype, d=d, sums=sums, n=n, **desc.text()), kernel("sm90a"):
                        q, k, v, out, lse, dout, dlse = self.inputs(1, n, n, h, hk, d, desc, dtype, False, False)
                        found = self.backward(q, k, v, out, lse, dout, dlse, desc, sums)
                        self.hold(found, q, k, v, dout, dlse, desc)
                        self.assertEqual(backend.path, "sm90a")
                        self.assertEqual(self.scratch[:8].view(torch.int32)[1].item(), 0, "it doubts a result")

    def test_many_short_causal_tiles_give_each_batch_entry_the_same_bits(self):
        """So many of 300 keys that Hopper's kernel deals them from the last keys to the first; entries are copies of one."""
        entries, h = (2, 4) if SMALL else (64, 52)
        patterns = (({}, "fresh"), ({"branches": [(150, 1), (300, 2)]}, False), ({"key_begin": [7], "key_end": [290]}, False))
        for d, (more, sums) in itertools.product(SHAPES, patterns):
            desc = Desc(causal=True, **more)
            with self.subTest(d=d, sums=sums, **desc.text()):
                given = self.inputs(1, 300, 300, h, h // 2, d, desc, BF16, not sums, False)
                copies = [x if x is None else torch.cat([x] * entries) for x in given]
                ranges = {name: more[name] * entries for name in more if name != "branches"}
                found = self.backward(*copies, Desc(causal=True, **{**more, **ranges}), sums)
                q, k, v, _, _, dout, dlse = given
                self.hold([x[:1] for x in found], q, k, v, dout, dlse, desc)
                for x in found:
                    self.assertTrue(torch.equal(x, x[:1].expand_as(x)))

    def test_windows_ranges_and_unequal_lengths_meet_the_bound(self):
        for dtype in (BF16, F32):
            for d in (64, 128) if SMALL else (64, 128, 160, 192, 200, 256):
                self.case(2, 200, 300, 2, 1, d, Desc(window=(70, 30)), dtype)
                self.case(1, 200, 200, 2, 2, d, Desc(window=(0, 0)), dtype)
                self.case(1, 200, 200, 2, 2, d, Desc(window=(-1, 5)), dtype)
                self.case(1, 300, 130, 2, 1, d, Desc(causal=True), dtype)
                self.case(3, 130, 300, 2, 1, d, Desc(key_begin=[0, 100, 250], key_end=[300, 130, 250]), dtype)

    def test_more_batch_entries_than_a_launch_holds_ranges_for(self):
        begin = [i % 40 for i in range(70)]
        self.case(70, 40, 90, 2, 1, 64, Desc(key_begin=begin, key_end=[90 - i for i in begin]))

    def test_a_nan_in_a_masked_row_reaches_no_gradient(self):
        for dtype in (BF16, F16, F32):
            for d in (64, 96, 128, 256) if SMALL else (64, 96, 128, 136, 192, 200, 256):
                for sums in (False, True):
                    desc = Desc(causal=True, key_begin=[0, 100, 133], key_end=[200, 120, 150])
                    self.case(3, 200, 200, 2, 1, d, desc, dtype, poison=True, sums=sums)
                    self.case(1, 260, 130, 2, 1, d, Desc(causal=True), dtype, poison=True, sums=sums)

    def test_masked_pairs_inside_a_tile_let_no_infinity_through(self):
        """Key 100 and query 30 hold infinities; only those that attend to the key, or are attended by the query, may show it."""
        dims = (64, 128) if SMALL else (64, 128, 192, 256)
        for dtype, d, sums in itertools.product((BF16, F32), dims, (False, True, "fresh")):
            desc, n = Desc(causal=True), 160
            q, k, v, out, lse, dout, _ = self.inputs(1, n, n, 1, 1, d, desc, dtype, False, False)
            v[0, 100], dout[0, 30] = math.inf, math.inf
            dq, dk, dv = self.backward(q, k, v, out, lse, dout, None, desc, sums)
            self.assertTrue(torch.isfinite(dq[0, :30]).all() and torch.isfinite(dq[0, 31:100]).all())
            self.assertTrue(torch.isfinite(dk[0, 31:100]).all() and torch.isfinite(dk[0, 101:]).all())
            self.assertTrue(torch.isfinite(dv[0, 31:]).all())
            self.assertFalse(torch.isfinite(dv[0, :31]).any())

    # ------------------------------------------------------------------------------------------------------- patterns

    def test_dilated_patterns_meet_the_bound_and_leave_holes_zero(self):
        for dtype in (BF16, F32):
            for causal in (False, True):
                self.case(2, 500, 500, 6, 3, 64, Desc(branches=[(128, 1), (256, 2), (512, 4)], causal=causal), dtype, poison=True)
                self.case(1, 503, 503, 6, 6, 128, Desc(branches=[(100, 3), (333, 5)], causal=causal), dtype, poison=True)
                self.case(1, 303, 503, 4, 4, 64, Desc(branches=[(100, 3), (0, 7)], causal=causal), dtype, poison=True)
                for d in () if SMALL else (160, 192, 256):
                    desc = Desc(branches=[(128, 1), (256, 2), (512, 4)], causal=causal)
                    self.case(2, 500, 500, 6, 3, d, desc, dtype, poison=True)
                    self.case(1, 303, 503, 4, 4, d, Desc(branches=[(100, 3), (0, 7)], causal=causal), dtype, poison=True)

    def test_queries_off_the_lattice_read_its_keys_when_they_are_not_dilated(self):
        for dtype in (BF16, F32):
            for window in ((-1, -1), (40, 30)):
                desc = Desc(branches=[(100, 3), (333, 5)], causal=window[0] < 0, window=window, dilate_queries=False)
                for d in (64,) if SMALL else (64, 192, 256):
                    self.case(1, 503, 503, 6, 6, d, desc, dtype, poison=True)

    def test_residues_and_offsets_by_head_meet_the_bound(self):
        for dtype in (BF16, F32):
            for causal in (False, True):
                self.case(1, 503, 503, 4, 2, 64, Desc(branches=[(100, 3), (333, 5)], causal=causal, offset="residue"), dtype)
                self.case(1, 503, 503, 8, 8, 64, Desc(branches=[(100, 3)], causal=causal, offset="head"), dtype, poison=True)
                self.case(1, 503, 503, 8, 4, 64, Desc(branches=[(100, 3)], causal=causal, offset="head-block"), dtype, poison=True)

    def test_branches_mix_through_sums(self):
        for dtype in (BF16, F16, F32):
            for causal in (False, True):
                desc = Desc(branches=[(128, 1), (256, 2), (512, 4)], combine="mix", causal=causal)
                for d in (64,) if SMALL else (64, 192, 256):
                    self.case(1, 503, 503, 4, 2, d, desc, dtype, sums=True, dlse=True)

    # -------------------------------------------------------------------------------------------------------- numbers

    def test_fresh_sums_may_hold_anything(self):
        """They are NaN before; where a query meets each key, they become what zeroed ones do."""
        ways = [(F32, 64, None)] + [(dtype, d, way) for dtype in (BF16, F16) for d in SHAPES for way in (None, "sm80")]
        for (dtype, d, way), desc in itertools.product(ways, (Desc(), Desc(causal=True), Desc(branches=[(100, 1)], causal=True))):
            with self.subTest(dtype=dtype, d=d, way=way, **desc.text()), kernel(way):
                given = self.inputs(2, 300, 300, 4, 2, d, desc, dtype, False, False)
                fresh, zeroed = (self.backward(*given, desc, sums) for sums in ("fresh", True))
                q, k, v, _, _, dout, dlse = given
                self.hold(fresh, q, k, v, dout, dlse, desc)
                for a, b in zip(fresh, zeroed):
                    self.assertTrue(torch.equal(a, b))

    def test_a_gradient_of_lse_flows_too(self):
        for dtype in (BF16, F32):
            for d in SHAPES:
                self.case(1, 200, 200, 2, 1, d, Desc(causal=True), dtype, dlse=True)
                self.case(1, 200, 200, 2, 1, d, Desc(branches=[(64, 2)]), dtype, dlse=True, poison=True)

    def test_any_scale_runs(self):
        for scale in (-0.3, 0.0, 0.7):
            for dtype in (BF16, F32):
                self.case(1, 130, 200, 2, 1, 64, Desc(causal=True, scale=scale), dtype, slack=4.0)

    def test_dropout_drops_the_pairs_that_the_generator_names(self):
        for dtype in (BF16, F16, F32):
            for desc in (
                Desc(causal=True, dropout=0.25, seed=7),
                Desc(branches=[(100, 3)], dropout=0.5, seed=2**40 + 1),
                Desc(branches=[(90, 3)], offset="residue", causal=True, dropout=0.1, seed=3),
            ):
                for d in (64, 128):
                    self.case(2, 200, 200, 4, 2, d, desc, dtype, slack=2.0)
        self.case(1, 200, 200, 2, 1, 64, Desc(causal=True, key_end=[150], dropout=0.25, seed=11), BF16, poison=True, slack=2.0)

    def test_the_same_call_twice_gives_the_same_bits(self):
        for dtype, d in [(F32, 64)] + [(BF16, d) for d in SHAPES]:
            for desc in (Desc(causal=True), Desc(branches=[(128, 1), (256, 2)], combine="mix")):
                given = self.inputs(1, 600, 600, 4, 2, d, desc, dtype, False, False)
                first = self.backward(*given, desc, sums=len(desc.branches) > 1)
                for _ in range(5):
                    for a, b in zip(first, self.backward(*given, desc, sums=len(desc.branches) > 1)):
                        self.assertTrue(torch.equal(a, b))

    # -------------------------------------------------------------------------------------------------------- strides

    def test_rows_may_lie_anywhere(self):
        desc = Desc(branches=[(128, 1), (256, 2)], causal=True)
        for dtype, d in itertools.product((BF16, F32), (64,) if SMALL else (64, 192, 256)):
            for build in (
                lambda: draw(1, 4, 300, d, dtype).transpose(1, 2),
                lambda: draw(1, 300, 4, d + 4, dtype)[..., :d],
                lambda: draw(1, 301, 4, d, dtype).view(-1)[1 : 1 + 300 * 4 * d].view(1, 300, 4, d),
            ):
                q, k, v, dout = build(), build(), build(), build()
                out, lse, _, _ = reference(q, k, v, desc)
                lse = lse.float()
                found = self.backward(q, k, v, out.to(dtype), lse, dout, None, desc)
                self.hold(found, q, k, v, dout, None, desc)

    def test_the_general_kernels_meet_the_bound_wherever_a_fast_one_runs(self):
        with kernel("sm80"):
            for d in (64, 128) if SMALL else (64, 128, 192, 256):
                self.case(2, 200, 300, 4, 2, d, Desc(causal=True))
                self.assertEqual(backend.path, "sm80")

    @unittest.skipIf(DEVICE == "cpu", "needs a GPU")
    def test_a_captured_graph_replays_the_step_on_new_data(self):
        desc = Desc(branches=[(256, 2), (0, 1)], causal=True)
        q, k, v, out, lse, dout, _ = self.inputs(1, 700, 700, 4, 4, 64, desc, BF16, False, False)
        delta = torch.empty_like(lse)
        results = [torch.zeros_like(x) for x in (q, k, v)]
        backend.delta(backend.problem(q, k, desc), dout, out, None, delta)
        step = backend.prepare_backward(q, k, v, desc, lse, dout, delta, results)
        backend.run(step)
        expected = [x.clone() for x in results]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.run(step)
        for x in results:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(results, expected):
            self.assertTrue(torch.equal(got, want))


if __name__ == "__main__":
    unittest.main()
