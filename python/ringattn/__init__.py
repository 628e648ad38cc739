"""Exact ring attention with dilation, for very long sequences.

``attention`` takes NumPy arrays, torch tensors and DLPack objects. With PyTorch installed there are modules, helpers and
``ringattn.transformers`` beside it; without it they raise an ImportError that says so when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._attention import attention
from ._config import HolesWarning, like
from ._draw import draw
from ._engine import stats
from ._info import describe, info, recommended_dtype
from ._lib import RingattnError
from ._lib import version as __version__
from ._porting import flash_attn_func, flash_attn_varlen_func, sdpa
from .custom import Transport, custom_group
from .sharding import positions, shard, unshard

# Names that need torch, and the module that has each.
_WITH_TORCH = {
    "modules": (
        "RingDilatedAttention",
        "RingDilatedAttentionHybrid",
        "RingDilatedAttentionV3",
        "RingDilatedAttentionV2Collective",
        "RingDilatedAttentionV2",
        "RingAttentionCorrect",
    ),
    "multihead": ("RingMultiheadDilatedAttention",),
    "gradients": ("sync_gradients",),
    "cache": ("KVCache",),
    "helpers": (
        "circular_rank_left",
        "circular_rank_right",
        "send_and_receive_",
        "ring_pass",
        "all_ring_pass",
        "split_by_rank",
        "gather_from_rank",
        "RingInfo",
        "StableRingAccumulator",
        "compute_attention_with_lse",
        "create_causal_mask",
        "apply_ring_mask",
    ),
    "_check": ("check", "CheckReport"),
}
_HOME = {name: module for module, names in _WITH_TORCH.items() for name in names}

if TYPE_CHECKING:
    from ._check import CheckReport, check
    from .cache import KVCache
    from .gradients import sync_gradients
    from .helpers import (
        RingInfo,
        StableRingAccumulator,
        all_ring_pass,
        apply_ring_mask,
        circular_rank_left,
        circular_rank_right,
        compute_attention_with_lse,
        create_causal_mask,
        gather_from_rank,
        ring_pass,
        send_and_receive_,
        split_by_rank,
    )
    from .modules import (
        RingAttentionCorrect,
        RingDilatedAttention,
        RingDilatedAttentionHybrid,
        RingDilatedAttentionV2,
        RingDilatedAttentionV2Collective,
        RingDilatedAttentionV3,
    )
    from .multihead import RingMultiheadDilatedAttention

__all__ = [
    "attention",
    "custom_group",
    "describe",
    "draw",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "info",
    "like",
    "positions",
    "recommended_dtype",
    "sdpa",
    "shard",
    "stats",
    "unshard",
    "HolesWarning",
    "RingattnError",
    "Transport",
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("torch", "transformers", "dist", "plot"):
        return importlib.import_module(f".{name}", __name__)
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torch":
            raise
        raise ImportError(f"ringattn.{name} needs PyTorch, which is not installed") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
