"""The CUDA forward kernels against the definition in float64. Needs a GPU and PyTorch:

    RINGATTN_CUDA_LIBRARY=build/libringattn_cuda.so python3 -m unittest discover -s tests/gpu"""

import math
import unittest

from kit import BF16, DEVICE, F16, F32, HOPPER, LSE_BOUND, OUT_BOUND, SMALL, backend, draw, kernel, torch  # isort: skip
from definition import Desc, kept_pairs
from forward_case import ForwardCase


def launches(run):
    """How many forward kernels `run` starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum("forward_" in event.name for event in profile.events())


class Forward(ForwardCase):
    # ------------------------------------------------------------------------------------------------ sizes and types

    def test_every_head_dimension_and_type_meets_its_bound(self):
        for d in (64, 96, 128, 192, 256) + (() if SMALL else (8, 24, 40, 72, 104, 136, 200, 248)):
            for dtype in (BF16, F16, F32):
                self.case(1, 300, 420, 2, 1, d, Desc(), dtype)
                self.case(1, 300, 420, 2, 1, d, Desc(causal=True), dtype)

    def test_head_dimensions_that_are_no_multiple_of_eight_run_too(self):
        for d in (1, 3, 63, 65, 127, 129, 255):
            for dtype in (BF16, F16, F32):
                self.case(1, 100, 150, 2, 1, d, Desc(causal=True), dtype)

    def test_lengths_around_the_tiles_meet_the_bound(self):
        for n in (1, 65, 128, 193, 353) if SMALL else (1, 2, 63, 64, 65, 127, 128, 129, 175, 176, 177, 191, 192, 193, 353):
            for d in (64, 128):
                self.case(1, n, n, 1, 1, d, Desc(causal=True))
                self.case(1, 1, n, 2, 1, d, Desc())

    @unittest.skipIf(SMALL, "small run")
    def test_long_sequences_meet_the_bound_in_sampled_rows(self):
        for d, causal, dtype in ((64, False, BF16), (128, True, BF16), (128, False, F16), (128, True, F32)):
            n = 65536 if dtype != F32 else 16384
            q, k, v = (draw(1, n, 2, d, dtype) for _ in range(3))
            desc = Desc(causal=causal)
            out, lse = self.forward(q, k, v, desc)
            rows = sorted(torch.randint(0, n, (48,)).tolist() + [0, n - 1])
            self.hold(q, k, v, desc, out, lse, rows)

    @unittest.skipIf(SMALL, "small run")
    def test_every_block_of_many_causal_heads_is_computed(self):
        """Heavy blocks are dealt head by head, light ones of all heads behind them: none may be forgotten."""
        for d in (64, 96, 128, 192, 256):
            n, h, desc = 4100, 30, Desc(causal=True)
            q, k, v = (draw(1, n, h, d, BF16) for _ in range(3))
            out, lse = self.forward(q, k, v, desc)
            self.assertFalse(out.isnan().any() or lse.isnan().any(), "a row was not written")
            self.hold(q, k, v, desc, out, lse, sorted(torch.randint(0, n, (24,)).tolist() + list(range(0, n, 64))))

    @unittest.skipIf(SMALL or not HOPPER, "small run, or no Hopper GPU")
    def test_blocks_of_every_shape_meet_the_bound_in_sampled_rows(self):
        """Launches for which the host chooses each of the shapes that it has for a head dimension."""
        shapes = ((64, 65536, 4, 512), (64, 16384, 12, 0), (128, 65536, 4, 512), (128, 2048, 16, 0), (128, 16384, 12, 0))
        for d, n, h, w in shapes:
            for causal in (False, True):
                q, k, v = (draw(1, n, h, d, BF16) for _ in range(3))
                desc = Desc(branches=[(w, 1)], causal=causal)
                out, lse = self.forward(q, k, v, desc)
                self.assertEqual(backend.path, "sm90a")
                self.hold(q, k, v, desc, out, lse, sorted(torch.randint(0, n, (48,)).tolist() + [0, n - 1]))

    # ---------------------------------------------------------------------------------------------------------- masks

    def test_windows_ranges_and_unequal_lengths_meet_the_bound(self):
        for dtype in (BF16, F32):
            for d in (64, 128):
                self.case(2, 500, 700, 2, 1, d, Desc(window=(100, 50)), dtype)
                self.case(1, 300, 300, 2, 2, d, Desc(window=(0, 0)), dtype)
                self.case(1, 700, 300, 2, 1, d, Desc(causal=True), dtype)
                self.case(3, 300, 700, 2, 1, d, Desc(key_begin=[0, 100, 650], key_end=[700, 300, 650]), dtype)

    def test_more_batch_entries_than_a_launch_holds_ranges_for(self):
        begin = [i % 40 for i in range(70)]
        self.case(70, 60, 90, 2, 1, 64, Desc(key_begin=begin, key_end=[90 - i for i in begin]))

    def test_a_nan_in_a_masked_key_reaches_no_result(self):
        for dtype in (BF16, F16, F32):
            for d in (64, 128):
                desc = Desc(causal=True, key_begin=[0, 100, 333], key_end=[700, 300, 650])
                self.case(3, 700, 700, 2, 1, d, desc, dtype, poison=True)
                self.case(3, 700, 700, 2, 1, d, desc, dtype, poison=True, state=True)

    def test_a_nan_in_an_attended_value_reaches_exactly_the_rows_that_attend_to_it(self):
        for dtype in (BF16, F32):
            q, k, v = (draw(1, 400, 2, 64, dtype) for _ in range(3))
            v[0, 250, 1] = math.nan
            desc = Desc(causal=True)
            out, lse = self.forward(q, k, v, desc)
            self.assertFalse(out[0, :250].isnan().any())
            self.assertTrue(out[0, 250:, 1].isnan().all())
            self.assertFalse(out[0, :, 0].isnan().any())

    # ------------------------------------------------------------------------------------------------------- patterns

    def test_dilated_patterns_meet_the_bound_and_fill_their_holes(self):
        for dtype in (BF16, F32):
            for d in (64, 128):
                for causal in (False, True):
                    self.case(
                        2, 1000, 1000, 6, 3, d, Desc(branches=[(128, 1), (256, 2), (512, 4)], causal=causal), dtype, poison=True
                    )
                    self.case(1, 1003, 1003, 6, 6, d, Desc(branches=[(100, 3), (333, 5)], causal=causal), dtype, poison=True)
                    self.case(1, 703, 1003, 4, 4, d, Desc(branches=[(100, 3), (0, 7)], causal=causal), dtype, poison=True)

    def test_queries_off_the_lattice_read_its_keys_when_they_are_not_dilated(self):
        for causal in (False, True):
            for window in ((-1, -1), (40, 30)):
                desc = Desc(branches=[(100, 3), (333, 5)], causal=causal, window=window, dilate_queries=False)
                self.case(1, 1003, 1003, 6, 6, 64, desc, poison=True)

    def test_residues_and_offsets_by_head_meet_the_bound(self):
        for dtype in (BF16, F32):
            for causal in (False, True):
                self.case(2, 1003, 1003, 4, 2, 64, Desc(branches=[(100, 3), (333, 5)], causal=causal, offset="residue"), dtype)
                self.case(1, 1003, 1003, 4, 2, 128, Desc(branches=[(0, 4)], causal=causal, offset="residue"), dtype)
                self.case(2, 1003, 1003, 8, 8, 64, Desc(branches=[(100, 3)], causal=causal, offset="head"), dtype, poison=True)
                self.case(
                    2, 1003, 1003, 8, 4, 64, Desc(branches=[(100, 3)], causal=causal, offset="head-block"), dtype, poison=True
                )

    def test_branches_mix_into_one_softmax_through_the_state(self):
        for dtype in (BF16, F16, F32):
            for causal in (False, True):
                desc = Desc(branches=[(128, 1), (256, 2), (512, 4)], combine="mix", causal=causal)
                self.case(2, 1003, 1003, 4, 2, 64, desc, dtype, state=True)

    def test_rows_of_no_branch_share_the_room_of_those_that_have_one(self):
        """Mixed branches of rates 4 and 8 on one lattice: three of four rows are skipped, hold Inf, and have no state."""
        n, h = 500, 4
        for dtype in (BF16, F16):
            for d in (64, 128):
                for causal in (False, True):
                    desc = Desc(branches=[(128, 4), (256, 8)], combine="mix", offset="head-block", causal=causal)
                    # one KV head, so that head-block gives every branch the offset 0
                    q, k, v = draw(2, n, h, d, dtype), draw(2, n, 1, d, dtype), draw(2, n, 1, d, dtype)
                    for t in (q, k, v):
                        t[:, torch.arange(n) % 4 != 0] = math.inf
                    used = [((0, 4, n // 4), (0, 1, h))]
                    for wanted in (None, "sm80"):
                        with self.subTest(dtype=dtype, d=d, causal=causal, wanted=wanted), kernel(wanted):
                            out, lse = self.forward(q, k, v, desc, state=True, used=used)
                            clean = torch.where(torch.isinf(q), 0.0, q.double()).to(dtype)
                            self.hold(clean, k, v, desc, out, lse)

    def test_the_largest_finite_scores_are_scores(self):
        n, d = 200, 64
        for dtype in (BF16, F32):
            for top in (1e6, 1.7e9, 3e12, 2.9e38):
                for sign in (1, -1):
                    for wanted in (None, "sm80"):
                        with self.subTest(dtype=dtype, top=top, sign=sign, wanted=wanted), kernel(wanted):
                            scale = 1.3  # no power of two, and scores reach further than products
                            each = (top / scale) ** 0.5
                            q = torch.zeros(1, n, 1, d, device=DEVICE, dtype=dtype)
                            k = torch.zeros(1, n, 1, d, device=DEVICE, dtype=dtype)
                            v = draw(1, n, 1, d, dtype)
                            q[..., 0] = each
                            k[..., 0] = sign * each  # all alike: the mean of the values, and a score below or above zero
                            desc = Desc(causal=True, scale=scale)
                            out, lse = self.forward(q, k, v, desc)
                            count = torch.arange(1, n + 1, device=DEVICE, dtype=torch.float64)[None, :, None]
                            score = sign * scale * q[..., :1].double()[0, 0, 0] * k[..., :1].double().abs()[0, 0, 0]
                            self.assertTrue(torch.isfinite(lse).all(), "scores taken for no keys")
                            error = (lse.double() - score - count.log()).abs().max().item()
                            self.assertLessEqual(error, LSE_BOUND[dtype] * top)
                            mean = v.double().cumsum(1) / count[..., None]
                            error = (out.double() - mean).abs().max().item()
                            self.assertLessEqual(error, OUT_BOUND[dtype] * v.double().abs().max().item())

    @unittest.skipUnless(HOPPER, "needs a Hopper GPU")
    def test_branches_that_meet_the_same_rows_take_turns_within_one_launch(self):
        n = 3000 if SMALL else 20000
        for d in (64, 128):
            for causal in (False, True):
                q, k, v = draw(1, n, 8, d, BF16), draw(1, n, 4, d, BF16), draw(1, n, 4, d, BF16)
                desc = Desc(branches=[(1024, 1), (2048, 2), (512, 1), (4096, 4)], combine="mix", causal=causal)
                first = self.forward(q, k, v, desc, state=True)
                self.assertEqual(backend.path, "sm90a")
                self.hold(q, k, v, desc, *first, rows=sorted(torch.randint(0, n, (48,)).tolist() + [0, n - 1]))
                for _ in range(1 if SMALL else 5):
                    for a, b in zip(first, self.forward(q, k, v, desc, state=True)):
                        self.assertTrue(torch.equal(a, b), "the order of the branches changed")
                if not SMALL:
                    self.assertEqual(launches(lambda: self.forward(q, k, v, desc, state=True)), 1)

    # -------------------------------------------------------------------------------------------------------- numbers

    def test_scores_that_outgrow_their_base_meet_the_bound(self):
        for spread in (2, 4, 8, 16):
            for dtype in (BF16, F16):
                for d in (64, 128, 256):
                    q, k, v = (draw(1, 1500, 2, d, dtype, spread if i < 2 else 1) for i in range(3))
                    k *= torch.rand(1, 1500, 2, 1, device=DEVICE, dtype=dtype)
                    for desc in (Desc(), Desc(causal=True)):
                        out, lse = self.forward(q, k, v, desc)
                        self.hold(q, k, v, desc, out, lse)

    def test_zero_queries_give_the_log_of_the_count_and_the_mean(self):
        for dtype in (BF16, F32):
            q = torch.zeros(1, 600, 2, 64, device=DEVICE, dtype=dtype)
            k, v = draw(1, 600, 2, 64, dtype), torch.ones(1, 600, 2, 64, device=DEVICE, dtype=dtype)
            out, lse = self.forward(q, k, v, Desc(causal=True))
            count = torch.arange(1, 601, device=DEVICE, dtype=torch.float64)[None, :, None]
            self.assertLess((lse.double() - count.log()).abs().max().item(), 2e-6 * 7)
            self.assertLess((out.double() - 1).abs().max().item(), 2e-7)

    def test_any_scale_runs(self):
        for scale in (-0.3, 0.0, 1.0):
            for dtype in (BF16, F32):
                self.case(1, 200, 300, 2, 1, 64, Desc(causal=True, scale=scale), dtype, slack=4.0)  # scores of tens

    def test_the_same_call_twice_gives_the_same_bits(self):
        for dtype in (BF16, F32):
            q, k, v = (draw(1, 1100, 4, 64, dtype) for _ in range(3))
            desc = Desc(branches=[(256, 2), (0, 1)], causal=True)
            first, second = self.forward(q, k, v, desc), self.forward(q, k, v, desc)
            for a, b in zip(first, second):
                self.assertTrue(torch.equal(a, b))

    # -------------------------------------------------------------------------------------------------------- dropout

    def test_dropout_drops_the_pairs_that_the_generator_names(self):
        for dtype in (BF16, F16, F32):
            for desc in (
                Desc(causal=True, dropout=0.25, seed=7),
                Desc(branches=[(100, 3)], dropout=0.5, seed=2**40 + 1),
                Desc(branches=[(90, 3)], offset="residue", causal=True, dropout=0.1, seed=3),
            ):
                for wanted in (None, "sm80"):
                    for d in (64, 128):
                        with self.subTest(dtype=dtype, wanted=wanted, d=d, **desc.text()), kernel(wanted):
                            q, k, v = draw(2, 300, 4, d, dtype), draw(2, 300, 2, d, dtype), draw(2, 300, 2, d, dtype)
                            out, lse = self.forward(q, k, v, desc)
                            self.hold(q, k, v, desc, out, lse, slack=2.0)

    def test_dropout_is_kept_where_a_masked_nan_makes_rows_be_recomputed(self):
        for dtype in (BF16, F32):
            for state in (False, True):
                desc = Desc(causal=True, key_end=[250], dropout=0.25, seed=11)
                self.case(1, 300, 300, 2, 1, 64, desc, dtype, poison=True, state=state, slack=2.0)

    def test_dropout_keeps_the_right_share(self):
        desc = Desc(dropout=0.3, seed=5)
        kept = kept_pairs(desc, 0, 0, 1000, 1000, range(1000), DEVICE)
        self.assertAlmostEqual(kept.double().mean().item(), 0.7, delta=0.003)

    # ---------------------------------------------------------------------------------------- which kernel, and how

    @unittest.skipUnless(HOPPER, "needs a Hopper GPU")
    def test_strides_choose_between_the_fast_and_the_general_kernel(self):
        desc = Desc(branches=[(128, 1), (256, 2)], causal=True)
        for build, path in (
            (lambda: draw(1, 700, 4, 64, BF16), "sm90a"),
            (lambda: draw(1, 4, 700, 64, BF16).transpose(1, 2), "sm90a"),
            (lambda: draw(1, 700, 4, 72, BF16)[..., :64], "sm90a"),
            (lambda: draw(1, 700, 4, 68, BF16)[..., :64], "sm80"),
            (lambda: draw(1, 701, 4, 64, BF16).view(-1)[1 : 1 + 700 * 256].view(1, 700, 4, 64), "sm80"),
        ):
            with self.subTest(path=path):
                q, k, v = build(), build(), build()
                out, lse = self.forward(q, k, v, desc)
                self.assertEqual(backend.path, path)
                self.hold(q, k, v, desc, out, lse)

    def test_the_general_kernel_meets_the_bound_wherever_the_fast_one_runs(self):
        with kernel("sm80"):
            for d in (64, 256) if SMALL else (64, 96, 128, 192, 256):
                for dtype in (BF16,) if SMALL else (BF16, F16):
                    self.case(2, 300, 420, 4, 2, d, Desc(causal=True), dtype, path="sm80")
                    self.case(
                        1, 503, 503, 4, 2, d, Desc(branches=[(100, 3), (128, 2)], causal=True), dtype, poison=True, path="sm80"
                    )
                    self.case(1, 300, 420, 2, 1, d, Desc(window=(70, 5)), dtype, state=True, path="sm80")

    def test_a_kernel_that_does_not_take_the_step_says_why(self):
        with kernel("sm90a"):
            for dtype, d, reason in (
                (F32, 64, "bf16 and f16 only"),
                (BF16, 63, "multiple of 8"),
                (BF16, 64, "multiples of 16|strides"),
            ):
                wide = draw(1, 100, 2, d + 4 * (d == 64), dtype)[..., :d]
                with (
                    self.subTest(reason=reason),
                    self.assertRaisesRegex(RuntimeError, f"status 8.*({reason if HOPPER else '9.0'})"),
                ):
                    self.forward(wide, wide, wide, Desc())

    @unittest.skipUnless(HOPPER, "needs a Hopper GPU")
    def test_blocks_of_few_keys_follow_each_other(self):
        """Blocks of one and of several key tiles, whole, half and empty, one after the other through the same barriers."""
        for d in (64, 96, 128, 192, 256):
            for desc in (
                Desc(branches=[(64, 1), (200, 1), (512, 1)], causal=True),
                Desc(branches=[(512, 1)], window=(130, 0)),
                Desc(branches=[(512, 1)], window=(0, 300)),
                Desc(branches=[(512, 2)], causal=True, key_begin=[600, 0]),
            ):
                self.case(2 if desc.key_begin else 1, 4096, 4096, 6, 3, d, desc, path="sm90a")

    def in_steps(self, q, k, v, parts):
        """The keys of each part in a step of its own, into one state."""
        b, n, h, d = q.shape
        acc = torch.full((b, n, h, d), math.nan, device=DEVICE)
        m, sums = (torch.empty(b, h, n, device=DEVICE).transpose(1, 2) for _ in range(2))
        out, lse = torch.empty_like(q), torch.empty(b, h, n, device=DEVICE).transpose(1, 2)
        desc = Desc()
        backend.fill(backend.prepare(q, k, v, desc, out, lse, (acc, m, sums)))
        for part in parts:
            backend.run(backend.prepare(q, k[:, part], v[:, part], desc, out, lse, (acc, m, sums)))
        backend.finish(backend.prepare(q, k, v, desc, out, lse, (acc, m, sums)))
        backend.synchronize()
        self.hold(q, k, v, desc, out, lse)

    def test_steps_continue_from_the_state_of_earlier_ones(self):
        parts = [slice(first, min(first + 250, 900)) for first in range(0, 900, 250)]
        for dtype in (BF16, F16, F32):
            for d in (40, 64, 96, 128, 192, 256):
                q, k, v = (draw(1, 900, 2, d, dtype) for _ in range(3))
                self.in_steps(q, k, v, parts)

    def test_scores_may_rise_and_fall_from_step_to_step(self):
        """Some rows outgrow what their state is relative to, by a little or by far, and others do not."""
        parts = [slice(first, first + 150) for first in range(0, 900, 150)]
        for dtype in (BF16, F16):
            for d in (40, 64, 128, 256):
                q, k, v = (draw(1, 900, 2, d, dtype) for _ in range(3))
                for part, spread in zip(parts, (1, 2, 0.1, 5, 3, 8)):
                    k[:, part] *= spread
                q[:, ::3] *= 0.1
                self.in_steps(q, k, v, parts)

    @unittest.skipIf(DEVICE == "cpu", "needs a GPU")
    def test_a_captured_graph_replays_the_step_on_new_data(self):
        q, k, v = (draw(1, 5000, 4, 128, BF16) for _ in range(3))
        rows = sorted(torch.randint(0, 5000, (20,)).tolist())
        self.replay(q, k, v, Desc(branches=[(1024, 2), (0, 1)], causal=True), rows)


if __name__ == "__main__":
    unittest.main()
