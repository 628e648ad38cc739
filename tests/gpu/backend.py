"""libringattn_cuda.so by ctypes, with work items made here for one rank, and the definition in float64 to hold it to.

The items and the definition are written apart from each other and from the library: the definition looks at pairs of positions,
the items at progressions."""

import ctypes as C
import math

import torch

NO_LIMIT = 2**63 - 1
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
i64 = C.c_int64


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("batch", i64), ("row", i64), ("head", i64)]


class Rows(C.Structure):
    _fields_ = [("row", i64), ("row_step", i64), ("pos", i64), ("pos_step", i64), ("count", i64)]


class Loop(C.Structure):
    _fields_ = [("repeat", i64), ("q_row", i64), ("q_pos", i64), ("k_row", i64), ("k_pos", i64), ("origin", i64)]


class Heads(C.Structure):
    _fields_ = [("start", i64), ("step", i64), ("count", i64)]


class Item(C.Structure):
    _fields_ = [
        ("branch", i64),
        ("heads", Heads),
        ("q", Rows),
        ("k", Rows),
        ("loop", Loop * 2),
        ("origin", i64),
        ("rate", i64),
        ("k_view", Tensor),
        ("v_view", Tensor),
        ("dk_view", Tensor),
        ("dv_view", Tensor),
    ]


class Problem(C.Structure):
    _fields_ = [
        ("dtype", C.c_int),
        ("batch", i64),
        ("heads", i64),
        ("kv_heads", i64),
        ("head_dim", i64),
        ("rows_q", i64),
        ("scale", C.c_double),
        ("left", i64),
        ("right", i64),
        ("key_begin", C.POINTER(i64)),
        ("key_end", C.POINTER(i64)),
        ("dropout", C.c_double),
        ("seed", C.c_uint64),
    ]


class Step(C.Structure):
    _fields_ = [
        ("problem", C.POINTER(Problem)),
        ("items", C.POINTER(Item)),
        ("item_count", i64),
        ("single", C.c_bool),
        ("q", Tensor),
        ("out", Tensor),
        ("lse", Tensor),
        ("acc", Tensor),
        ("m", Tensor),
        ("l", Tensor),
        ("used", i64 * 3),
        ("stream", C.c_void_p),
        ("workers", C.c_void_p),
        ("scratch", C.c_void_p),
        ("poll", C.c_void_p),
        ("poll_arg", C.c_void_p),
    ]


class Desc:
    """What is computed; the names and defaults of the C descriptor."""

    def __init__(
        self,
        branches=((0, 1),),
        combine="heads",
        offset="branch",
        dilate_queries=True,
        causal=False,
        window=(-1, -1),
        key_begin=None,
        key_end=None,
        scale=None,
        dropout=0.0,
        seed=0,
    ):
        self.branches, self.combine, self.offset, self.dilate_queries = tuple(branches), combine, offset, dilate_queries
        self.left = NO_LIMIT if window[0] < 0 else window[0]
        self.right = NO_LIMIT if window[1] < 0 else window[1]
        if causal:
            self.right = 0
        self.key_begin, self.key_end, self.scale, self.dropout, self.seed = key_begin, key_end, scale, dropout, seed

    def text(self):
        """What differs from dense attention, for messages."""
        plain = {
            "branches": ((0, 1),),
            "combine": "heads",
            "offset": "branch",
            "dilate_queries": True,
            "left": NO_LIMIT,
            "right": NO_LIMIT,
            "key_begin": None,
            "key_end": None,
            "scale": None,
            "dropout": 0.0,
            "seed": 0,
        }
        return {name: value for name, value in self.__dict__.items() if value != plain[name]}

    def heads_of(self, i, kv_heads):
        """The KV heads that run branch i."""
        g = len(self.branches)
        if self.combine == "mix":
            return range(kv_heads)
        sizes = [kv_heads // g + (j < kv_heads % g) for j in range(g)]
        return range(sum(sizes[:i]), sum(sizes[: i + 1]))

    def offset_of(self, i, head, kv_heads):
        r = self.branches[i][1]
        return {"branch": i % r, "head": head % r, "head-block": head // -(-kv_heads // r), "residue": None}[self.offset]


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


def make_items(desc, nq, nk, kv_heads, k, v):
    """Work items of one rank that holds everything."""
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
                        it = Item()
                        it.branch, it.heads = i, Heads(start, step, count)
                        it.q = Rows(first + qf - shift, qs, first + qf, qs, qn)
                        it.k = Rows(first + kf, r, first + kf, r, kn)
                        it.loop[0] = Loop(n, w, w, w, w, w)
                        it.loop[1] = Loop(residues, 1, 1, 1, 1, 1)
                        it.origin, it.rate = first, r
                        it.loop[1].origin = 0
                        for name, t in (("k_view", k), ("v_view", v)):
                            view = tensor(t)
                            view.data += start * t.stride(2) * t.element_size()
                            view.head = t.stride(2) * step
                            setattr(it, name, view)
                        items.append(it)
                at += n
    return items


def tensor(t):
    """[B, N, H, D], or [B, N, H] for lse, m and l, in any strides."""
    return Tensor(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))


class Backend:
    def __init__(self, path):
        self.lib = C.CDLL(path)
        step, problem, error = C.POINTER(Step), C.POINTER(Problem), C.c_char_p
        self.lib.ra_cuda_backend_forward.argtypes = [step, C.c_char_p, C.POINTER(C.c_char_p), error]
        self.lib.ra_cuda_backend_fill.argtypes = [problem, C.c_bool] + [Tensor] * 5 + [C.c_void_p, error]
        self.lib.ra_cuda_backend_finish.argtypes = [problem] + [Tensor] * 5 + [C.c_void_p, error]
        self.lib.ra_cuda_backend_probe.argtypes = [C.c_void_p, error]
        self.scratch = torch.zeros(64, dtype=torch.int32, device="cuda")
        self.path = self.wanted = None  # the kernel that ran, and the one that shall run: "sm90a", "sm80" or None

    def prepare(self, q, k, v, desc, out, lse=None, state=None):
        """A step that can be run again and again. lse: [B, N, H] view. state: (acc, m, l), or None for a single step."""
        b, nq, h, d = q.shape
        nk, hk = k.shape[1], k.shape[2]
        items = make_items(desc, nq, nk, hk, k, v)
        array = (Item * max(1, len(items)))(*items)
        p = Problem()
        p.dtype, p.batch, p.heads, p.kv_heads, p.head_dim, p.rows_q = DTYPES[q.dtype], b, h, hk, d, nq
        p.scale = 1 / math.sqrt(d) if desc.scale is None else desc.scale
        p.left, p.right, p.dropout, p.seed = desc.left, desc.right, desc.dropout, desc.seed
        if desc.key_begin is not None:
            p.key_begin = (i64 * b)(*desc.key_begin)
        if desc.key_end is not None:
            p.key_end = (i64 * b)(*desc.key_end)
        s = Step()
        s.problem, s.items, s.item_count, s.single = C.pointer(p), array, len(items), state is None
        s.q, s.out = tensor(q), tensor(out)
        if lse is not None:
            s.lse = tensor(lse)
        if state is not None:
            s.acc, s.m, s.l = (tensor(t) for t in state)
        s.scratch = self.scratch.data_ptr()
        s.keep = (p, array)
        return s

    def call(self, function, *args):
        error = C.create_string_buffer(256)
        status = function(*args, error)
        if status != 0:
            raise RuntimeError(f"status {status}: {error.value.decode()}")

    def run(self, step):
        path = C.c_char_p()
        step.stream = torch.cuda.current_stream().cuda_stream
        wanted = self.wanted.encode() if self.wanted else None
        self.call(self.lib.ra_cuda_backend_forward, C.byref(step), wanted, C.byref(path))
        self.path = path.value.decode() if path.value else None

    def fill(self, step):
        stream = torch.cuda.current_stream().cuda_stream
        self.call(
            self.lib.ra_cuda_backend_fill, step.problem, step.single, step.out, step.lse, step.acc, step.m, step.l, stream
        )

    def finish(self, step):
        stream = torch.cuda.current_stream().cuda_stream
        self.call(self.lib.ra_cuda_backend_finish, step.problem, step.acc, step.m, step.l, step.out, step.lse, stream)


def attended(desc, i, head, kv_heads, b, nq, nk, rows, device):
    """[len(rows), nk] bool: the pairs of branch i and a KV head, by the definition."""
    w, r = desc.branches[i]
    x = torch.as_tensor(rows, device=device)[:, None] + (nk - nq)
    y = torch.arange(nk, device=device)[None, :]
    ok = torch.ones((x.shape[0], nk), dtype=torch.bool, device=device)
    if head not in desc.heads_of(i, kv_heads):
        return ok & False
    if w:
        ok &= (x >= 0) & (torch.div(x, w, rounding_mode="floor") == torch.div(y, w, rounding_mode="floor"))
        tx, ty = x % w, y % w
    else:
        tx, ty = x, y
    o = desc.offset_of(i, head, kv_heads)
    if o is None:
        ok &= ty % r == tx % r
    else:
        ok &= ty % r == o
        if desc.dilate_queries:
            ok &= tx % r == o
    if desc.left != NO_LIMIT:
        ok &= y >= x - desc.left
    if desc.right != NO_LIMIT:
        ok &= y <= x + desc.right
    if desc.key_begin is not None:
        ok &= y >= desc.key_begin[b]
    if desc.key_end is not None:
        ok &= y < desc.key_end[b]
    return ok


def philox(key, c0, c1, c2, c3):
    """Philox4x32-10 on int64 tensors that hold 32-bit words; returns four of them."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32 & mask

    def multiply(a, c):  # high and low word of a * c without overflowing 63 bits
        low, high = a * (c & 0xFFFF), a * (c >> 16)
        low = low + ((high & 0xFFFF) << 16)
        return (high >> 16) + (low >> 32) & mask, low & mask

    for _ in range(10):
        h0, l0 = multiply(0xD2511F53, c0)
        h1, l1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3


def kept_pairs(desc, i, row, nq, nk, rows, device):
    """[len(rows), nk] bool: pairs of branch i that dropout keeps. row = batch * heads + head."""
    w, r = desc.branches[i]
    x = torch.as_tensor(list(rows), device=device)[:, None] + (nk - nq)
    y = torch.arange(nk, device=device)[None, :]
    place = torch.div(y % w if w else y, r, rounding_mode="floor")
    quad = place >> 2
    high = (x >> 32 & 0xFFF) | (quad >> 32 & 0xFFF) << 12
    words = philox(
        desc.seed,
        (x & 0xFFFFFFFF) + 0 * y,
        (quad & 0xFFFFFFFF) + 0 * x,
        torch.full_like(x + y, row),
        (i & 0xFF) | (high << 8) & 0xFFFFFFFF,
    )
    word = torch.stack(words).gather(0, (place & 3 | 0 * x)[None].expand(1, *words[0].shape))[0]
    return word >= math.floor(desc.dropout * 2**32)


def reference(q, k, v, desc, rows=None):
    """(out, lse, M_out, M_lse) in float64 for the given query rows: [B, rows, H, D] and [B, rows, H]."""
    b, nq, h, d = q.shape
    nk, hk = k.shape[1], k.shape[2]
    rows = range(nq) if rows is None else rows
    scale = 1 / math.sqrt(d) if desc.scale is None else desc.scale
    out = torch.zeros((b, len(rows), h, d), dtype=torch.float64, device=q.device)
    lse = torch.full((b, len(rows), h), -math.inf, dtype=torch.float64, device=q.device)
    m_out, m_lse = 0.0, 1.0
    index = torch.as_tensor(list(rows), device=q.device)
    for bi in range(b):
        for hi in range(h):
            g = hi // (h // hk)
            qq, kk, vv = q[bi, index, hi].double(), k[bi, :, g].double(), v[bi, :, g].double()
            masks, factors = [], []
            for i in range(len(desc.branches)):
                ok = attended(desc, i, g, hk, bi, nq, nk, list(rows), q.device)
                if ok.any():
                    masks.append(ok)
                    factors.append(
                        kept_pairs(desc, i, bi * h + hi, nq, nk, rows, q.device) / (1 - desc.dropout) if desc.dropout else 1.0
                    )
            if not masks:
                continue
            any_key = torch.stack(masks).any(0).any(0)  # rows of k and v that nobody reads may hold anything
            kk, vv = torch.where(any_key[:, None], kk, 0.0), torch.where(any_key[:, None], vv, 0.0)
            s = scale * qq @ kk.T
            total = torch.cat([torch.where(ok, s, -math.inf) for ok in masks], 1)
            top = total.max(1, keepdim=True).values
            top = torch.where(top == -math.inf, 0.0, top)
            e = torch.exp(total - top)
            denominator = e.sum(1, keepdim=True)
            p = torch.where(denominator > 0, e / denominator, 0.0)
            # a masked NaN must not reach the sum, so products run over attended keys only
            weights = sum(p[:, j * nk : (j + 1) * nk] * factors[j] for j in range(len(masks)))
            clean = torch.where(torch.isfinite(vv), vv, 0.0)
            o = weights @ clean
            m_out = max(m_out, (weights @ clean.abs()).max().item())
            bad = ~torch.isfinite(vv).all(1)
            if bad.any():
                touched = torch.stack([ok[:, bad] for ok in masks]).any(0).any(1)
                o[touched] = math.nan
            out[bi, :, hi] = o
            lse[bi, :, hi] = (top + torch.log(denominator)).squeeze(1)
            finite = torch.where(torch.stack(masks).any(0), (abs(scale) * qq.abs() @ kk.abs().T), 0.0)
            m_lse = max(m_lse, torch.nan_to_num(finite, 0.0).max().item())
    return out, lse, m_out, m_lse
