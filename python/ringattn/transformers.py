"""``attn_implementation="ringattn"`` for Hugging Face models."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from . import dist as _dist
from ._config import Settings, checked
from ._hf_mask import check_positions, is_mask, read, write, write_op
from ._hf_op import masked_forward
from ._hf_rule import NOT_SUPPORTED, without_packing
from ._hf_rule import read as read_rule
from .torch import _ready, _seed_tensor, attention, key_of

# What a model does not decide itself.
_OPTIONS = {*Settings._fields, "group"} - {"is_causal", "window", "scale", "dropout_p"}

# What models hand to attention beside its arguments and does not change it.
_HARMLESS = {
    "cache_position",
    "deterministic",  # results are always the same
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",  # query and key have them already
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}
_PACKED = "packed documents are not kept apart: give each document its own row, padded, with an attention_mask"
_REFUSED = {
    "block_indices": "sparse attention by given indices is not supported",
    "cache": "paged caches are not supported",
    "cu_seq_lens_k": _PACKED,
    "cu_seq_lens_q": _PACKED,
    "head_mask": "heads cannot be masked",
    "indices": "sparse attention by given indices is not supported",
    "layer_head_mask": "heads cannot be masked",
    "max_length_k": _PACKED,
    "max_length_q": _PACKED,
    "output_attentions": "the weights are never formed",
    "position_bias": "a bias for each pair would take the memory that this saves",
    "s_aux": "attention sinks are not available in this version",
    "seq_idx": _PACKED,
    "sinks": "attention sinks are not available in this version",
    "softcap": "capped scores are not available in this version",
}


def register(name: str = "ringattn", **options: Any) -> None:
    """Makes ``attn_implementation=name`` known to transformers, for every model that uses its attention interface.

    ``options`` are those of ``ringattn.attention`` that a model does not decide: segment_lengths, dilation_rates, combine,
    offset, dilate_queries, group, layout, schedule, threads and so on. Without a pattern the results are those of ``sdpa``.

    Causal and full attention, sliding windows, padding on either side, grouped heads and caches are supported; masks of any
    other shape, packed documents, softcapping, attention sinks and position biases raise ValueError.

    With a group of processes each rank calls the model with its rows: ``ringattn.shard`` of ``input_ids``, ``attention_mask``
    and the shifted labels, and ``position_ids=ringattn.positions(n, group, layout)[None]``, which is checked.

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
    group = options.pop("group", None)
    base = checked(Settings(**options))
    AttentionInterface.register(name, _attention_function(base, group))
    AttentionMaskInterface.register(name, _mask_function(base.layout, group))


# ------------------------------------------------------------------------------------------------------------------------- mask


def _mask_function(layout: str, group: Any) -> Callable[..., torch.Tensor]:
    def ringattn_mask(
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
        **others: Any,
    ) -> torch.Tensor:
        if use_vmap:
            raise ValueError(f"{NOT_SUPPORTED}: this one is combined with another function")
        if isinstance(q_length, torch.Tensor):  # before transformers 5 the positions of the queries came in its place
            cache_position, q_length = q_length, None
        if cache_position is not None:
            q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
        offset, q_offset = (q_offset, 0) if isinstance(q_offset, torch.Tensor) else (None, q_offset)
        if local_size == 0:  # a model whose layers have no window may ask for a mask of them all the same: it leaves no key
            from transformers.masking_utils import causal_mask_function

            nothing = torch.zeros(batch_size, kv_length, dtype=torch.bool, device=device)
            mask_function, attention_mask = causal_mask_function, nothing
        compiling, seen, expected = torch.compiler.is_compiling(), None, None
        if compiling and attention_mask is None and _may_be_packed(mask_function, others):
            if group is not None:
                raise ValueError(
                    "under torch.compile register(group=...) needs an attention_mask, of ones where nothing is padded"
                )
            left, right = -1 if local_size is None else local_size - 1, 0
            first = q_offset if offset is None else offset
            seen, expected = _samples(mask_function, batch_size, q_length, first, kv_length, kv_offset, left, device)
        else:
            if not compiling:
                mask_function, packed = without_packing(mask_function)
                if packed and _dist.place_of(group) is None:
                    raise ValueError(f"position_ids are not consecutive, which counts as packed documents; {_PACKED}")
            left, right = read_rule(mask_function)
        numbers = [batch_size, q_length, q_offset, kv_length, kv_offset, left, right]
        return (write_op if compiling else write)(attention_mask, seen, expected, offset, numbers, key_of(group), layout)

    return ringattn_mask


def _may_be_packed(mask_function: Callable[..., Any], others: dict[str, Any]) -> bool:
    """Whether a rule may look into position ids. While it traces, transformers takes all of them for those of packed documents,
    and a graph cannot look into the rule: samples of it are compared when the graph runs."""
    from transformers.masking_utils import causal_mask_function

    return mask_function is not causal_mask_function and "allow_is_bidirectional_skip" not in others


def _samples(
    rule: Callable[..., Any], batch: int, q_length: int, first: Any, kv_length: int, kv_offset: int, left: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a causal rule, windowed where left is not -1, says on both sides of each of its edges, and what it must say."""
    queries = torch.arange(q_length, device=device) + first
    entries, zero = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)
    seen, expected = [], []
    for distance in (-1, 0, 1) if left < 0 else (-1, 0, 1, left, left + 1):
        keys = (queries - distance).clamp(kv_offset, kv_offset + kv_length - 1)
        seen.append(rule(entries, zero, queries[None], keys[None]).expand(batch, q_length))
        apart = queries - keys
        expected.append(((apart >= 0) & (apart <= left if left >= 0 else apart >= 0)).expand(batch, q_length))
    return torch.stack(seen), torch.stack(expected)


# -------------------------------------------------------------------------------------------------------------------- attention


def _attention_function(base: Settings, group: Any) -> Callable[..., Any]:
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
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        for name, given in others.items():
            if name not in _HARMLESS and given is not None and given is not False:
                _refuse(name)
        query, key, value = _rows_first(query), _rows_first(key), _rows_first(value)
        if attention_mask is None:
            if _dist.place_of(group) is not None:
                raise ValueError(
                    "register(group=...) learns the lengths on all ranks from the mask, and this model passes none to attention"
                )
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            window = base.window
            if sliding_window is not None:
                window = (sliding_window - 1, 0 if causal else sliding_window - 1)
            settings = base._replace(scale=scaling, dropout_p=dropout, is_causal=causal, window=window)
            return attention(query, key, value, settings, None, None, group, False), None
        position_ids = others.get("position_ids")
        if torch.compiler.is_compiling() and is_mask(attention_mask):
            query, key, value = _ready(query, key, value)
            seed, settings = _seed_tensor(None, dropout), base._replace(scale=scaling, dropout_p=dropout)
            out, _, _ = masked_forward(query, key, value, attention_mask, position_ids, seed, *settings, key_of(group))
            return out, None
        told = read(attention_mask)
        if told.checked is None or told.checked is not position_ids:
            check_positions(told, position_ids, query.size(1), _dist.resolve(group), base.layout)
        if told.keys < key.size(1):
            key, value = key[:, : told.keys], value[:, : told.keys]
        settings = base._replace(scale=scaling, dropout_p=dropout, is_causal=told.is_causal, window=told.window)
        return attention(query, key, value, settings, told.key_range, None, group, False), None

    return ringattn_attention


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """From transformers' order, heads before rows, to ours."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _refuse(name: str) -> None:
    if name in _REFUSED:
        raise ValueError(f"{name} is not supported by ringattn: {_REFUSED[name]}")
    raise TypeError(f"the model hands {name!r} to attention, which ringattn does not know; is it a misspelt argument?")
