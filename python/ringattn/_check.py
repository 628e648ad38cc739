"""``check``: does a module compute the same on a ring as on one rank?"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from . import dist as _dist
from ._config import rows_problem
from .gradients import inputs_are_full, sync_gradients
from .modules import RingDilatedAttention


class Difference(NamedTuple):
    """One tensor compared: the largest difference, relative to the largest absolute value (or to 1e-30)."""

    name: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


class CheckReport(NamedTuple):
    """What ``check`` found: truthy if nothing differs; printed, a line for each tensor.

    >>> import torch, ringattn
    >>> report = ringattn.check(ringattn.RingDilatedAttention(), torch.randn(3, 1, 12, 2, 4).unbind(), group=2)
    >>> report.ok, report.ranks, report.differs
    (True, 2, [])
    """

    tensors: tuple[Difference, ...]
    ranks: int

    @property
    def ok(self) -> bool:
        return all(tensor.ok for tensor in self.tensors)

    @property
    def differs(self) -> list[str]:
        """The names of the tensors that differ."""
        return [tensor.name for tensor in self.tensors if not tensor.ok]

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{self.ranks} ranks against one: " + (
            "all tensors agree" if self.ok else "differs in " + ", ".join(self.differs)
        )
        width = max(len(tensor.name) for tensor in self.tensors)
        return "\n".join(
            [head]
            + [
                f"  {t.name:{width}}  {t.error:.1e} (allowed {t.allowed:.1e}){'' if t.ok else '  DIFFERS'}"
                for t in self.tensors
            ]
        )


_ALLOWED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}


def check(module: nn.Module, sample: Any, group: Any = None, tolerance: Optional[float] = None, **forward: Any) -> CheckReport:
    """Compares a module on a ring with the same module on one rank, gradients of inputs and weights included.

    Args:
        module: holds one or more of this package's attention modules; its other parts must treat rows one by one.
        sample: the input for the whole sequence, equal on every rank: a tensor with the rows in dimension 1, or a tuple of
            them.
        group: what to compare with one rank; the modules' own group by default.
        tolerance: largest difference relative to a tensor's largest value; by default 2e-5 for float32, more for narrower
            types.
        forward: further arguments of the module's forward, ``is_causal=True`` say.

    Every rank of a group of processes calls it, and each gets the whole report. The module, its modes and gradients are left as
    they were.

    >>> import torch, ringattn
    >>> module = ringattn.RingMultiheadDilatedAttention(16, 4, segment_lengths=[8, 16], dilation_rates=[1, 2], offset="residue")
    >>> bool(ringattn.check(module, torch.randn(1, 30, 16), group=3, is_causal=True))
    True
    """
    inner = [part for part in module.modules() if isinstance(part, RingDilatedAttention)]
    if not inner:
        raise ValueError("module holds none of this package's attention modules")
    if group is None:
        group = inner[0].group
    where = _dist.resolve(group)
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    before = [(part, part._group, part._all_processes) for part in inner]
    kept = [(p, p.grad) for p in module.parameters()]
    modes = [(child, child.training) for child in module.modules()]
    try:
        module.eval()  # dropout elsewhere draws from generators that know nothing of ranks
        for part in inner:
            part.group = None
        alone = _results(module, inputs, None, forward)
        for part in inner:
            part.group = group
        if isinstance(where, _dist.Processes) and not inputs_are_full(module):
            ring = _results(module, inputs, _Rows(where, inner[0].layout), forward)
            sync_gradients([p for p in module.parameters()], group)
            ring.update({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        else:
            ring = _results(module, inputs, None, forward)
    finally:
        for child, training in modes:
            child.training = training
        for part, its_group, all_processes in before:
            part.group, part._all_processes = its_group, all_processes
        for p, gradient in kept:
            p.grad = gradient
    return CheckReport(tuple(_compare(name, alone[name], ring.get(name), where, tolerance) for name in alone), where.ranks)


class _Rows:
    """This rank's rows of a whole tensor."""

    def __init__(self, where: Any, layout: str):
        self.where, self.layout = where, layout

    def index(self, rows: int) -> torch.Tensor:
        problem = rows_problem(self.layout, rows)
        return torch.cat(
            [
                torch.arange(count, device="cpu") * step + start
                for start, step, count in problem.shards(self.where.ranks)[self.where.rank][1]
            ]
        )


@torch.enable_grad()
def _results(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], rows: Optional[_Rows], forward: dict[str, Any]
) -> dict[str, Any]:
    for p in module.parameters():
        p.grad = None
    parts = [x.detach() if rows is None else x.detach()[:, rows.index(x.size(1)).to(x.device)] for x in inputs]
    parts = [x.clone().requires_grad_() if x.is_floating_point() else x for x in parts]
    out = module(*parts, **forward)
    out = out[0] if isinstance(out, tuple) else out
    whole = inputs[0].size(1)
    # The gradient of the output depends on the row alone, so that every division into ranks sees the same one.
    shape, generator = (out.size(0), whole, *out.shape[2:]), torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, device="cpu").to(out)
    out.backward(weight if rows is None else weight[:, rows.index(whole).to(weight.device)])
    results = {"output": out.detach()}
    results.update({f"input {i} gradient": x.grad for i, x in enumerate(parts) if x.grad is not None})
    if rows is not None:
        return {name: (tensor, rows) for name, tensor in results.items()}
    results.update({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    return results


def _compare(name: str, expected: torch.Tensor, found: Any, where: Any, tolerance: Optional[float]) -> Difference:
    allowed = _ALLOWED[expected.dtype] if tolerance is None else tolerance
    if found is None:
        error = float("inf")
    else:
        largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-30)
        if isinstance(found, tuple):
            found, rows = found
            expected = expected[:, rows.index(expected.size(1)).to(expected.device)]
        if found.shape != expected.shape:
            error = float("inf")
        else:
            error = float((found.double() - expected.double()).abs().max()) / largest if found.numel() else 0.0
            error = float("inf") if error != error else error
    if isinstance(where, _dist.Processes):  # every rank reports the worst of all
        bits = struct.unpack("<q", struct.pack("<d", error))
        error = max(struct.unpack("<d", struct.pack("<q", other))[0] for (other,) in where.gather("check", list(bits)))
    return Difference(name, error, allowed)
