"""Attention under a mask that is read when it runs: ``torch.ops.ringattn.masked_forward`` and ``masked_backward``, for graphs
of Hugging Face models. As the operators of _operators.py, but causality, window, keys and padding come with the mask."""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import dist as _dist
from ._config import Settings, make_options
from ._hf_mask import check_positions, read
from ._operators import RESULTS, agreed, fake_backward, fake_forward, number_of, run_backward, run_forward, schema, state_of


def _call(mask: torch.Tensor, settings: tuple[Any, ...]) -> tuple[Any, Any]:
    """What the mask says, and the options."""
    told = read(mask)
    return told, make_options(Settings(*settings[:-1])._replace(is_causal=told.is_causal, window=told.window))


def _ranges(told: Any) -> Any:
    return None if told.key_range is None else tuple(zip(*told.key_range))


@torch.library.custom_op(
    "ringattn::masked_forward", mutates_args=(), schema=schema("Tensor mask", "Tensor? position_ids", "Tensor? seed")
)
def masked_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    position_ids: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where = _dist.resolve(settings[-1])
    with _dist.telling(where):
        (told, options), number = _call(mask, settings), number_of(seed)
    check_positions(told, position_ids, query.size(1), where, options.layout)
    key, value = key[:, : told.keys], value[:, : told.keys]
    out, lse, problem, number = run_forward(query, key, value, options, where, number, _ranges(told), True)
    assert lse is not None
    return out, lse, state_of(problem, number)


masked_forward.register_fake(fake_forward)


@torch.library.custom_op("ringattn::masked_backward", mutates_args=(), schema=schema(*RESULTS, "Tensor state", "Tensor mask"))
def masked_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    state: torch.Tensor,
    mask: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (told, options), where = _call(mask, settings), _dist.resolve(settings[-1])
    kept_key, kept_value = key[:, : told.keys], value[:, : told.keys]
    problem, seed = agreed(state, options, query, kept_key, kept_value)
    gradients = run_backward(query, kept_key, kept_value, out, lse, dout, None, problem, where, seed, _ranges(told))
    unused = key.size(1) - told.keys  # rows of a static cache that nobody has read
    if not unused:
        return gradients
    dq, dk, dv = gradients
    return dq, *(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, unused)) for x in (dk, dv))  # type: ignore[return-value]


masked_backward.register_fake(fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, mask, _, _, *ctx.settings = inputs
    out, lse, state = output
    ctx.mark_non_differentiable(lse, state)
    ctx.save_for_backward(query, key, value, out, lse, state, mask)


def _gradient(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, state, mask = ctx.saved_tensors
    gradients = masked_backward(query, key, value, out, lse, dout, state, mask, *ctx.settings)
    return (*gradients, *(None,) * (3 + len(ctx.settings)))


masked_forward.register_autograd(_gradient, setup_context=_save)
