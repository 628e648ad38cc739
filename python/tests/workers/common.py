"""What the checks on a group of processes share. A rank is started by torchrun, runs the checks in order and leaves what each
found in a JSON file.

A check is a function whose name is the sentence that it proves; it raises where that is wrong. It runs on every rank at once.
"""

import json
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def names():
    return [function.__name__ for function in CHECKS]


def whole(batch=2, seq_q=21, seq_k=23, heads=6, kv_heads=3, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, seq_q, heads, dim),
        (batch, seq_k, kv_heads, dim),
        (batch, seq_k, kv_heads, dim),
        (batch, seq_q, heads, dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def rows(layout, count, rank, ranks):
    """The rows of a rank, by the definition of the layouts."""
    if layout == "striped":
        return list(range(rank, count, ranks))
    runs = ranks if layout == "contiguous" else 2 * ranks
    sizes = [count // runs + (run < count % runs) for run in range(runs)]
    starts = [sum(sizes[:run]) for run in range(runs)]
    mine = [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]
    return [row for run in mine for row in range(starts[run], starts[run] + sizes[run])]


def shard(x, layout, rank=None, ranks=None):
    rank, ranks = dist.get_rank() if rank is None else rank, dist.get_world_size() if ranks is None else ranks
    return x[:, rows(layout, x.size(1), rank, ranks)]


def close(found, expected, bound=1e-12):
    error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    assert found.shape == expected.shape, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert error <= bound * max(1.0, expected.abs().max().item() if expected.numel() else 0.0), f"error {error}"


def raises(kind, match, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind as error:
        assert match in str(error), str(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def compare(group=None, layout="contiguous", placement="sharded", function=None, bound=1e-12, **options):
    """Results and gradients of this rank's rows on the ring are those of one rank."""
    import ringattn

    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q, k, v, dout = whole()
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = ringattn.attention(*alone, return_lse=True, **{**options, "schedule": "auto"})
    weight = torch.where(torch.isinf(lse.detach()), 0.0, 1.0) * torch.arange(lse.size(2))
    finite = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    ((out * dout).sum() + (finite * weight).sum()).backward()

    mine = [x if placement == "replicated" and i == 0 else shard(x, layout, rank, ranks) for i, x in enumerate((q, k, v))]
    mine = [x.clone().requires_grad_() for x in mine]
    attend = function or ringattn.attention
    ring_out, ring_lse = attend(*mine, return_lse=True, group=group, layout=layout, query_placement=placement, **options)
    part = list(range(q.size(1))) if placement == "replicated" else rows(layout, q.size(1), rank, ranks)
    ring_finite = torch.where(torch.isinf(ring_lse), torch.zeros_like(ring_lse), ring_lse)
    ((ring_out * dout[:, part]).sum() + (ring_finite * weight[:, :, part]).sum()).backward()
    close(ring_out, out[:, part], bound)
    assert torch.equal(torch.isinf(ring_lse), torch.isinf(lse[:, :, part]))
    close(ring_finite, finite[:, :, part], bound)
    close(mine[0].grad, alone[0].grad[:, part], bound)
    for index in (1, 2):
        close(mine[index].grad, shard(alone[index].grad, layout, rank, ranks), bound)


def main(backend="gloo"):
    import ringattn

    warnings.simplefilter("ignore", ringattn.HolesWarning)
    path = sys.argv[1]
    dist.init_process_group(backend)
    told = dist.new_group(backend="gloo")  # what the checks found, whatever the ring runs over
    results = {}
    for function in CHECKS:
        try:
            function()
            found = "ok"
        except BaseException:
            found = traceback.format_exc()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found, group=told)
        results[function.__name__] = (
            "ok" if set(every) == {"ok"} else "\n".join(f"rank {i}: {text}" for i, text in enumerate(every))
        )
        if dist.get_rank() == 0:
            with open(path, "w") as file:
                json.dump(results, file)
    dist.barrier(group=told)
    dist.destroy_process_group()
