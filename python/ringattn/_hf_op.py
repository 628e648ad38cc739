"""Attention under a mask that is read when it runs: ``torch.ops.ringattn.masked_forward`` and ``masked_backward``, for graphs
of Hugging Face models. As the operators of _operators.py, but causality, window, keys and padding come with the mask."""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import dist as _dist
from ._config import Settings, make_options, problem_for
from ._hf_mask import check_positions, read
from ._operators import _SETTINGS, _STATE, _checked, _lse_dtype, number_of, run_backward, run_forward, state_of


def _call(mask: torch.Tensor, settings: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """What the mask says, options and group."""
    told = read(mask)
    given = Settings(*settings[:-1])._replace(is_causal=told.is_causal, window=told.window)
    return told, make_options(given), _dist.resolve(settings[-1])


def _ranges(told: Any) -> Any:
    return None if told.key_range is None else tuple(zip(*told.key_range))


@torch.library.custom_op(
    "ringattn::masked_forward",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? position_ids, Tensor? seed, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor)",
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
    told, options, where = _call(mask, settings)
    check_positions(told, position_ids, query.size(1), where, options.layout)
    key, value = key[:, : told.keys], value[:, : told.keys]
    out, lse, problem, number = run_forward(query, key, value, options, where, number_of(seed), _ranges(told), True)
    assert lse is not None
    return out, lse, state_of(problem, number)


@masked_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    batch, rows, heads, _ = query.shape
    return (
        query.new_empty(query.shape),
        query.new_empty((batch, heads, rows), dtype=_lse_dtype(query.dtype)),
        torch.empty((_STATE,), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op(
    "ringattn::masked_backward",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor dout, Tensor state, Tensor mask, "
        f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)"
    ),
)
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
    told, options, where = _call(mask, settings)
    kept = [x[:, : told.keys] for x in (key, value)]
    seq_q, seq_k, seed = state.tolist()
    problem = problem_for(options, _checked(query, *kept)[0]._replace(seq_q=seq_q, seq_k=seq_k))
    gradients = run_backward(query, *kept, out, lse, dout, None, problem, where, seed % 2**64, _ranges(told))
    unused = key.size(1) - told.keys  # rows of a static cache that nobody has read
    if not unused:
        return gradients
    dq, dk, dv = gradients
    return dq, *(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, unused)) for x in (dk, dv))  # type: ignore[return-value]


@masked_backward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


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
