"""Gradients of weights that every rank of a group holds.

A rank that holds some rows of a sequence has, for each weight, the part of the gradient that its rows contribute. The gradient
of one process that holds the whole sequence is the sum over the ranks: of every weight of a model, not of attention's alone.

What wraps a model may have averaged gradients before we see them (`_average.py` says over which ranks). Where these include the
ring, the average is turned into the ring's sum by a factor; else the ring's sum is formed here.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Optional

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from . import dist as _dist
from ._average import averages, local
from .modules import RingDilatedAttention

if TYPE_CHECKING:
    from .multihead import RingMultiheadDilatedAttention

_BUCKET = 64 << 20  # bytes that are added at once: a copy of all gradients would double them
_SAMPLES = 64  # elements of a gradient that are looked at
# Of parameters. No attributes of theirs, which are pickled with them.
_adders: Any = WeakTensorKeyDictionary()  # the `_Adder`, which adds the gradient during backward
_marks: Any = WeakTensorKeyDictionary()  # the latest `_Mark`


class _Gradient(NamedTuple):
    """How the gradient of a parameter becomes whole."""

    name: str
    parameter: torch.Tensor
    factor: Optional[float]  # None: it is added over the ring
    watched: torch.Tensor  # the parameter that autograd gives the gradient to

    def describe(self) -> str:
        p = self.parameter  # a shard that was averaged may have another shape on each rank
        return f"{self.name}, averaged" if self.factor is not None else f"{self.name} {list(p.shape)} {p.dtype}"


def sync_gradients(module: Any, group: Any) -> None:
    """Makes the gradients of a whole model those of one process that holds the whole sequence.

    Call it on every rank, once a step: after the backward pass of the last micro-batch, before gradients are clipped and used.
    A second call before they are cleared raises RuntimeError, for it would count them twice.

    Args:
        module: a model, plain or wrapped (``DistributedDataParallel``, ``FullyShardedDataParallel``, ``fully_shard``); give the
            wrapped one. Or a list of parameters whose gradients nothing has averaged.
        group: the ring. With None or an integer gradients are whole already, and nothing is done; so are those of a model whose
            attention takes ``inputs="full"``, and those of modules that were made with ``sync_gradients=True``.

    The loss of a rank is the sum over its rows divided by the **global** number of tokens. Where data parallelism runs over
    several rings, the result is the mean of the rings' gradients.

    >>> import torch, ringattn
    >>> module = ringattn.RingMultiheadDilatedAttention(16, 4, group=2)
    >>> out, _ = module(*[torch.randn(1, 8, 16)] * 3)
    >>> out.sum().backward()
    >>> ringattn.sync_gradients(module, 2)
    """
    where = _dist.resolve(group)
    if not isinstance(where, _dist.Processes):
        return
    try:
        if isinstance(module, nn.Module) and inputs_are_full(module):
            return
        gradients = _gradients(module, where)
    except ValueError as error:
        where.refuse(str(error))
        raise
    added = [gradient for gradient in gradients if gradient.factor is None]
    _compare(where, gradients, isinstance(module, nn.Module))
    with torch.no_grad():
        _complete(where, added)
        for gradient in gradients:
            if gradient.factor is not None and gradient.parameter.grad is not None:
                gradient.parameter.grad.mul_(gradient.factor)
        _add(where, [local(g.parameter.grad) for g in added if g.parameter.grad is not None])
    _mark(gradients)


def inputs_are_full(module: nn.Module) -> bool:
    kinds = {part.inputs for part in module.modules() if isinstance(part, RingDilatedAttention)}
    if kinds == {"full", "shard"}:
        raise ValueError(
            'some attention modules of this model have inputs="full" and others inputs="shard"; sync_gradients needs the same '
            "in all of them"
        )
    return kinds == {"full"}


def _gradients(module: Any, where: Any) -> list[_Gradient]:
    if isinstance(module, nn.Module):
        named: Iterable[tuple[str, torch.Tensor]] = module.named_parameters()
    else:
        once = {id(p): p for p in module}.values()  # two layers may share a weight
        named = ((f"parameter {index}", p) for index, p in enumerate(once))
    average, ring, found = averages(module), None, []
    for name, p in named:
        if not p.requires_grad:
            continue
        if p.grad is not None and p.grad.is_sparse:
            raise ValueError(f"the gradient of {name} is sparse; only dense ones are added: make its layer with sparse=False")
        over, factor = average.get(id(p)), None
        seen = None if over is None else over.seen
        adder = _adders.get(p)
        if seen is None and adder is not None and adder.ring() is not None:
            continue
        if over is not None:
            ring = where.members() if ring is None else ring
            if ring <= over.ranks:
                factor = where.ranks * over.divisor / len(over.ranks)
            elif len(ring & over.ranks) > 1:
                raise ValueError(
                    f"the gradient of {name} was averaged over ranks {sorted(over.ranks)}, which are some of the ring's "
                    f"{sorted(ring)} but not all: data parallelism must run over whole rings, or over one rank of each"
                )
        found.append(_Gradient(name, p, factor, p if seen is None else seen))
    return found


# ------------------------------------------------------------------------------------------------------- do the ranks agree?


def _number(text: bytes) -> int:
    return struct.unpack("<q", hashlib.blake2b(text, digest_size=8).digest())[0]  # type: ignore[no-any-return]


def _compare(where: Any, gradients: list[_Gradient], whole_model: bool) -> None:
    """Raises on every rank, before anything is added, if one of them is not like the others."""
    described = [gradient.describe().encode() for gradient in gradients]
    stale = any(mark.stale() for mark in {_marks.get(g.parameter) for g in gradients} - {None})
    sample = _sample(gradients) if whole_model else 0
    records = where.gather("gradients", [_number(b"\n".join(described)), int(stale), sample])
    if any(record[0] != records[0][0] for record in records):
        _name_difference(where, described)
    if any(record[1] for record in records):
        raise RuntimeError(
            "the gradients were made whole before and have not been cleared since, so that they would count twice: call "
            "sync_gradients once a step, after the last micro-batch, and then the optimizer's step() and zero_grad()"
        )
    if sample and all(record[2] == sample for record in records):
        raise ValueError(
            "the gradients are the same on every rank of the ring, so something has added or averaged them before: give "
            "sync_gradients the wrapped model (not its .module), or leave it out where every rank computes the whole sequence"
        )


def _name_difference(where: Any, described: list[bytes]) -> None:
    counts = [count for (count,) in where.gather("gradients", [len(described)])]
    padded = [_number(text) for text in described] + [0] * (max(counts) - len(described))
    everyone = where.gather("gradients", padded)
    index = next(i for i in range(len(padded)) if len({numbers[i] for numbers in everyone}) > 1)
    other = next(rank for rank in range(where.ranks) if everyone[rank][index] != everyone[0][index])
    mine = described[index] if index < len(described) else f"missing ({len(described)} in all)".encode()
    text = mine[:240].ljust(240, b"\0")
    everyone = where.gather("gradients", list(struct.unpack("<30q", text)))
    texts = [struct.pack("<30q", *numbers).rstrip(b"\0").decode(errors="replace") for numbers in everyone]
    raise ValueError(
        f"the ranks hold different parameters, and nothing was added: parameter {index} is {texts[0]} on rank 0 and "
        f"{texts[other]} on rank {other}"
    )


def _sample(gradients: list[_Gradient]) -> int:
    """A digest of some elements of the gradients that will be added; 0 where there are none but zeros."""
    parts = []
    for gradient in gradients:
        if gradient.factor is None and gradient.parameter.grad is not None:
            flat = local(gradient.parameter.grad).detach().reshape(-1)
            parts.append(flat[:: max(1, flat.numel() // _SAMPLES)].double())
    values = torch.cat([part.to(parts[0].device) for part in parts]).cpu() if parts else torch.zeros(0)
    return _number(values.numpy().tobytes()) if bool(values.any()) else 0


def _complete(where: Any, gradients: list[_Gradient]) -> None:
    """A weight that one rank did not use still has a gradient on the others."""
    missing = [gradient.parameter.grad is None for gradient in gradients]
    if not any(some for (some,) in where.gather("gradients", [int(any(missing))])):
        return
    parts = [missing[begin : begin + 62] for begin in range(0, len(missing), 62)]
    bits = [sum(1 << i for i, none in enumerate(part) if not none) for part in parts]
    used = [0] * len(bits)
    for numbers in where.gather("gradients", bits):
        used = [one | other for one, other in zip(used, numbers)]
    for index, gradient in enumerate(gradients):
        if missing[index] and used[index // 62] >> index % 62 & 1:
            gradient.parameter.grad = torch.zeros_like(gradient.parameter)


def _add(where: Any, tensors: list[torch.Tensor]) -> None:
    """Adds each tensor over the ranks of a group of processes, in place."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        while same:
            bucket: list[torch.Tensor] = []
            size = 0
            while same and (not bucket or size + same[-1].nbytes <= _BUCKET):
                bucket.append(same.pop())
                size += bucket[-1].nbytes
            if len(bucket) == 1 and bucket[0].is_contiguous():
                where.add(bucket[0].view(-1))
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            where.add(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view_as(tensor))


# ------------------------------------------------------------------------------------------------- were they cleared since?


class _Mark:
    """Set on parameters whose gradients are whole. Knows, from one of them, whether they were cleared since: by None, by
    another tensor, or by zeros before the next gradient arrived."""

    def __init__(self, watched: torch.Tensor):
        self._watched, self._gradient = weakref.ref(watched), weakref.ref(watched.grad)
        self._on_top = self._cleared = False  # another gradient was added to the whole one; came when that was gone
        self._hook = watched.register_hook(self._arrives)

    def _arrives(self, _: torch.Tensor) -> None:
        self._on_top = self._still_there()
        if not self._on_top:
            self._cleared = True
            self._hook.remove()

    def _still_there(self) -> bool:
        watched = self._watched()
        if watched is None:
            return False
        kept = getattr(watched, "_saved_grad_shard", None)  # where FSDP puts a flat parameter's gradient during backward
        gradient = watched.grad if watched.grad is not None and watched.grad is self._gradient() else kept
        return gradient is not None and bool(local(gradient).any())

    def stale(self) -> bool:
        watched = self._watched()
        if self._cleared or watched is None or watched.grad is None:
            return False
        return self._on_top or self._still_there()


def _mark(gradients: list[_Gradient]) -> None:
    for gradient in gradients:
        watched = gradient.watched
        if watched.grad is not None and bool(local(watched.grad).any()):
            mark = _Mark(watched)
            for other in gradients:
                _marks[other.parameter] = mark
            return


# ------------------------------------------------------------------------------------------------------------- during backward


class _Adder:
    """A hook of a weight: adds its gradient over the ring that its module is on, as soon as backward has it, before it is
    accumulated."""

    def __init__(self, module: RingMultiheadDilatedAttention):
        self._module = weakref.ref(module)

    def ring(self) -> Any:
        """The processes over which gradients are added; None where they are whole without that."""
        module = self._module()
        return _dist.resolve(module.group) if module is not None and module.is_divided else None

    def __call__(self, gradient: torch.Tensor) -> Optional[torch.Tensor]:
        where = self.ring()
        if where is None:
            return None
        total = gradient.contiguous().clone()
        where.add(total.view(-1))
        return total


def sync_on_backward(module: RingMultiheadDilatedAttention) -> None:
    """Has the gradient of each weight that the module has now added over its ring during backward.

    The ranks must use the same weights in the same order. `sync_gradients` leaves these weights alone.
    """
    for p in module.parameters():
        if p in _adders or not p.is_floating_point() or hasattr(p, "to_local"):  # fully_shard's give way to others in backward
            continue
        adder, needed = _Adder(module), p.requires_grad
        p.requires_grad_().register_hook(adder)  # a frozen weight may be thawed later
        p.requires_grad_(needed)
        _adders[p] = adder
