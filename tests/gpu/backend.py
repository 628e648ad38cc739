"""Steps of libringattn_cuda.so for one rank: work items made here, from progressions, and the functions that run them.

The module's device is a GPU, or the CPU where it is the stand-in of the tests."""

import ctypes as C
import math

import torch
from seam import Seam

DTYPES = {torch.float32: "RA_F32", torch.bfloat16: "RA_BF16", torch.float16: "RA_F16"}
i64 = C.c_int64


def progressions(values):
    """Ascending numbers as progressions (start, step, count)."""
    out, values = [], list(values)
    while values:
        step = values[1] - values[0] if len(values) > 1 else 1
        n = 1
        while n < len(values) and values[n] - values[n - 1] == step:
            n += 1
        out.append((values[0], step, n))
        values = values[n:]
    return out


def make_items(backend, desc, nq, nk, kv_heads, views):
    """Work items of one rank that holds everything; views as Backend.item takes them."""
    shift, items = nk - nq, []
    for i, (w, r) in enumerate(desc.branches):
        by_offset = {}
        for h in desc.heads_of(i, kv_heads):
            by_offset.setdefault(desc.offset_of(i, h, kv_heads), []).append(h)
        for o, heads in by_offset.items():
            segments = [0] if w == 0 else range(max(0, shift) // w, (max(nk, 1) - 1) // w + 1)
            shapes = []  # per segment: list of (q first, q step, q count, k first, k count, residues), relative to its start
            for s in segments:
                first, end = (0, nk) if w == 0 else (s * w, min((s + 1) * w, nk))
                q_first = shift if w == 0 else max(first, shift)
                shape = []
                for res in range(min(r, max(end - first, -q_first + nk))) if o is None else [o]:
                    keys = range(first + res, end, r)
                    if o is None or desc.dilate_queries:
                        start = q_first + (res - (q_first - first)) % r
                        queries = range(start, end, r)
                    else:
                        queries = range(q_first, end)
                    if len(keys) == 0 or len(queries) == 0:
                        continue
                    entry = (queries[0] - first, queries.step, len(queries), keys[0] - first, len(keys))
                    last = shape[-1] if shape else None
                    if (
                        last
                        and entry[1:3] == last[1:3]
                        and entry[4] == last[4]
                        and entry[0] - last[0] == last[5]
                        and entry[3] - last[3] == last[5]
                    ):
                        shape[-1] = last[:5] + (last[5] + 1,)
                    else:
                        shape.append(entry + (1,))
                shapes.append((first, tuple(shape)))
            at = 0
            while at < len(shapes):
                n = 1
                while at + n < len(shapes) and shapes[at + n][1] == shapes[at][1]:
                    n += 1
                first = shapes[at][0]
                for qf, qs, qn, kf, kn, residues in shapes[at][1]:
                    for start, step, count in progressions(heads):
                        q = (first + qf - shift, qs, first + qf, qs, qn)
                        k = (first + kf, r, first + kf, r, kn)
                        loops = (n, w, w, w, w, w), (residues, 1, 1, 1, 1, 0)
                        items.append(backend.item(i, (start, step, count), q, k, loops, first, r, views))
                at += n
    return items


class Backend:
    def __init__(self, path):
        self.seam = Seam(path)
        self.structs = self.seam.structs
        gpu = self.structs["ra_cuda_device"]()
        self.seam.call("probe", C.byref(gpu))
        self.name = gpu.name.decode()
        self.device = "cpu" if self.name.startswith("stand-in") else "cuda"
        self.hopper = (gpu.major, gpu.minor) == (9, 0)
        self.path = self.wanted = None  # the kernel that ran, and the one that shall run: "sm90a", "sm80" or None

    # ------------------------------------------------------------------------------------------------------------- structs

    def tensor(self, t):
        """[B, N, H, D], or [B, N, H] for lse, m and l, in any strides."""
        return self.structs["ra_tensor"](t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))

    def by_index(self, t, start, step):
        """A tensor as an item sees it: by the number of the head among its own."""
        view = self.tensor(t)
        view.data += start * t.stride(2) * t.element_size()
        view.head = t.stride(2) * step
        return view

    def item(self, branch, heads, q, k, loops, origin, rate, views):
        """views: tensors of all KV heads by the names of their fields."""
        it = self.structs["ra_item"]()
        it.branch, it.origin, it.rate = branch, origin, rate
        it.heads = self.structs["ra_span"](*heads)
        it.q, it.k = self.structs["ra_item_rows"](*q), self.structs["ra_item_rows"](*k)
        for i, loop in enumerate(loops):
            it.loop[i] = self.structs["ra_item_loop"](*loop)
        for name, t in views.items():
            setattr(it, name, self.by_index(t, *heads[:2]))
        return it

    def problem(self, q, k, desc):
        b, nq, h, d = q.shape
        p = self.structs["ra_problem"]()
        p.dtype, p.batch, p.heads, p.kv_heads = self.seam.numbers[DTYPES[q.dtype]], b, h, k.shape[2]
        p.head_dim, p.rows_q, p.keys = d, nq, 0
        p.scale = 1 / math.sqrt(d) if desc.scale is None else desc.scale
        p.left, p.right, p.dropout, p.seed = desc.left, desc.right, desc.dropout, desc.seed
        if desc.key_begin is not None:
            p.key_begin = (i64 * b)(*desc.key_begin)
        if desc.key_end is not None:
            p.key_end = (i64 * b)(*desc.key_end)
        return p

    def used_rows(self, sets):
        """sets: ((start, step, count) of rows, the same of heads); None: all rows."""
        used, span = self.structs["ra_used_rows"](), self.structs["ra_span"]
        used.modulus = 1
        if sets:
            array = (self.structs["ra_used"] * len(sets))(*((span(*rows), span(*heads)) for rows, heads in sets))
            used.sets, used.count = array, len(sets)
            used.keep = array
        return used

    def scratch(self, problem, backward):
        return torch.zeros(max(1, self.seam.scratch(C.byref(problem), backward)), dtype=torch.uint8, device=self.device)

    def step(self, kind, q, k, desc, views, **tensors):
        """A step that can be run again and again."""
        s, p = self.structs[kind](), self.problem(q, k, desc)
        items = make_items(self, desc, q.shape[1], k.shape[1], k.shape[2], views)
        array = (self.structs["ra_item"] * max(1, len(items)))(*items)
        scratch = self.scratch(p, kind == "ra_backward_step")
        s.problem, s.items, s.item_count, s.scratch = C.pointer(p), array, len(items), scratch.data_ptr()
        s.q = self.tensor(q)
        for name, t in tensors.items():
            if t is not None:
                setattr(s, name, self.tensor(t))
        s.keep = (p, array, scratch, views, tensors, q)
        return s

    def prepare(self, q, k, v, desc, out, lse=None, state=None, used=None):
        """lse: [B, N, H] view. state: (acc, m, l), or None for a single step. used: as used_rows takes it."""
        acc, m, l = state or (None, None, None)
        views = {"k_view": k, "v_view": v}
        s = self.step("ra_forward_step", q, k, desc, views, out=out, lse=lse, acc=acc, m=m, l=l)
        s.single = s.closes = state is None
        s.used = self.used_rows(used)
        s.keep += (s.used,)
        return s

    def prepare_backward(self, q, k, v, desc, lse, dout, delta, results, sums=None):
        """results and sums: (dq, dk, dv); with sums the step is not single."""
        names = ("dq", "dk_result", "dv_result"), ("dq_acc", "dk_view", "dv_view")
        given = dict(zip(names[1], sums)) if sums else dict(zip(names[0], results))
        views = {"k_view": k, "v_view": v} | {name: t for name, t in given.items() if name not in ("dq", "dq_acc")}
        rows = {name: t for name, t in given.items() if name in ("dq", "dq_acc")}
        s = self.step("ra_backward_step", q, k, desc, views, lse=lse, dout=dout, delta=delta, **rows)
        s.single = s.zeroed = sums is None
        return s

    # ------------------------------------------------------------------------------------------------------------- running

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None

    def synchronize(self):
        self.seam.call("synchronize", self.stream())

    def run(self, step):
        path = C.c_char_p()
        step.stream = self.stream()
        function = "backward" if type(step).__name__ == "ra_backward_step" else "forward"
        self.seam.call(function, C.byref(step), self.wanted.encode() if self.wanted else None, C.byref(path))
        self.path = path.value.decode() if path.value else None

    def fill(self, step):
        step.stream = self.stream()
        self.seam.call("fill", C.byref(step))

    def finish(self, step):
        step.stream = self.stream()
        self.seam.call("finish", C.byref(step))

    def delta(self, problem, dout, out, dlse, delta, used=None):
        dlse = self.tensor(dlse) if dlse is not None else self.structs["ra_tensor"]()
        tensors = (self.tensor(dout), self.tensor(out), dlse, self.tensor(delta))
        self.seam.call("delta", C.byref(problem), C.byref(self.used_rows(used)), *tensors, self.stream())

    def zero(self, problem, t, used=None, gaps=False):
        rows, heads = t.shape[1], t.shape[2]
        used = self.used_rows(used)
        self.seam.call(
            "zero", C.byref(problem), C.byref(used), gaps, self.tensor(t), t.element_size(), rows, heads, self.stream()
        )

    def convert(self, problem, to, sums, used=None):
        rows, heads = to.shape[1], to.shape[2]
        used = self.used_rows(used)
        self.seam.call(
            "convert", C.byref(problem), C.byref(used), self.tensor(to), self.tensor(sums), rows, heads, self.stream()
        )
