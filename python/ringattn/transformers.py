"""``attn_implementation="ringattn"`` for Hugging Face models."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ._config import Settings, checked
from .multihead import range_of_mask
from .torch import attention

# What a model does not decide itself.
_OPTIONS = {*Settings._fields, "group"} - {"is_causal", "window", "scale", "dropout_p"}


# What a model's mask says, handed from the mask function to the attention function. transformers passes masks on as tensors of
# four dimensions, so that is what it travels as: int64 [batch, 1, 1, columns], on the CPU, where the library needs the numbers.
_MARK = 0x72696E6761  # no mask of a user's begins with it
_COLUMNS = 7  # mark, causal, window left and right, keys that count (a static cache holds more), first key, past the last key


def _encode(is_causal: bool, window: tuple[int, int], keys: int, key_range: Optional[torch.Tensor], batch: int) -> torch.Tensor:
    mask = torch.tensor([_MARK, int(is_causal), *window, keys, 0, keys]).repeat(batch, 1)
    if key_range is not None:
        mask[:, -2:] = key_range
    return mask.view(batch, 1, 1, _COLUMNS)


def _decode(mask: Any) -> tuple[bool, tuple[int, int], int, list[list[int]]]:
    if (
        not isinstance(mask, torch.Tensor)
        or mask.dtype != torch.int64
        or mask.shape[1:] != (1, 1, _COLUMNS)
        or int(mask[0, 0, 0, 0]) != _MARK
    ):
        raise ValueError(
            "ringattn supports causal, full and sliding-window masks with padding; an attention mask that is given whole is not"
        )
    rows = mask.view(-1, _COLUMNS).tolist()
    _, is_causal, left, right, keys, _, _ = rows[0]
    return bool(is_causal), (left, right), keys, [row[-2:] for row in rows]


def register(name: str = "ringattn", **options: Any) -> None:
    """Makes ``attn_implementation=name`` known to transformers, for every model that uses its attention interface.

    ``options`` are those of ``ringattn.attention`` that a model does not decide: segment_lengths, dilation_rates, combine,
    offset, dilate_queries, group, layout, schedule, threads and so on. Without a pattern the results are those of ``sdpa``.

    Causal and full attention, sliding windows, padding on either side, grouped heads and caches are supported; masks of any
    other shape, softcapping, attention sinks and position biases raise ValueError.

    >>> import ringattn.transformers, torch, transformers
    >>> ringattn.transformers.register()
    >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                                   num_attention_heads=2, attn_implementation="ringattn")
    >>> transformers.LlamaForCausalLM(config)(torch.arange(10)[None]).logits.shape
    torch.Size([1, 10, 50])
    """
    unknown = set(options) - _OPTIONS
    if unknown:
        raise ValueError(f"register() knows no option {sorted(unknown)[0]!r}; it takes {', '.join(sorted(_OPTIONS))}")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError("ringattn.transformers needs transformers 4.53 or later") from error
    AttentionInterface.register(name, _attention_function(options))
    AttentionMaskInterface.register(name, _mask)


def _mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Optional[torch.Tensor] = None,
    q_length: Any = None,
    q_offset: Any = 0,
    kv_offset: int = 0,
    cache_position: Optional[torch.Tensor] = None,
    local_size: Optional[int] = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Reads a mask from the rule that transformers gives for it, and checks the reading at every boundary of the rule."""
    if use_vmap:
        raise ValueError(
            "ringattn supports causal, full and sliding-window masks with padding; this model adds a mask of its own"
        )
    if isinstance(q_length, torch.Tensor):  # before transformers 4.57 the positions of the queries came in its place
        cache_position, q_length = q_length, None
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
        device = cache_position.device
    q_offset = int(q_offset)
    first = q_offset - kv_offset  # the queries' place among the keys
    keys = min(kv_length, max(first + q_length, 0))
    queries = torch.arange(q_offset, q_offset + q_length, device=device)

    def allowed(distance: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the rule lets each query see the key at a distance; and the distance, which ends with the keys."""
        positions = (queries + distance).clamp(kv_offset, kv_offset + kv_length - 1)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        seen = [
            torch.as_tensor(mask_function(zero + entry, zero, queries, positions), device=device).expand(q_length).bool()
            for entry in range(batch_size)
        ]
        return torch.stack(seen), positions - queries

    is_causal = kv_length > q_length + first or _says_no(allowed(1))
    if not is_causal:
        keys = kv_length
    left = -1 if local_size is None else local_size - 1
    for distance in (-kv_length, -(left + 2), -(left + 1), -left, -1, 0, 1, left, left + 1, kv_length):
        seen, actual = allowed(distance)
        expected = torch.ones_like(seen)
        if is_causal:
            expected &= actual <= 0
        if left >= 0:
            expected &= actual >= -left
            if not is_causal:
                expected &= actual <= left
        if not bool((seen == expected).all()):
            raise ValueError(
                "ringattn supports causal, full and sliding-window masks with padding; this model's mask is another one "
                "(packed sequences, say)"
            )
    window = (-1, -1) if left < 0 else (left, 0 if is_causal else left)
    key_range = None
    if attention_mask is not None:
        padding = ~attention_mask[:, kv_offset : kv_offset + keys].bool()
        if padding.shape[1] < keys:
            padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[1]), value=True)
        key_range = range_of_mask(padding)
    return _encode(is_causal, window, keys, key_range, batch_size)


def _says_no(answer: tuple[torch.Tensor, torch.Tensor]) -> bool:
    seen, distance = answer
    return bool((~seen & (distance == 1)).any())


def _attention_function(options: dict[str, Any]) -> Callable[..., Any]:
    group = options.pop("group", None)
    base = checked(Settings(**options))

    def ringattn_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: Optional[float] = None,
        dropout: float = 0.0,
        is_causal: Optional[bool] = None,
        sliding_window: Optional[int] = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        for name in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is not supported by ringattn")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions is not supported by ringattn: the weights are never formed")
        window, key_range = (-1, -1), None
        if attention_mask is not None:
            causal, window, keys, key_range = _decode(attention_mask)
            key, value = key[:, :, :keys], value[:, :, :keys]
        else:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if sliding_window is not None:
                window = (sliding_window - 1, 0 if causal else sliding_window - 1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        settings = base._replace(is_causal=causal, window=window, scale=scaling, dropout_p=dropout)
        return attention(query, key, value, settings, key_range, None, group, False), None

    return ringattn_attention
