"""Gradients of weights that every rank of a group holds.

A rank that holds some rows of a sequence has, for each weight, the part of the gradient that its rows contribute. The gradient
of one process that holds the whole sequence is the sum over the ranks.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import nn

from . import dist as _dist


def _sum(tensors: list[torch.Tensor], where: Any) -> None:
    """Adds each tensor over the ranks of a group of processes, in place; one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        where.add(flat)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same])):
            tensor.copy_(part.view_as(tensor))


def _ddp_of(module: nn.Module) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return module if isinstance(module, DistributedDataParallel) else None


def sync_gradients(module: Any, group: Any) -> None:
    """After backward: makes the gradients of a module's weights those of one rank that holds the whole sequence.

    ``module`` may be any module, whole model or list of parameters whose loss is a sum over the rows that a rank holds (divide
    by the global number of tokens, not the local one). Every rank of the group calls it. Of a ``DistributedDataParallel``
    module the gradients were averaged over DDP's ranks already; where these include the ring's, the average is turned back into
    the ring's sum.

    With ``group=None`` or an integer the gradients are whole already, and nothing is done.

    >>> import torch, ringattn
    >>> module = ringattn.RingMultiheadDilatedAttention(16, 4, group=2)
    >>> out, _ = module(*[torch.randn(1, 8, 16)] * 3)
    >>> out.sum().backward()
    >>> ringattn.sync_gradients(module, 2)
    """
    where = _dist.resolve(group)
    if not isinstance(where, _dist.Processes):
        return
    parameters: Iterable[nn.Parameter] = module.parameters() if isinstance(module, nn.Module) else module
    parameters = [p for p in parameters if p.requires_grad]
    ddp = _ddp_of(module) if isinstance(module, nn.Module) else None
    if ddp is not None:
        inside = set(torch.distributed.get_process_group_ranks(ddp.process_group))
        ring = where.members()
        if ring <= inside:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(where.ranks)
            return
        if len(ring & inside) > 1:
            raise ValueError(
                "DistributedDataParallel averages over some ranks of the ring but not all: give it a process group that "
                "holds the whole ring, or only one rank of it"
            )
    # A weight that one rank did not use still has a gradient on the others.
    used = where.gather([int(p.grad is not None) for p in parameters])
    if any(len(flags) != len(parameters) for flags in used):
        raise ValueError("the ranks have different numbers of parameters")
    wanted = [p for p, *flags in zip(parameters, *used) if any(flags)]
    for p in wanted:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    with torch.no_grad():
        _sum([p.grad for p in wanted if p.grad is not None], where)


def sync_on_backward(module: nn.Module, group: Any) -> None:
    """Has each weight's gradient added over the group as soon as backward has it, before it is accumulated.

    The ranks must use the same weights in the same order. Under DDP nothing else is needed: it averages sums that are equal
    already.
    """
    where = _dist.resolve(group)
    if not isinstance(where, _dist.Processes):
        return

    def whole(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        where.add(total.view(-1))
        return total

    for p in module.parameters():
        if p.requires_grad:
            p.register_hook(whole)
