"""``RingMultiheadDilatedAttention``: a drop-in for ``nn.MultiheadAttention(batch_first=True)``."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as _checkpoint

from . import dist as _dist
from .gradients import sync_on_backward
from .modules import RingDilatedAttention
from .torch import key_of


def range_of_mask(mask: torch.Tensor, group: str = "", layout: str = "contiguous") -> torch.Tensor:
    """The range of keys that a padding mask ``[B, N]`` leaves (True, or -inf: padding), as int64 ``[B, 2]``. Raises where they
    are no range.

    On a group of processes the mask covers this rank's keys.
    """
    return (_range_op if torch.compiler.is_compiling() else padding_range)(mask, group, layout)


def padding_range(mask: torch.Tensor, group: str, layout: str, name: str = "key_padding_mask") -> torch.Tensor:
    """`range_of_mask` outside of graphs; ``name`` is what the user calls the mask."""
    where = _dist.resolve(group)
    if mask.dtype != torch.bool:
        padding = mask != 0
        if bool((padding & (mask != float("-inf"))).any()):
            reason = f"{name} adds numbers to the scores; only 0 and -inf (or a boolean mask) are supported"
            raise _dist.refusal(where, ValueError(reason))
        mask = padding
    keep = ~mask.cpu()
    batch, rows = keep.shape
    positions, total = torch.arange(rows, device="cpu"), rows
    if isinstance(where, _dist.Processes):
        total, positions = where.positions(name, rows, layout)
    count = keep.sum(1)
    begin = torch.where(keep, positions, total).amin(1) if rows else keep.new_full((batch,), total, dtype=torch.int64)
    end = torch.where(keep, positions + 1, 0).amax(1) if rows else keep.new_zeros(batch, dtype=torch.int64)
    if isinstance(where, _dist.Processes):
        numbers = where.gather(name, torch.cat([count, begin, end]).tolist())
        every = torch.tensor(numbers, device="cpu").view(where.ranks, 3, batch)
        count, begin, end = every[:, 0].sum(0), every[:, 1].amin(0), every[:, 2].amax(0)
    wrong = (count > 0) & (end - begin != count)
    if wrong.any():
        entry = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} leaves {int(count[entry])} keys of batch entry {entry} that are not adjacent (between "
            f"{int(begin[entry])} and {int(end[entry]) - 1}); only a range of keys, padded before or after, is supported"
        )
    empty = count == 0
    return torch.stack([begin.masked_fill(empty, 0), end.masked_fill(empty, 0)], 1)


@torch.library.custom_op("ringattn::range_of_mask", mutates_args=(), schema="(Tensor mask, str group, str layout) -> Tensor")
def _range_op(mask: torch.Tensor, group: str, layout: str) -> torch.Tensor:
    return padding_range(mask, group, layout)  # an operator, so that the check survives torch.compile


@_range_op.register_fake
def _(mask, group, layout):  # type: ignore[no-untyped-def]
    return torch.empty((mask.shape[0], 2), dtype=torch.int64, device="cpu")


def _loaded(module: RingMultiheadDilatedAttention, _: Any) -> None:
    module._add_gradients()


class RingMultiheadDilatedAttention(nn.Module):
    """Multi-head attention with projections; weights named, shaped and initialised like those of ``nn.MultiheadAttention``.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            ``nn.MultiheadAttention``; batch_first is True by default, and add_bias_kv and add_zero_attn are not supported.
        segment_lengths, dilation_rates: the branches of a dilated pattern; None for dense attention.
        layer_norm: LongNet's LayerNorm between attention and output projection (``norm.weight``, ``norm.bias``).
        checkpoint: keeps only the inputs for backward and computes the module again there.
        sync_gradients: on a group of processes, adds the weights' gradients over the ranks during backward, those of a copy of
            the module, too. Without it call ``ringattn.sync_gradients(module, group)`` after backward.
        Everything else: as in ``RingDilatedAttention``. With ``inputs="full"`` every rank projects all rows, and the weights'
            gradients are whole on every rank.

    ``forward`` has the arguments of ``nn.MultiheadAttention`` and returns ``(output, None)``; ``need_weights`` is False by
    default. ``attn_mask`` is accepted if it is the causal mask or masks nothing, ``key_padding_mask`` if the keys that it
    leaves are one contiguous range.

    >>> import torch, ringattn
    >>> theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    >>> ours = ringattn.RingMultiheadDilatedAttention(32, 4)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 10, 32)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-5)
    True
    """

    bias_k: None = None
    bias_v: None = None
    add_zero_attn = False
    # nn.TransformerEncoderLayer computes attention itself, without calling the module, if this is True. Ours must be called.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        batch_first: bool = True,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        *,
        segment_lengths: Optional[Sequence[int]] = None,
        dilation_rates: Optional[Sequence[int]] = None,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        checkpoint: bool = False,
        sync_gradients: bool = False,
        ring_size: Optional[int] = None,
        group: Any = None,
        **options: Any,
    ):
        super().__init__()
        if add_bias_kv or add_zero_attn:
            name = "add_bias_kv" if add_bias_kv else "add_zero_attn"
            raise ValueError(f"{name} is not supported: it adds a key that has no position")
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim is {embed_dim} and num_heads {num_heads}; embed_dim must be a multiple of num_heads")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        if self.head_dim > 256:
            raise ValueError(
                f"embed_dim {embed_dim} over {num_heads} heads makes head dims of {self.head_dim}; 256 is the largest supported"
            )
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        self.batch_first, self.checkpoint = bool(batch_first), bool(checkpoint)
        if options.get("query_placement") not in (None, "sharded"):
            raise ValueError("query_placement must be sharded here: queries are projected from the rows that a rank holds")
        # The pattern and the ring; computes in the type of the projections.
        self.attention = RingDilatedAttention(
            segment_lengths, dilation_rates, dropout, ring_size, None, None, group=group, **options
        )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        if self.kdim == embed_dim and self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty((3 * embed_dim, embed_dim), **place))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = nn.Parameter(torch.empty((embed_dim, embed_dim), **place))
            self.k_proj_weight = nn.Parameter(torch.empty((embed_dim, self.kdim), **place))
            self.v_proj_weight = nn.Parameter(torch.empty((embed_dim, self.vdim), **place))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **place))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **place) if layer_norm else None
        self.reset_parameters()
        self._sync_gradients = bool(sync_gradients)
        self._add_gradients()
        # assign=True brings other parameters
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]

    def _add_gradients(self) -> None:
        if self._sync_gradients:
            sync_on_backward(self)

    def _apply(self, *arguments: Any, **options: Any) -> RingMultiheadDilatedAttention:
        # to_empty, say, makes other parameters
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self._add_gradients()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # of a copy
        self._add_gradients()

    def reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def dropout(self) -> float:
        return self.attention.dropout

    @property
    def group(self) -> Any:
        return self.attention.group

    @group.setter
    def group(self, group: Any) -> None:
        self.attention.group = group

    @property
    def is_divided(self) -> bool:
        """Whether this process holds some of the rows only."""
        return self.attention.inputs == "shard" and key_of(self.group).startswith(_dist.PROCESSES)

    def forward(
        self,
        query: torch.Tensor,
        key: Optional[torch.Tensor] = None,
        value: Optional[torch.Tensor] = None,
        key_padding_mask: Optional[torch.Tensor] = None,
        need_weights: bool = False,
        attn_mask: Optional[torch.Tensor] = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """``[B, N, E]`` in (``[N, B, E]`` without batch_first, ``[N, E]`` without a batch), ``(output, None)`` out. key
        defaults to query, and value to key."""
        if need_weights:
            raise self._refusal(
                "need_weights=True is not supported: the weights are never formed, which is what makes long sequences possible"
            )
        if query.is_nested:  # nn.TransformerEncoder makes one of padding in evaluation
            raise self._refusal("query is a nested tensor; give nn.TransformerEncoder enable_nested_tensor=False")
        if query.dim() not in (2, 3):
            shape = tuple(query.shape)
            raise self._refusal(f"query has shape {shape}; it must be [batch, rows, embed_dim] or [rows, embed_dim]")
        key = query if key is None else key
        value = key if value is None else value
        together = query is key and key is value
        single = query.dim() == 2
        if single:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        causal = self._causal(attn_mask, is_causal, query, key)
        key_range = self._key_range(key_padding_mask, key)
        if together and self.in_proj_weight is not None:
            key = value = None  # one projection; said here, since a checkpoint may hand over copies of one tensor
        if self.checkpoint and torch.is_grad_enabled():
            output = _checkpoint(self._attend, query, key, value, causal, key_range, use_reentrant=False)
        else:
            output = self._attend(query, key, value, causal, key_range)
        if single:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, None

    def _attend(
        self,
        query: torch.Tensor,
        key: Optional[torch.Tensor],
        value: Optional[torch.Tensor],
        causal: bool,
        key_range: Optional[torch.Tensor],
    ) -> torch.Tensor:
        inner = self.attention
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in self._project(query, key, value))
        out = inner.attend(q, k, v, causal, key_range).flatten(2)
        if self.norm is not None:
            out = self.norm(out)
        projected: torch.Tensor = self.out_proj(out)
        return projected

    def _project(
        self, query: torch.Tensor, key: Optional[torch.Tensor], value: Optional[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if key is None or value is None:
            assert self.in_proj_weight is not None
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases))

    def _refusal(self, reason: str) -> Exception:
        return _dist.refusal(key_of(self.group), ValueError(reason))

    def _causal(self, attn_mask: Optional[torch.Tensor], is_causal: bool, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether the call is causal. A mask that says anything else raises."""
        if attn_mask is None:
            return is_causal
        if self.is_divided:
            raise self._refusal("attn_mask is not supported on a group of processes: give is_causal=True instead")
        rows, keys = query.shape[1], key.shape[1]
        if torch.compiler.is_compiling():
            if not is_causal:
                raise self._refusal("attn_mask is not supported in a compiled graph: give is_causal=True")
            if rows != keys:  # the mask may put the first query at the first key, and its values cannot be looked at here
                raise self._refusal(
                    f"attn_mask is not supported in a compiled graph with {rows} queries and {keys} keys: give is_causal=True "
                    f"alone, which puts the last query at the last key"
                )
            return True
        mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask != 0
        if attn_mask.dtype != torch.bool and bool(torch.any(mask & (attn_mask != float("-inf")))):
            raise self._refusal("attn_mask adds numbers to the scores; only a causal mask (-inf after each query) is supported")
        if mask.shape[-2:] != (rows, keys):
            raise self._refusal(f"attn_mask has shape {tuple(attn_mask.shape)}; it must end in [{rows}, {keys}]")
        causal = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).triu(1 + keys - rows)
        if bool((mask == causal).all()):
            return True
        if not is_causal and not bool(mask.any()):
            return False
        raise self._refusal(
            "attn_mask is not the causal mask in which the last query meets the last key; other masks are not supported: use "
            "is_causal, window or key_padding_mask"
        )

    def _key_range(self, mask: Optional[torch.Tensor], key: torch.Tensor) -> Optional[torch.Tensor]:
        if mask is None:
            return None
        if mask.shape != key.shape[:2]:
            raise self._refusal(f"key_padding_mask has shape {tuple(mask.shape)}; it must be {tuple(key.shape[:2])}")
        return range_of_mask(mask, key_of(self.group) if self.is_divided else "", self.attention.layout)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
