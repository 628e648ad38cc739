"""Attention by its definition, in float64 and over an explicit table of pairs. Shares no code with the package."""

import math

import numpy as np


def pairs(
    seq_q,
    seq_k,
    heads,
    kv_heads,
    segment_lengths=None,
    dilation_rates=None,
    is_causal=False,
    window=None,
    combine="heads",
    offset="branch",
    dilate_queries=True,
):
    """How often query i of head h reads key j: a list over branches of 0/1 arrays [heads, seq_q, seq_k]."""
    branches = list(zip(segment_lengths, dilation_rates)) if segment_lengths is not None else [(0, 1)]
    count = len(branches)
    sizes = [kv_heads // count + (i < kv_heads % count) for i in range(count)]
    of_head = [i for i, size in enumerate(sizes) for _ in range(size)]
    left, right = window if window is not None else (-1, -1)
    tables = []
    for i, (w, r) in enumerate(branches):
        table = np.zeros((heads, seq_q, seq_k), dtype=np.int64)
        for h in range(heads):
            g = h // (heads // kv_heads)
            if combine == "heads" and of_head[g] != i:
                continue
            o = {"branch": i % r, "head": g % r, "head-block": g // -(-kv_heads // r), "residue": None}[offset]
            for row in range(seq_q):
                x = row + seq_k - seq_q
                if w and x < 0:
                    continue
                segment, t = (x // w, x % w) if w else (0, x)
                if offset != "residue" and dilate_queries and t % r != o:
                    continue
                for y in range(seq_k):
                    segment_y, t_y = (y // w, y % w) if w else (0, y)
                    if segment_y != segment or t_y % r != (t % r if offset == "residue" else o):
                        continue
                    if is_causal and y > x:
                        continue
                    if left >= 0 and y < x - left or right >= 0 and y > x + right:
                        continue
                    table[h, row, y] = 1
        tables.append(table)
    return tables


def _philox(key, counter):
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def kept(tables, batch, seq_k, segment_lengths, dilation_rates, dropout_p, seed, offset="branch", kv_heads=None):
    """The dropout factor keep / (1 - p) of each pair of each branch: a list of [batch, heads, seq_q, seq_k]."""
    branches = list(zip(segment_lengths, dilation_rates)) if segment_lengths is not None else [(0, 1)]
    threshold = math.floor(dropout_p * 2**32)
    factors = []
    for i, ((w, r), table) in enumerate(zip(branches, tables)):
        heads, seq_q, _ = table.shape
        factor = np.zeros((batch, *table.shape))
        for h, row, y in zip(*np.nonzero(table)):
            x = int(row) + seq_k - seq_q
            place = (int(y) % w if w else int(y)) // r  # of the key on its lattice
            for b in range(batch):
                counter = (x & 0xFFFFFFFF, (place >> 2) & 0xFFFFFFFF, b * heads + int(h), i)
                word = _philox(seed, counter)[place & 3]
                factor[b, h, row, y] = (word >= threshold) / (1 - dropout_p)
        factors.append(factor)
    return factors


def attention(q, k, v, dout=None, dlse=None, key_range=None, scale=None, dropout_p=0.0, seed=0, **pattern):
    """out, lse; with dout also dq, dk, dv and the yardsticks M of each: a dictionary of float64 arrays."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    batch, seq_q, heads, dim = q.shape
    seq_k, kv_heads = k.shape[1], k.shape[2]
    tables = pairs(seq_q, seq_k, heads, kv_heads, **pattern)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    group = heads // kv_heads
    kk, vv = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = scale * np.einsum("bnhd,bmhd->bhnm", q, kk)
    allowed = np.ones((batch, seq_k), dtype=bool)
    if key_range is not None:
        ranges = np.broadcast_to(np.asarray(key_range), (batch, 2))
        positions = np.arange(seq_k)
        allowed = (positions >= ranges[:, :1]) & (positions < ranges[:, 1:])
    counts = [table[None] * allowed[:, None, None, :] for table in tables]
    total = sum(counts)
    masked = np.where(total > 0, scores, -np.inf)
    top = masked.max(-1, initial=-np.inf)
    base = np.where(np.isinf(top), 0.0, top)
    weights = np.where(total > 0, np.exp(np.where(total > 0, scores, 0.0) - base[..., None]), 0.0)
    denominator = (weights * total).sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(denominator > 0, base + np.log(denominator), -np.inf)
    p = weights / np.where(denominator > 0, denominator, 1.0)[..., None]
    if dropout_p:
        factors = kept(tables, batch, seq_k, pattern.get("segment_lengths"), pattern.get("dilation_rates"), dropout_p, seed)
        m = sum(count * factor for count, factor in zip(counts, factors))  # weight of a pair after dropout, over its copies
    else:
        m = total.astype(np.float64)
    out = np.einsum("bhnm,bmhd->bnhd", p * m, vv)
    result = {
        "out": out,
        "lse": lse,
        "M_out": np.einsum("bhnm,bmhd->bnhd", p * m, np.abs(vv)),
        "M_lse": np.maximum(1.0, np.abs(scale) * np.einsum("bnhd,bmhd->bhnm", np.abs(q), np.abs(kk)).max(-1, initial=0.0)),
    }
    if dout is None and dlse is None:
        return result
    dout = np.zeros_like(out) if dout is None else np.asarray(dout, dtype=np.float64)
    delta = np.einsum("bnhd,bnhd->bhn", dout, out) - (0 if dlse is None else np.asarray(dlse, dtype=np.float64))
    dp = np.einsum("bnhd,bmhd->bhnm", dout, vv)
    ds = p * (m * dp - total * delta[..., None])
    a = (
        p
        * total
        * (
            np.einsum("bnhd,bmhd->bhnm", np.abs(dout), np.abs(vv))
            + np.einsum("bnhd,bnhd->bhn", np.abs(dout), np.abs(out))[..., None]
        )
    )
    dq = scale * np.einsum("bhnm,bmhd->bnhd", ds, kk)
    dk = scale * np.einsum("bhnm,bnhd->bmhd", ds, q)
    dv = np.einsum("bhnm,bnhd->bmhd", p * m, dout)

    def grouped(x):
        return x.reshape(batch, seq_k, kv_heads, group, dim).sum(3)

    result.update(
        dq=dq,
        dk=grouped(dk),
        dv=grouped(dv),
        M_dq=scale * np.einsum("bhnm,bmhd->bnhd", a, np.abs(kk)),
        M_dk=grouped(scale * np.einsum("bhnm,bnhd->bmhd", a, np.abs(q))),
        M_dv=grouped(np.einsum("bhnm,bnhd->bmhd", p * m, np.abs(dout))),
    )
    return result


BOUNDS = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.4e-3, "float64": 1e-13}
LSE_BOUNDS = {"float32": 2e-6, "bfloat16": 2e-5, "float16": 2e-5, "float64": 1e-13}


def assert_close(found, expected, name, dtype):
    """Largest error over largest M, within the bound of the dtype; rows without keys exactly (0, -inf)."""
    found = np.asarray(found, dtype=np.float64)
    truth, bound = expected[name], (LSE_BOUNDS if name == "lse" else BOUNDS)[dtype]
    assert found.shape == truth.shape, f"{name}: shape {found.shape} instead of {truth.shape}"
    if name == "lse":
        empty = np.isneginf(truth)
        assert np.array_equal(np.isneginf(found), empty), "lse is -inf in the wrong rows"
        found, truth = np.where(empty, 0.0, found), np.where(empty, 0.0, truth)
    assert np.isfinite(found).all(), f"{name} is not finite"
    if truth.size:
        error, scale = np.abs(found - truth).max(), max(np.abs(expected["M_" + name]).max(), 1e-300)
        assert error <= bound * scale, f"{name}: error {error:.3g} of {scale:.3g} is {error / scale:.3g}, allowed {bound:g}"
