"""One forward step against the definition in float64."""

import math
import unittest

from kit import BF16, DEVICE, LSE_BOUND, OUT_BOUND, backend, draw, torch, unread  # isort: skip
from definition import reference


class ForwardCase(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(hash(self.id()) % 2**31)

    def forward(self, q, k, v, desc, state=False, used=None):
        """(out, lse [B, N, H]) with guard rows around both, which must stay untouched. used: rows as used_rows takes them; the
        state of the others is another's, or nobody's."""
        b, nq, h, d = q.shape
        out = torch.full((b, nq + 2, h, d), math.nan, device=DEVICE, dtype=q.dtype)
        lse = torch.full((b, h, nq + 2), math.nan, device=DEVICE)
        o, log = out[:, 1 : nq + 1], lse.transpose(1, 2)[:, 1 : nq + 1]
        if state:
            acc = torch.full((b, h, nq, d), math.nan, device=DEVICE).transpose(1, 2)
            if used:  # of four rows one is used, and its sums take the room of all
                acc = torch.full((b, h, nq // 4 + 2, d), math.nan, device=DEVICE).as_strided(
                    (b, nq, h, d), (h * (nq // 4 + 2) * d, d // 4, (nq // 4 + 2) * d, 1)
                )
            m, s = (torch.full((b, h, nq), math.nan, device=DEVICE).transpose(1, 2) for _ in range(2))
            step = backend.prepare(q, k, v, desc, o, log, (acc, m, s), used)
            backend.fill(step)
            backend.run(step)
            backend.finish(step)
        else:
            backend.run(backend.prepare(q, k, v, desc, o, log))
        backend.synchronize()
        for guard in (out[:, 0], out[:, -1], lse[..., 0], lse[..., -1]):
            self.assertTrue(guard.isnan().all(), "a guard row was written")
        return o, log

    def hold(self, q, k, v, desc, out, lse, rows=None, slack=1.0):
        """out and lse are within the bounds of the definition, in the given rows."""
        want, want_lse, m_out, m_lse = reference(q, k, v, desc, rows)
        got, got_lse = (out, lse) if rows is None else (out[:, rows], lse[:, rows])
        empty = torch.isinf(want_lse)
        self.assertTrue(torch.equal(torch.isinf(got_lse), empty), "rows without keys")
        self.assertTrue((got[empty] == 0).all(), "out of rows without keys")
        self.assertTrue(torch.equal(got.isnan(), want.isnan()), "NaN where none belongs, or the other way round")
        error = torch.nan_to_num(got.double() - want).abs().max().item() if got.numel() else 0.0
        self.assertLessEqual(error, slack * OUT_BOUND[q.dtype] * m_out)
        error = (got_lse.double() - want_lse)[~empty & ~want_lse.isnan()]
        if error.numel():
            self.assertLessEqual(error.abs().max().item(), slack * LSE_BOUND[q.dtype] * m_lse)

    def case(self, b, nq, nk, h, hk, d, desc, dtype=BF16, state=False, poison=False, path=None, slack=1.0):
        with self.subTest(b=b, nq=nq, nk=nk, h=h, hk=hk, d=d, dtype=dtype, state=state, **desc.text()):
            q, k, v = draw(b, nq, h, d, dtype), draw(b, nk, hk, d, dtype), draw(b, nk, hk, d, dtype)
            if poison:
                nobody = unread(desc, b, nq, nk, h, hk)
                k[nobody], v[nobody] = math.nan, math.inf
            out, lse = self.forward(q, k, v, desc, state)
            if path:
                self.assertEqual(backend.path, path)
            self.hold(q, k, v, desc, out, lse, slack=slack)

    def replay(self, q, k, v, desc, rows=None):
        """A step that was captured into a graph computes on what its tensors hold when it is replayed."""
        b, nq, h, _ = q.shape
        out, lse = torch.empty_like(q), torch.empty(b, h, nq, device=DEVICE).transpose(1, 2)
        step = backend.prepare(q, k, v, desc, out, lse)
        backend.run(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.run(step)
        for _ in range(3):
            q.copy_(draw(*q.shape, q.dtype))
            out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            self.hold(q, k, v, desc, out, lse, rows)
