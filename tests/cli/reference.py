"""Attention by its definition, in float64 NumPy: explicit masks on global positions, no ranks, no tiles.

Shapes: q, dout [B, Nq, Hq, D]; k, v [B, Nk, Hk, D]; out like q; lse [B, Hq, Nq].
"""
import numpy as np

BOUNDS = {"f32": 2e-6, "bf16": 1e-2, "f16": 1.4e-3, "f64": 1e-13}
LSE_BOUNDS = {"f32": 2e-6, "bf16": 2e-5, "f16": 2e-5, "f64": 1e-13}


class Pattern:
    def __init__(self, segments=(0,), rates=(1,), combine="heads", offset="branch", dilate_queries=True, causal=False,
                 window=None, key_range=None, scale=None, dropout=0.0, seed=0):
        self.segments, self.rates = list(segments), list(rates)
        self.combine, self.offset, self.dilate_queries = combine, offset, dilate_queries
        self.causal, self.window, self.key_range = causal, window, key_range
        self.scale, self.dropout, self.seed = scale, dropout, seed


def branch_of_kv_head(g, kv_heads, branches):
    """Contiguous groups whose sizes differ by at most one, larger groups first."""
    sizes = [kv_heads // branches + (1 if i < kv_heads % branches else 0) for i in range(branches)]
    for i, size in enumerate(sizes):
        if g < size:
            return i
        g -= size
    raise AssertionError


def offset_of(p, i, g, kv_heads):
    r = p.rates[i]
    if p.offset == "branch":
        return i % r
    if p.offset == "head":
        return g % r
    return g // -(-kv_heads // r)  # head-block


def mask(p, i, g, kv_heads, nq, nk):
    """Which queries read which keys in branch i, for KV head g: a boolean [Nq, Nk]."""
    if p.combine == "heads" and branch_of_kv_head(g, kv_heads, len(p.segments)) != i:
        return np.zeros((nq, nk), bool)
    w, r = p.segments[i], p.rates[i]
    x = (np.arange(nq) + (nk - nq))[:, None]
    y = np.arange(nk)[None, :]
    if w:
        tx, ty = np.mod(x, w), np.mod(y, w)
        m = (np.floor_divide(x, w) == np.floor_divide(y, w)) & (x >= 0)
    else:
        tx, ty = x, y
        m = np.ones((nq, nk), bool)
    if p.offset == "residue":
        m = m & (np.mod(tx, r) == np.mod(ty, r))
    else:
        o = offset_of(p, i, g, kv_heads)
        m = m & (np.mod(ty, r) == o)
        if p.dilate_queries:
            m = m & (np.mod(tx, r) == o)
    if p.causal:
        m = m & (y <= x)
    if p.window is not None:
        left, right = p.window
        if left >= 0:
            m = m & (y >= x - left)
        if right >= 0:
            m = m & (y <= x + right)
    if p.key_range is not None:
        m = m & (y >= p.key_range[0]) & (y < p.key_range[1])
    return m


def philox(key, c0, c1, c2, c3):
    """Philox4x32-10 over arrays; returns the four words."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(a, np.uint64) & low for a in np.broadcast_arrays(c0, c1, c2, c3)]
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32 & 0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c)


def keep(p, i, row, nq, nk):
    """M = keep / (1 - p) for every pair of branch i; row = batch * Hq + head."""
    if not p.dropout:
        return np.ones((nq, nk))
    w, r = p.segments[i], p.rates[i]
    x = (np.arange(nq) + (nk - nq))[:, None]
    y = np.arange(nk)[None, :]
    j = (np.mod(y, w) if w else y) // r
    quad = j >> 2
    high = ((x >> 32) & 0xFFF) | (((quad >> 32) & 0xFFF) << 12)
    words = philox(p.seed, x & 0xFFFFFFFF, quad & 0xFFFFFFFF, row, (i & 0xFF) | (high << 8))
    word = np.take_along_axis(words, np.broadcast_to(j & 3, (nq, nk))[None], 0)[0]
    return (word >= np.uint64(int(p.dropout * 2**32))) / (1 - p.dropout)


def attention(p, q, k, v, dout=None):
    """out, lse, and with dout dq, dk, dv; and for each tensor M, the same sum in absolute values (and the largest score)."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, nq, hq, dim = q.shape
    nk, hk = k.shape[1:3]
    scale = 1 / np.sqrt(dim) if p.scale is None else p.scale
    res = {"out": np.zeros(q.shape), "lse": np.full((batch, hq, nq), -np.inf)}
    m = {"out": np.zeros(q.shape), "lse": np.zeros((batch, hq, nq)), "score": 0.0}
    if dout is not None:
        dout = np.asarray(dout, np.float64)
        for name, like in (("dq", q), ("dk", k), ("dv", v)):
            res[name], m[name] = np.zeros(like.shape), np.zeros(like.shape)
    for b in range(batch):
        for h in range(hq):
            g = h // (hq // hk)
            qq, kk, vv = q[b, :, h], k[b, :, g], v[b, :, g]
            s = scale * (qq @ kk.T)
            masks = [mask(p, i, g, hk, nq, nk) for i in range(len(p.segments))]
            any_key = np.zeros((nq, nk), bool)
            for a in masks:
                any_key |= a
            top = np.max(np.where(any_key, s, -np.inf), axis=1, initial=-np.inf)
            has = any_key.any(axis=1)
            m["score"] = max(m["score"], np.max(np.where(any_key, np.abs(s), 0), initial=0))
            safe_top = np.where(has, top, 0)[:, None]
            e = np.where(any_key, np.exp(np.where(any_key, s, -np.inf) - safe_top), 0)
            total = sum((a * e for a in masks), np.zeros((nq, nk))).sum(axis=1)
            res["lse"][b, h, has] = (safe_top[:, 0] + np.log(np.where(has, total, 1)))[has]
            size = np.abs(scale) * (np.abs(qq) @ np.abs(kk).T)
            m["lse"][b, h] = np.maximum(1, np.max(np.where(any_key, size, 0), axis=1, initial=0))
            inverse = np.where(has, 1 / np.where(has, total, 1), 0)[:, None]
            copies = [(a * e * inverse, keep(p, i, b * hq + h, nq, nk)) for i, a in enumerate(masks)]
            pm = sum((P * M for P, M in copies), np.zeros((nq, nk)))
            res["out"][b, :, h] = pm @ vv
            m["out"][b, :, h] = pm @ np.abs(vv)
            if dout is None:
                continue
            dd = dout[b, :, h]
            delta = (dd * res["out"][b, :, h]).sum(axis=1, keepdims=True)
            delta_size = np.abs(dd * res["out"][b, :, h]).sum(axis=1, keepdims=True)
            dp, dp_size = dd @ vv.T, np.abs(dd) @ np.abs(vv).T
            ds = sum((P * (M * dp - delta) for P, M in copies), np.zeros((nq, nk)))
            a = sum((P * (M * dp_size + delta_size) for P, M in copies), np.zeros((nq, nk)))
            res["dq"][b, :, h] += scale * ds @ kk
            m["dq"][b, :, h] += np.abs(scale) * a @ np.abs(kk)
            res["dk"][b, :, g] += scale * ds.T @ qq
            m["dk"][b, :, g] += np.abs(scale) * a.T @ np.abs(qq)
            res["dv"][b, :, g] += pm.T @ dd
            m["dv"][b, :, g] += pm.T @ np.abs(dd)
    return res, m


def round_to(dtype, a):
    """What an element becomes in this dtype, as float64."""
    if dtype == "f32":
        return np.asarray(a, np.float32).astype(np.float64)
    if dtype == "f16":
        return np.asarray(a, np.float16).astype(np.float64)
    if dtype == "bf16":
        bits = np.ascontiguousarray(a, np.float32).view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(a, np.float64)


def bound(dtype, name, m):
    """The largest error that is allowed; scores of tens make errors of exponentials."""
    if name == "lse":
        return LSE_BOUNDS[dtype]
    return BOUNDS[dtype] * (4 if m["score"] >= 10 and dtype in ("f32", "f64") else 1)


def error(name, got, want, m):
    """Largest error over the largest M; infinite where a hole is not exactly 0 (lse: -inf)."""
    got = np.asarray(got, np.float64)
    if got.shape != want.shape:
        return np.inf
    if got.size == 0:
        return 0.0
    if name == "lse":
        hole = np.isneginf(want)
        if not np.array_equal(np.isneginf(got), hole) or np.isnan(got).any():
            return np.inf
        difference = np.abs(np.where(hole, 0, got) - np.where(hole, 0, want))
        return difference.max() / max(1.0, m.max())
    if not np.isfinite(got).all() or (got[m == 0] != 0).any():
        return np.inf
    largest = np.abs(got - want).max()
    return 0.0 if largest == 0 else largest / m.max()
