"""Messages of a CUDA module: what it packs, adds, merges and spoils, against torch."""

import ctypes as C
import unittest

from kit import BF16, DEVICE, F16, F32, backend, draw, torch  # isort: skip
from backend import DTYPES
from definition import philox

BATCH, ROWS, HEADS = 2, 37, 3
# first head, their step and number; first row, repeats and their step, rows and their step
BOXES = ((0, 1, 3, 0, 1, 0, 37, 1), (1, 1, 2, 3, 2, 17, 5, 3), (0, 2, 2, 36, 1, 0, 1, 1), (2, 1, 1, 1, 3, 12, 2, 6))


def make_box(dim, head, head_step, heads, first, repeats, repeat_step, rows, row_step):
    box = backend.structs["ra_box"](BATCH, backend.structs["ra_span"](head, head_step, heads), first, repeats, repeat_step)
    box.rows, box.row_step, box.dim = rows, row_step, dim
    index = [first + r * repeat_step + i * row_step for r in range(repeats) for i in range(rows)]
    return box, torch.tensor(index, device=DEVICE), range(head, head + heads * head_step, head_step)


def views(d, dtype):
    """Tensors of the same rows that lie differently: in vectors of 16 bytes, beside other data, and by head."""
    yield draw(BATCH, ROWS, HEADS, d, dtype)
    yield draw(BATCH, ROWS, HEADS, d + 3, dtype)[..., :d]
    yield draw(BATCH, HEADS, ROWS, d, dtype).transpose(1, 2)


def generated(seed, tensor, index):
    """The elements of a generated tensor at these places, in float32."""
    pair = index >> 1
    words = philox(seed, pair & 0xFFFFFFFF, pair >> 32, torch.full_like(pair, tensor), torch.full_like(pair, 0x64617461))
    a, b = (torch.where(index % 2 == 0, words[i], words[i + 2]) for i in range(2))
    total = (a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16) - 2 * 65535
    return total.float() * torch.tensor(2.6429e-5, device=DEVICE)


class Messages(unittest.TestCase):
    def each_box(self, dtypes):
        for dtype in dtypes:
            for d in (1, 5, 8, 64, 128):
                for t in views(d, dtype):
                    for shape in BOXES:
                        with self.subTest(dtype=dtype, d=d, strides=t.stride(), shape=shape):
                            yield t, *make_box(d, *shape)

    def test_a_box_is_packed_in_order(self):
        for t, box, rows, heads in self.each_box((BF16, F16, F32)):
            want = t[:, rows][:, :, list(heads)].transpose(1, 2).contiguous()
            packed = torch.full((want.numel() + 1,), -1, dtype=t.dtype, device=DEVICE)
            dtype = backend.seam.numbers[{BF16: "RA_BF16", F16: "RA_F16", F32: "RA_F32"}[t.dtype]]
            backend.seam.call("pack", dtype, C.byref(box), backend.tensor(t), packed.data_ptr(), backend.stream())
            backend.synchronize()
            self.assertTrue(torch.equal(packed[:-1], want.flatten()))
            self.assertEqual(packed[-1].item(), -1)

    def test_what_comes_home_is_added_to_its_rows_alone(self):
        for t, box, rows, heads in self.each_box((F32,)):
            want = t.clone()
            packed = draw(BATCH, len(heads), len(rows), t.shape[3], F32)
            for i, head in enumerate(heads):
                want[:, rows, head] += packed[:, i]
            backend.seam.call("unpack_add", C.byref(box), packed.data_ptr(), backend.tensor(t), backend.stream())
            backend.synchronize()
            self.assertTrue(torch.equal(t, want))

    def test_sums_are_added_and_cleared(self):
        for count in (1, 4, 1023, 4096, 100001):
            sums, more = torch.randn(count + 4, device=DEVICE), torch.randn(count + 4, device=DEVICE)
            for first in (0, 1):  # at multiples of 16 bytes, and not
                want = sums.clone()
                want[first : first + count] += more[first : first + count]
                pointers = sums[first:].data_ptr(), more[first:].data_ptr()
                backend.seam.call("add", *pointers, count, backend.stream())
                backend.synchronize()
                self.assertTrue(torch.equal(sums, want))
            backend.seam.call("clear", sums.data_ptr(), 4 * count, backend.stream())
            backend.synchronize()
            self.assertEqual(sums[:count].abs().max().item(), 0)
            self.assertTrue(torch.equal(sums[count:], want[count:]))

    def test_states_merge_and_empty_ones_are_neutral(self):
        for d in (1, 33, 64, 128):
            q = draw(BATCH, ROWS, HEADS, d, BF16)
            problem = backend.structs["ra_problem"]()
            problem.dtype, problem.batch, problem.heads = backend.seam.numbers["RA_BF16"], BATCH, HEADS
            problem.kv_heads, problem.head_dim, problem.rows_q = HEADS, d, ROWS
            blocks, parts = [], []
            for which in range(2):
                acc = torch.randn(BATCH, ROWS, HEADS, d, device=DEVICE)
                m, l = torch.randn(BATCH, HEADS, ROWS, device=DEVICE) * 9, torch.rand(BATCH, HEADS, ROWS, device=DEVICE) + 0.1
                empty = torch.arange(ROWS, device=DEVICE) % 4 // (1 + which) % 2 == 1
                m[..., empty], l[..., empty] = -torch.inf, 0
                acc.transpose(1, 2)[:, :, empty] = torch.nan
                blocks.append(torch.cat([acc.flatten(), m.flatten(), l.flatten()]))
                parts.append([x.double() for x in (acc, m, l)])
            backend.seam.call("merge_states", C.byref(problem), blocks[0].data_ptr(), blocks[1].data_ptr(), backend.stream())
            backend.synchronize()
            numbers = q.numel()
            acc, (m, l) = blocks[0][:numbers].view(q.shape), blocks[0][numbers:].view(2, BATCH, HEADS, ROWS)
            top = torch.maximum(parts[0][1], parts[1][1])
            weights = [torch.where(part[1] == -torch.inf, 0, torch.exp(part[1] - top)) for part in parts]
            self.assertTrue(torch.equal(m.double(), top))
            want_l = sum(w * part[2] for w, part in zip(weights, parts))
            self.assertLess((l - want_l).abs().max().item(), 1e-5)
            want = sum(w.transpose(1, 2)[..., None] * part[0].nan_to_num() for w, part in zip(weights, parts))
            met = (want_l > 0).transpose(1, 2)
            self.assertLess((acc - want)[met].abs().max().item(), 1e-5)

    def test_generated_rows_are_functions_of_their_place(self):
        rows_of, span = backend.structs["ra_row_set"], backend.structs["ra_rows"]
        total = 3 << 33  # rows of the tensor: indices beyond 32 bits
        for dtype in (BF16, F16, F32):
            for d in (1, 5, 64, 128):
                for far in (0, total // 2):
                    whole = backend.structs["ra_generated"](12345 << 32 | 678, 2, BATCH, total, HEADS, d)
                    whole.dtype = backend.seam.numbers[DTYPES[dtype]]
                    for head, step, heads, first, repeats, repeat_step, rows, row_step in BOXES:
                        which = rows_of(span(head, step, heads), span(far + first, row_step, rows), repeats, repeat_step)
                        made = torch.full((BATCH, heads, repeats * rows, d + 2), -9, dtype=dtype, device=DEVICE)
                        to = backend.structs["ra_tensor"](made.data_ptr(), made.stride(0), made.stride(2), made.stride(1))
                        backend.seam.call("generate", C.byref(whole), C.byref(which), to, backend.stream())
                        backend.synchronize()
                        _, box_rows, box_heads = make_box(d, head, step, heads, first, repeats, repeat_step, rows, row_step)
                        at = torch.arange(BATCH, device=DEVICE)[:, None, None, None] * total + far + box_rows[None, None, :, None]
                        at = at * HEADS + torch.tensor(list(box_heads), device=DEVICE)[None, :, None, None]
                        want = generated(whole.seed, 2, at * d + torch.arange(d, device=DEVICE))
                        self.assertTrue(torch.equal(made[..., :d], want.to(dtype)))
                        self.assertTrue((made[..., d:] == -9).all().item())

    def test_results_are_spoiled(self):
        for dtype in (BF16, F16, F32):
            t = draw(BATCH, ROWS, HEADS, 40, dtype)[..., :33]
            problem = backend.structs["ra_problem"]()
            problem.dtype = backend.seam.numbers[{BF16: "RA_BF16", F16: "RA_F16", F32: "RA_F32"}[dtype]]
            problem.batch, problem.head_dim = BATCH, 33
            backend.seam.call("spoil", C.byref(problem), backend.tensor(t), ROWS, HEADS, backend.stream())
            backend.synchronize()
            self.assertTrue(t.isnan().all().item())


if __name__ == "__main__":
    unittest.main()
