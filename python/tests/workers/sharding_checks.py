"""Checks of shard, unshard and positions on a group of processes."""

import torch
import torch.distributed as dist
from common import check, close, raises, rows, shard, whole

LAYOUTS = ("contiguous", "zigzag", "striped")


@check
def shard_and_unshard_undo_each_other_for_every_layout_length_and_type():
    import ringattn

    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for layout in LAYOUTS:
        for n in (1, 3, 16, 23):
            mine = rows(layout, n, rank, ranks)
            assert ringattn.positions(n, group, layout).tolist() == mine
            for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool):
                x = torch.arange(2 * n * 3).reshape(2, n, 3).to(dtype)
                part = ringattn.shard(x, group, layout)
                assert torch.equal(part, x[:, mine])
                again = ringattn.unshard(part, group, layout)
                assert again.dtype == dtype and torch.equal(again, x)
            assert torch.equal(ringattn.unshard(ringattn.shard(x.mT, group, layout, -1), group, layout, -1), x.mT)
            assert (ringattn.unshard(ringattn.shard(x.numpy(), group, layout), group, layout) == x.numpy()).all()


@check
def lazily_negated_tensors_are_taken():
    import ringattn

    group = dist.group.WORLD
    x = torch.arange(12.0).reshape(1, 6, 2)
    for lazy in (torch._neg_view(x.clone()), torch.complex(x, x).conj()):
        assert torch.equal(ringattn.unshard(ringattn.shard(lazy, group), group), lazy)
    whole_x = x.clone().requires_grad_()
    part = ringattn.shard(whole_x, group)
    part.backward(torch._neg_view(torch.ones_like(part)))
    assert bool((whole_x.grad == -1).all())
    query = torch._neg_view(torch.randn((1, 6, 2, 4), generator=torch.Generator().manual_seed(0)))
    close(ringattn.RingDilatedAttentionHybrid()(query, query, query), ringattn.attention(query, query, query), 1e-6)


@check
def attention_between_shard_and_unshard_is_that_of_one_rank_with_gradients():
    import ringattn

    group = dist.group.WORLD
    q, k, v, dout = whole()
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ringattn.attention(*alone, is_causal=True)
    out.backward(dout)
    for layout in LAYOUTS:
        again = [x.clone().requires_grad_() for x in (q, k, v)]
        mine = [ringattn.shard(x, group, layout) for x in again]
        part = ringattn.attention(*mine, is_causal=True, group=group, layout=layout)
        found = ringattn.unshard(part, group, layout)
        close(found, out)
        found.backward(dout)
        for a, b in zip(again, alone):
            close(a.grad, b.grad)


@check
def shards_that_do_not_fit_together_are_refused_on_every_rank():
    import ringattn

    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    last = rank == ranks - 1
    for x, match in (
        (torch.zeros(1, 4 + 2 * last), f"rank {0} of {ranks} holds 4 rows; with layout contiguous"),
        (torch.zeros(1, 4, dtype=torch.float64 if last else torch.float32), f"x of rank {ranks - 1} differs"),
    ):
        try:
            ringattn.unshard(x, group)
        except ValueError as error:
            assert match in str(error), str(error)
        else:
            raise AssertionError("no rank noticed")
    x = torch.arange(9.0).reshape(1, 9)
    assert torch.equal(ringattn.unshard(shard(x, "contiguous"), group), x)


@check
def what_one_rank_cannot_unshard_is_told_to_the_others():
    import numpy as np
    import ringattn

    group, mine = dist.group.WORLD, dist.get_rank() == 1
    x = np.arange(8.0).reshape(2, 4)
    mixed = np.zeros((2, 4), dtype=[("a", "f4"), ("b", object)])
    for wrong, match in ((x.astype(object), "x has dtype object"), (mixed, "object"), (np.ma.array(x), "x is a masked array")):
        raises(ValueError if mine else RuntimeError, match, ringattn.unshard, wrong if mine else x, group)
        raises(ValueError, match, ringattn.unshard, wrong, group)
    words = np.array([["a", "bc"]])
    assert ringattn.unshard(words, group).tolist() == [["a", "bc"] * dist.get_world_size()]
