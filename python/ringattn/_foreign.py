"""Argument names of other libraries: what each is called here, or why it is not supported."""

from __future__ import annotations

from typing import Any

from .dist import refusal

# Theirs: what it is here.
_OURS = {
    "causal": "is_causal",
    "dropout": "dropout_p",
    "key_padding_mask": "key_range=(begin, end), the keys that are no padding",
    "p": "dropout_p",
    "scaling": "scale",
    "sliding_window": "window=(left, right), which counts keys before and after a query, itself not included",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window=(left, right)",
}
PACKED = "packed sequences are not available in this version; use key_range for padding"
_UNSUPPORTED = {
    "alibi_slopes": "biases of the scores are not available",
    "attention_chunk": "chunks are segments here: segment_lengths=[chunk], dilation_rates=[1]",
    "attn_bias": "a bias for each pair would take the memory that this saves",
    "attn_mask": "a mask for each pair would take the memory that this saves; use is_causal, window, key_range or a pattern",
    "block_table": "paged caches are not available in this version",
    "cu_seqlens": PACKED,
    "cu_seqlens_k": PACKED,
    "cu_seqlens_q": PACKED,
    "max_seqlen_k": PACKED,
    "max_seqlen_q": PACKED,
    "need_weights": "the weights are never formed, which is what makes long sequences possible",
    "return_attn_probs": "the weights are never formed; return_lse=True gives the log-sum-exp of the scores",
    "return_softmax_lse": "it is return_lse here",
    "s_aux": "attention sinks are not available in this version",
    "sinks": "attention sinks are not available in this version",
    "softcap": "capped scores are not available in this version",
}
for _name in ("attention_mask", "mask"):
    _UNSUPPORTED[_name] = _UNSUPPORTED["attn_mask"]
# Accepted with any value, since they are always on: sums have a fixed order, and query heads may share key heads.
_EITHER = ("deterministic", "enable_gqa", "pack_gqa")


def asks_for_nothing(value: Any) -> bool:
    """None, False, 0 and (-1, -1), by which other libraries switch something off."""
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and all(part in (-1, None) for part in value)
    return value is None or (isinstance(value, (bool, int, float)) and not value)


def refuse(caller: str, arguments: dict[str, Any], group: Any = None) -> None:
    """Raises ValueError for arguments of other libraries, with our name for it or the reason why it is not supported, and
    TypeError for unknown ones; ``group`` is told. A value that switches an argument off, such as ``attn_mask=None``, is
    accepted."""
    for name, value in arguments.items():
        if name in _EITHER:
            continue
        if name not in _OURS and name not in _UNSUPPORTED:
            raise refusal(group, TypeError(f"{caller}() got an unexpected keyword argument {name!r}"))
        # A scale of 0 makes all scores equal; it is no way to leave the scale alone.
        if not asks_for_nothing(value) or (_OURS.get(name) == "scale" and value is not None):
            reason = f"is called {_OURS[name]} here" if name in _OURS else f"is not supported: {_UNSUPPORTED[name]}"
            raise refusal(group, ValueError(f"{name} {reason}"))
