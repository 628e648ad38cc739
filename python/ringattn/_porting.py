"""``attention`` under the signatures of torch's scaled_dot_product_attention and of flash-attn, for code that comes from there.

Further settings of ``ringattn.attention`` (a pattern, a group) may be given by name.
"""

from __future__ import annotations

from typing import Any, Optional

from ._arguments import key_ranges
from ._attention import attention
from ._foreign import PACKED, refuse
from .dist import refusal


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    **settings: Any,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``: ``[B, H, N, D]`` in and out, NumPy arrays or torch tensors.

    ``is_causal`` means what it means there: the **first** query meets the first key, also where the lengths differ (in
    ``ringattn.attention`` the last ones meet, and so they do here for a window or a pattern without it). ``attn_mask`` raises
    ValueError unless it is None. A row without any key is 0, where torch gives NaN.

    >>> import torch, ringattn
    >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(ringattn.sdpa(q, k, v, is_causal=True), expected, atol=1e-6)
    True
    """
    group = settings.get("group")
    refuse("sdpa", {"attn_mask": attn_mask}, group)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if len(getattr(tensor, "shape", ())) != 4 or not hasattr(tensor, "swapaxes"):
            shape = f"has shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else f"is a {type(tensor).__name__}"
            raise refusal(group, ValueError(f"{name} {shape}; it must be an array or a tensor [batch, heads, rows, head dim]"))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        reason = f"query has {query.shape[1]} heads and key {key.shape[1]}; enable_gqa=True lets query heads share key heads"
        raise refusal(group, ValueError(reason))
    rows, keys = query.shape[2], key.shape[2]
    if is_causal and rows != keys:
        if group is not None or rows > keys:
            reason = (
                f"query has {rows} rows and key {keys}; sdpa with is_causal puts the first query at the first key, so it needs "
                f"at least as many keys as queries, and on a group exactly as many (ringattn.attention puts the last query at "
                f"the last key)"
            )
            raise refusal(group, ValueError(reason))
        key, value = key[:, :, :rows], value[:, :, :rows]  # no query reads the others
        if settings.get("key_range") is not None:
            settings["key_range"] = _cut(settings["key_range"], query.shape[0], rows)
    query, key, value = query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2)
    found = attention(query, key, value, is_causal=is_causal, dropout_p=dropout_p, scale=scale, **settings)
    return (found[0].swapaxes(1, 2), found[1]) if isinstance(found, tuple) else found.swapaxes(1, 2)


def _cut(key_range: Any, batch: int, rows: int) -> Any:
    """Ranges of the keys as those of the first rows of them."""
    if hasattr(key_range, "clamp"):
        return key_range.clamp(max=rows)
    begins, ends = key_ranges(key_range, batch) or ((), ())
    return [(min(begin, rows), min(end, rows)) for begin, end in zip(begins, ends)]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **settings: Any,
) -> Any:
    """flash-attn's ``flash_attn_func``: ``[B, N, H, D]`` in and out, the last query at the last key as there.

    What the library does not have (``softcap``, ``alibi_slopes``, ``return_attn_probs``) raises ValueError unless it is off;
    results are deterministic always.

    >>> import torch, ringattn
    >>> q, k, v = torch.randn(3, 1, 10, 4, 8)
    >>> expected = ringattn.attention(q, k, v, is_causal=True, window=(3, 0))
    >>> torch.equal(ringattn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0)), expected)
    True
    """
    theirs = {"softcap": softcap, "alibi_slopes": alibi_slopes, "return_attn_probs": return_attn_probs}
    refuse("flash_attn_func", theirs, settings.get("group"))
    return attention(q, k, v, is_causal=causal, dropout_p=dropout_p, scale=softmax_scale, window=window_size, **settings)


def flash_attn_varlen_func(*args: Any, **settings: Any) -> Any:
    """flash-attn's function for packed sequences, which this version does not have: raises ValueError.

    >>> import ringattn
    >>> ringattn.flash_attn_varlen_func()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: flash_attn_varlen_func is not supported: packed sequences are not available in this version; use key_range ...
    """
    raise ValueError(f"flash_attn_varlen_func is not supported: {PACKED}")
