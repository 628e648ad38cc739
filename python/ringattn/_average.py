"""Over which ranks data parallelism has averaged a model's gradients: DistributedDataParallel, FSDP1 (FullyShardedDataParallel)
and FSDP2 (fully_shard)."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Average(NamedTuple):
    """A gradient is the sum over `ranks` divided by `divisor`."""

    ranks: frozenset[int]
    divisor: float
    seen: Any = None  # FSDP1: the parameter that autograd sees instead, which lacks hooks set on the original


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be a DTensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def averages(module: Any) -> dict[int, Average]:
    """By id of the parameter; parameters that nothing has averaged are not in it."""
    found: dict[int, Average] = {}
    if not isinstance(module, nn.Module):
        return found
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for part in module.modules():  # from the outside in: an inner wrapper takes its parameters out of the outer one's
        if isinstance(part, DistributedDataParallel):
            average = _mean(dist.get_process_group_ranks(part.process_group))
            ignored = set(getattr(part, "parameters_to_ignore", ()))
            found.update({id(p): average for name, p in part.module.named_parameters() if name not in ignored})
        elif isinstance(part, fsdp):
            average, flat = _mean(_ranks_of_fsdp(part)), getattr(getattr(part, "_handle", None), "flat_param", None)
            others = getattr(part, "_ignored_params", ())
            for p in part.parameters():
                if not any(p is other for other in others):
                    found[id(p)] = average._replace(seen=p if flat is None else flat)
        elif hasattr(part, "_get_fsdp_state"):
            factor = _divide_factor(part)
            for name, p in part.named_parameters():
                if hasattr(p, "device_mesh"):
                    ranks = _ranks_of_mesh(name, p)
                    found[id(p)] = Average(ranks, factor or len(ranks))
    return found


def _mean(ranks: Any) -> Average:
    return Average(frozenset(ranks), len(ranks))


def _ranks_of_fsdp(part: Any) -> list[int]:
    ranks = dist.get_process_group_ranks(part.process_group)
    across = getattr(part, "_inter_node_pg", None)
    if across is None:
        return ranks
    every: list[Any] = [None] * len(ranks)  # hybrid: shards inside a group, replicas across groups
    dist.all_gather_object(every, dist.get_process_group_ranks(across), group=part.process_group)
    return sorted({rank for replicas in every for rank in replicas})


def _ranks_of_mesh(name: str, parameter: Any) -> frozenset[int]:
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim > 1 and not (mesh.ndim == 2 and placements[0].is_replicate()):
        raise ValueError(
            f"{name} lies on a mesh of {mesh.ndim} dimensions as {placements}: only what fully_shard makes (shards, or "
            f"replicas of shards) is supported"
        )
    return frozenset(mesh.mesh.flatten().tolist())


def _divide_factor(part: Any) -> Any:
    """What set_gradient_divide_factor was given; None: the number of ranks."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for name in ("gradient_divide_factor", "reduce_scatter_divide_factor"):
            factor = getattr(group, name, None)
            if factor is not None:
                return factor
    return None
