"""Do the ranks of a group pass a module what it expects of them? Checked once, by comparing digests of their tensors."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any, Callable

import torch

from ._config import callers_level

_ADVICE = (
    "; give ring_size=1 where each rank has a batch of its own (plain data parallelism), or inputs='shard' where each passes "
    "its rows of one sequence"
)


def _digest(x: torch.Tensor) -> int:
    host = x.detach().resolve_neg().contiguous().cpu()
    state = hashlib.blake2b(repr((tuple(x.shape), x.dtype)).encode(), digest_size=7)
    state.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(state.digest(), "little")


def _gather(where: Any, about: str, numbers: Callable[[], list[int]]) -> list[list[int]]:
    try:
        mine = numbers()
    except Exception as error:  # something that is no tensor, say: the other ranks must not wait for this one
        where.refuse(str(error))
        raise
    every: list[list[int]] = where.gather(about, mine)
    return every


def _constant(x: torch.Tensor) -> bool:
    flat = x.detach().reshape(-1)
    return not flat.numel() or bool((flat == flat[0]).all())


def require_alike(where: Any, **tensors: torch.Tensor) -> None:
    """Raises on every rank if one of the tensors is not the same on all of them."""
    every = _gather(where, ", ".join(tensors), lambda: [_digest(x) for x in tensors.values()])
    for index, name in enumerate(tensors):
        for rank, digests in enumerate(every):
            if digests[index] != every[0][index]:
                what = "passes the same whole query, key and value" if name != "dout" else "computes the same loss"
                raise ValueError(
                    f"{name} of rank {rank} differs from that of rank 0, and with inputs='full' every rank {what}{_ADVICE}"
                )


def warn_if_alike(where: Any, *tensors: torch.Tensor) -> None:
    """Warns if all ranks pass the same rows: most likely each passes the whole sequence."""
    every = _gather(
        where, "query, key, value", lambda: [int(all(_constant(x) for x in tensors)), *(_digest(x) for x in tensors)]
    )
    if not every[0][0] and all(record == every[0] for record in every):
        warnings.warn(
            f"all {where.ranks} ranks pass the same rows, which inputs='shard' takes for a sequence {where.ranks} times as "
            f"long; give inputs='full' where every rank passes the whole sequence",
            stacklevel=callers_level(),
        )
