"""Checks of what may be a group: its members, their order, its beginning and its end."""

import torch
import torch.distributed as dist
from common import check, compare, raises


def soon(function):
    """Runs a first call that would otherwise wait for ten minutes for ranks that do not come."""
    from ringattn import _transports

    before, _transports._START_TIMEOUT = _transports._START_TIMEOUT, 60.0
    try:
        function()
    finally:
        _transports._START_TIMEOUT = before


@check
def members_of_a_group_may_be_in_different_numbers_of_other_groups():
    ranks = range(dist.get_world_size())
    for other in [0], [0, 1], [0, ranks[-1]]:  # two rings that share a rank, too
        group = dist.new_group(other)
        if len(other) > 1 and dist.get_rank() in other:
            soon(lambda group=group: compare(group, is_causal=True))
    group = dist.new_group(list(ranks))
    soon(lambda: compare(group, is_causal=True))


@check
def ranks_of_a_group_may_be_in_any_order():
    import inspect

    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # torch 2.9
        ranks = list(range(dist.get_world_size()))
        group = dist.new_group(ranks[1:] + ranks[:1], sort_ranks=False)
        soon(lambda: compare(group, is_causal=True, layout="zigzag"))


@check
def a_group_whose_members_do_not_all_come_says_who_is_missing_and_serves_them_when_they_do():
    import ringattn
    from ringattn import _transports

    group = dist.new_group(list(range(dist.get_world_size())))
    last, x = dist.get_world_size() - 1, torch.randn(1, 4, 2, 8)
    before, _transports._START_TIMEOUT = _transports._START_TIMEOUT, 0.2
    try:
        if dist.get_rank() == 0:
            missing = ", ".join(f"rank {rank}" for rank in range(1, last + 1))
            raises(RuntimeError, f"{missing} of {last + 1} made no call", ringattn.attention, x, x, x, group=group)
    finally:
        _transports._START_TIMEOUT = before
    dist.barrier()
    soon(lambda: compare(group, is_causal=True))


@check
def a_group_that_was_left_serves_again():
    import ringattn

    ringattn.dist.close()
    dist.barrier()
    soon(lambda: compare(is_causal=True))


@check
def tensors_of_the_host_are_added_where_the_group_knows_gpus_alone():
    import ringattn

    class Nccl:
        def _get_backend(self, device):
            raise RuntimeError(f"no backend for {device}")

    mailbox = ringattn.dist.resolve(dist.group.WORLD).mailbox
    callers, mailbox.callers = mailbox.callers, Nccl()
    gradient = torch.full((3,), float(dist.get_rank()))
    mailbox.add(gradient)
    mailbox.callers = callers
    assert gradient.tolist() == [sum(range(dist.get_world_size()))] * 3


@check
def a_mesh_of_several_dimensions_is_refused_and_one_of_them_taken():
    import ringattn
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("rows", "batch"))
    x = torch.randn(1, 4, 2, 8)
    for call in (
        lambda: ringattn.attention(x, x, x, group=mesh),
        lambda: ringattn.shard(x, mesh),
        lambda: ringattn.RingDilatedAttention(group=mesh).ring_size,
    ):
        raises(ValueError, "group is a DeviceMesh of 2 dimensions; give the one along", call)
    compare(mesh.get_group("rows"), is_causal=True)
    assert ringattn.RingDilatedAttention(group=mesh["rows"]).ring_size == dist.get_world_size()


@check
def nothing_is_left_of_groups_that_were_destroyed():
    import threading

    import ringattn

    x, ranks, destroyed = torch.randn(1, 4, 2, 8), list(range(dist.get_world_size())), []
    for _ in range(3):
        group = dist.new_group(ranks)
        ringattn.attention(x, x, x, group=group)
        destroyed.append(ringattn.dist.resolve(group))
        dist.destroy_process_group(group)
    compare(dist.new_group(ranks), is_causal=True)
    assert not {where.key for where in destroyed} & set(ringattn.dist._processes)
    threads = {thread for where in destroyed for thread in where.mailbox.readers.values()}
    assert threads and not threads & set(threading.enumerate())
    raises(RuntimeError, "the group is closed", ringattn.attention, x, x, x, group=destroyed[0])
    compare(is_causal=True)
