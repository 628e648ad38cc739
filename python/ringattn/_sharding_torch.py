"""``shard`` and ``unshard`` of torch tensors: each is the other's gradient."""

from __future__ import annotations

from typing import Any

import torch

from . import dist as _dist
from . import sharding as _sharding


def _rows_of(x: torch.Tensor, where: Any, layout: str, dim: int) -> torch.Tensor:
    rows: torch.Tensor = _sharding.take(x, _sharding._runs(x.size(dim), layout, where.rank, where.ranks), dim, torch.cat)
    return rows


def _whole(x: torch.Tensor, where: Any, layout: str, dim: int) -> torch.Tensor:
    host = x.detach().cpu().resolve_conj().resolve_neg()  # NumPy knows nothing of lazy signs
    if x.is_floating_point() and x.element_size() < 4:  # types that NumPy may not know travel as integers of their size
        host = host.view(torch.int16 if x.element_size() == 2 else torch.uint8)
    whole = torch.from_numpy(_sharding.gather_rows(host.numpy(), str(x.dtype), where, layout, dim))
    return whole.view(x.dtype).to(x.device)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: Any, layout: str, dim: int) -> torch.Tensor:
        ctx.call = where, layout, dim
        return _rows_of(x, where, layout, dim).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Unshard.apply(gradient, *ctx.call), None, None, None  # type: ignore[no-untyped-call]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: Any, layout: str, dim: int) -> torch.Tensor:
        ctx.call = where, layout, dim
        return _whole(x, where, layout, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Shard.apply(gradient, *ctx.call), None, None, None  # type: ignore[no-untyped-call]


def shard_tensor(x: torch.Tensor, runs: list[_sharding.Run], layout: str, dim: int, group: Any) -> torch.Tensor:
    """``group`` is None where the rows are those of a rank that the caller names."""
    if group is not None and x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Shard.apply(x, _dist.resolve(group), layout, dim)  # type: ignore[no-untyped-call]
        return result
    rows: torch.Tensor = _sharding.take(x, runs, dim, torch.cat)
    return rows


def unshard_tensor(x: torch.Tensor, where: Any, layout: str, dim: int) -> torch.Tensor:
    result: torch.Tensor = _Unshard.apply(x, where, layout, dim)  # type: ignore[no-untyped-call]
    return result
