"""shard, unshard and positions, in one process; over processes they are tested in workers/sharding_checks.py."""

import numpy as np
import pytest
import ringattn
import torch

LAYOUTS = ["contiguous", "zigzag", "striped"]


def by_definition(layout, rows, rank, ranks):
    if layout == "striped":
        return list(range(rank, rows, ranks))
    runs = np.array_split(np.arange(rows), ranks if layout == "contiguous" else 2 * ranks)
    mine = runs[rank] if layout == "contiguous" else np.concatenate([runs[rank], runs[2 * ranks - 1 - rank]])
    return mine.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 7, 24, 25])
def test_every_rank_holds_the_rows_of_its_layout(layout, rows):
    x = torch.randn(2, rows, 3)
    for ranks in (1, 2, 3, 5):
        for rank in range(ranks):
            mine = by_definition(layout, rows, rank, ranks)
            assert ringattn.positions(rows, ranks, layout, rank=rank).tolist() == mine
            assert torch.equal(ringattn.shard(x, ranks, layout, rank=rank), x[:, mine])
            assert torch.equal(ringattn.shard(x.mT, ranks, layout, -1, rank=rank), x.mT[..., mine])
            assert np.array_equal(ringattn.shard(x.numpy(), ranks, layout, rank=rank), x.numpy()[:, mine])


@pytest.mark.parametrize("group", [None, 1, 4])
def test_whole_tensors_stay_whole_without_processes(group):
    x = torch.randn(1, 9, 2)
    assert ringattn.shard(x, group, "zigzag") is x and ringattn.unshard(x, group, "zigzag") is x
    assert ringattn.positions(9, group, "zigzag").tolist() == list(range(9))


def test_rows_of_one_run_are_a_view():
    x = torch.randn(1, 9, 2)
    for layout in ("contiguous", "striped"):
        mine = ringattn.shard(x, 2, layout, rank=1)
        assert mine.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_rows_of_a_named_rank_have_the_gradient_of_indexing():
    x = torch.randn(1, 9, 2, requires_grad=True)
    ringattn.shard(x, 2, "zigzag", rank=0).sum().backward()
    expected = torch.zeros(1, 9, 2)
    expected[:, by_definition("zigzag", 9, 0, 2)] = 1
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: ringattn.shard(x, 2, "diagonal"), "layout is 'diagonal'"),
        (lambda x: ringattn.unshard(x, 2, "diagonal"), "layout is 'diagonal'"),
        (lambda x: ringattn.positions(4, None, "diagonal"), "layout is 'diagonal'"),
        (lambda x: ringattn.shard(x, 2, dim=3), "dim is 3; x has 3 dimensions"),
        (lambda x: ringattn.shard(np.ma.array(x), 2, rank=1), "x is a masked array"),
        (lambda x: ringattn.unshard(np.ma.array(x), 2), "x is a masked array"),
        (lambda x: ringattn.shard(x, 2, rank=2), "rank is 2; group has ranks 0 to 1"),
        (lambda x: ringattn.shard([1, 2], 2), "x is a list"),
        (lambda x: ringattn.shard(x, "ring"), "group 'ring' is unknown"),
        (lambda x: ringattn.positions(-1), "n is -1"),
    ],
)
def test_wrong_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.zeros(1, 4, 2))
