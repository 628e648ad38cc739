"""``attention`` under torch's transforms: reverse mode and vmap work, forward mode and second derivatives raise.

torch.func differentiates Functions that have a `setup_context`, which the gradients of torch.library's operators lack.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.autograd import forward_ad

from ._operators import backward_op, forward_op, gradient, no_second_derivative, save


def _no_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "ringattn.attention has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, forward_ad): use reverse mode, "
        "torch.func.vjp or jacrev"
    )


class Backward(torch.autograd.Function):
    """The backward pass, which cannot be differentiated again."""

    generate_vmap_rule = True
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return backward_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        no_second_derivative()


class Forward(torch.autograd.Function):
    generate_vmap_rule = True
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return forward_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Optional[torch.Tensor], dlse: Optional[torch.Tensor], _: Any) -> Any:
        return gradient(ctx, dout, dlse, Backward.apply)


def refuse_forward_mode(*tensors: Any) -> None:
    """Raises where a tensor carries a tangent, which would be lost."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            _no_forward_mode()
