"""Dilated attention as a careful PyTorch user writes it: strided views into a dense kernel, and its results to their rows.
Branch i runs on the i-th share of the heads, from row i mod r of a segment on. `attend` takes q, k and v as [segments, heads,
rows, D]."""

BRANCHES = ((2048, 1), (4096, 2), (8192, 4))


def flops(n, heads, d, causal, a_pair, branches=BRANCHES):
    """Of attended pairs, `a_pair` times D each."""
    rows = [(n // w, w // r) for w, r in branches]
    share = heads // len(branches)
    return sum(a_pair * d * share * segments * (m * (m + 1) // 2 if causal else m * m) for segments, m in rows)


def sliced(attend, branches=BRANCHES):
    """Views of the whole tensors; autograd adds their gradients up in tensors of that size."""
    import torch

    def run(q, k, v):
        _, n, h, d = q.shape
        share = h // len(branches)

        def cut(t, i):
            w, r = branches[i]
            return t.view(n // w, w, h, d)[:, i % r :: r, share * i : share * (i + 1)].transpose(1, 2)

        out = torch.zeros_like(q)
        for i in range(len(branches)):
            cut(out, i).copy_(attend(cut(q, i), cut(k, i), cut(v, i)))
        return out

    return run


def split(attend, branches=BRANCHES):
    """Heads are split first and put together again in the end: gradients are as large as a branch."""
    import torch

    def run(q, k, v):
        _, n, h, d = q.shape
        share, parts = h // len(branches), []
        for i, heads in enumerate(zip(*(t.split(share, 2) for t in (q, k, v)))):
            w, r = branches[i]
            found = attend(*(t.view(n // w, w, share, d)[:, i % r :: r].transpose(1, 2) for t in heads)).transpose(1, 2)
            if r > 1:
                rows, found = found, q.new_zeros(n // w, w, share, d)
                found[:, i % r :: r] = rows
            parts.append(found.reshape(1, n, share, d))
        return torch.cat(parts, 2)

    return run
