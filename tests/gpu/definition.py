"""What attention and its gradients are, in float64: pairs of positions, written apart from the library and from the items that
backend.py makes."""

import math

import torch

NO_LIMIT = 2**63 - 1


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


def gradients(q, k, v, dout, dlse, desc):
    """(dq, dk, dv) in float64, and the same sums in absolute values (their maxima): what errors are measured by."""
    b, nq, h, d = q.shape
    nk, hk = k.shape[1], k.shape[2]
    scale = 1 / math.sqrt(d) if desc.scale is None else desc.scale
    out, lse, _, _ = reference(q, k, v, desc)
    found = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v)]
    size = [torch.zeros_like(x) for x in found]
    rows = list(range(nq))
    for bi in range(b):
        for hi in range(h):
            g = hi // (h // hk)
            qq, kk, vv, do, o = (x.double() for x in (q[bi, :, hi], k[bi, :, g], v[bi, :, g], dout[bi, :, hi], out[bi, :, hi]))
            log = lse[bi, :, hi, None]
            has_keys = log != -math.inf
            qq, do, o = (torch.where(has_keys, x, 0.0) for x in (qq, do, o))  # nothing flows through the others
            delta = (do * o).sum(1, keepdim=True) - (0.0 if dlse is None else dlse[bi, :, hi, None].double())
            spread = (do * o).abs().sum(1, keepdim=True)
            for i in range(len(desc.branches)):
                ok = attended(desc, i, g, hk, bi, nq, nk, rows, q.device) & has_keys
                if not ok.any():
                    continue
                keep = kept_pairs(desc, i, bi * h + hi, nq, nk, rows, q.device) / (1 - desc.dropout) if desc.dropout else 1.0
                read = ok.any(0)[:, None]
                kr, vr = torch.where(read, kk, 0.0), torch.where(read, vv, 0.0)
                p = torch.where(ok, torch.exp(scale * qq @ kr.T - torch.where(has_keys, log, 0.0)), 0.0)
                ds = p * (keep * (do @ vr.T) - delta)
                a = p * (do.abs() @ vr.abs().T + spread)
                for j, (x, y) in enumerate(((ds @ kr, a @ kr.abs()), (ds.T @ qq, a.T @ qq.abs()))):
                    head = hi if j == 0 else g
                    found[j][bi, :, head] += scale * x
                    size[j][bi, :, head] += abs(scale) * y
                found[2][bi, :, g] += (p * keep).T @ do
                size[2][bi, :, g] += (p * keep).T @ do.abs()
    return found, [x.max().item() for x in size]
