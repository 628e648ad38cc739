"""Checks of what the ranks of a group of processes pass to modules: their own rows, or the whole sequence."""

import time
import warnings

import torch
import torch.distributed as dist
from common import check, close, raises, shard, whole

PRESETS = (
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionV3",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2",
    "RingAttentionCorrect",
)
PATTERN = {"segment_lengths": [8, 0], "dilation_rates": [1, 2], "combine": "mix"}


def alone(tensors, dout, **options):
    import ringattn

    given = [x.clone().requires_grad_() for x in tensors]
    out, lse = ringattn.attention(*given, is_causal=True, return_lse=True, dilate_queries=False, **options)
    out.backward(dout)
    return out.detach(), lse.detach(), [x.grad for x in given]


@check
def presets_called_with_whole_tensors_on_every_rank_give_what_one_rank_gives():
    import ringattn

    q, k, v, dout = whole(seq_k=21)
    for options in ({}, PATTERN):
        out, lse, gradients = alone((q, k, v), dout, **options)
        for name in PRESETS:
            for layout in ("contiguous", "zigzag", "striped"):
                module = getattr(ringattn, name)(**options, layout=layout)
                assert module.ring_size == dist.get_world_size() and module.inputs == "full"
                given = [x.clone().requires_grad_() for x in (q, k, v)]
                found, found_lse = module(*given, is_causal=True, return_lse=True)
                close(found, out)
                close(found_lse, lse)
                found.backward(dout)
                for x, gradient in zip(given, gradients):
                    close(x.grad, gradient)
                if name != "RingAttentionCorrect":
                    assert ringattn.stats()["bytes_sent"] > 0


@check
def presets_take_shards_where_they_are_told_so():
    import ringattn

    q, k, v, _ = whole(seq_k=21)
    ranks = dist.get_world_size()
    out = ringattn.attention(q, k, v, is_causal=True)
    for name in PRESETS[:3]:
        module = getattr(ringattn, name)(ring_size=ranks, inputs="shard")
        close(module(*(shard(x, "contiguous") for x in (q, k, v)), is_causal=True), shard(out, "contiguous"))
    module = ringattn.RingDilatedAttentionV2(ring_size=ranks, inputs="shard")
    close(module(q, shard(k, "contiguous"), shard(v, "contiguous"), is_causal=True), out)
    raises(ValueError, "torch.distributed has", ringattn.RingDilatedAttention, ring_size=ranks + 1)


@check
def ring_attention_correct_counts_parts_and_never_talks():
    import ringattn

    q, k, v, _ = whole(seq_k=21)
    if dist.get_rank() == 0:  # alone: the others do not even call
        out = ringattn.attention(q, k, v, is_causal=True)
        for ring_size in (1, 3, 7):
            close(ringattn.RingAttentionCorrect(ring_size=ring_size)(q, k, v, is_causal=True), out)
            close(ringattn.RingAttentionCorrect()(q, k, v, ring_size, True), out)
    raises(ValueError, "never talks", ringattn.RingAttentionCorrect, group=dist.group.WORLD)


@check
def a_preset_made_before_torch_distributed_starts_runs_on_it_later():
    import ringattn

    started, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        module = ringattn.RingDilatedAttentionV3()
        assert module.ring_size == 1
    finally:
        dist.is_initialized = started
    assert module.ring_size == dist.get_world_size()


@check
def data_parallel_batches_under_full_are_refused_and_ring_size_1_takes_them():
    import ringattn

    q, k, v, dout = whole(seq_k=21)
    mine = v + dist.get_rank()
    for name in PRESETS[:4]:
        text = raises(ValueError, "value of rank 1 differs from that of rank 0", getattr(ringattn, name)(), q, k, mine)
        assert "ring_size=1" in text and "inputs" in text
        close(getattr(ringattn, name)(ring_size=1)(q, k, mine), ringattn.attention(q, k, mine))
    raises(ValueError, "query of rank 1", ringattn.RingDilatedAttentionV3(), q[:, : 20 + (dist.get_rank() == 0)], k, v)


@check
def unequal_gradients_under_full_are_refused():
    import ringattn

    q, k, v, dout = whole(seq_k=21)
    for name in PRESETS[:4]:
        out = getattr(ringattn, name)()(q.requires_grad_(), k, v)
        text = raises(ValueError, "dout of rank 1 differs", out.backward, dout + dist.get_rank())
        assert "ring_size=1" in text and "inputs" in text


@check
def the_same_rows_on_every_rank_under_shard_are_a_warning_and_others_are_not():
    import ringattn

    group = dist.group.WORLD
    q, k, v, _ = whole(seq_k=21)
    for tensors, expected in (
        ((q, k, v), 1),
        ((q, k, v + dist.get_rank()), 0),
        ((torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v)), 0),
    ):
        module = ringattn.RingDilatedAttention(group=group)
        for seen in (expected, 0):  # on the first call alone
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                module(*tensors)
            assert len([w for w in caught if "inputs='full'" in str(w.message)]) == seen
            assert all(w.filename == __file__ for w in caught)
    module = ringattn.RingDilatedAttentionV2(inputs="shard")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(q, shard(k, "contiguous"), shard(v, "contiguous"))  # replicated queries are alike by design


class Model(torch.nn.Module):
    def __init__(self, **options):
        import ringattn

        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(24, 24, dtype=torch.float64)
        self.attention = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64, **options)

    def forward(self, x):
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 18:] = True
        return self.attention(self.first(x), is_causal=True, key_padding_mask=mask)[0]


@check
def gradients_of_a_model_around_full_inputs_are_whole_and_stay_so():
    import ringattn
    from torch.nn.parallel import DistributedDataParallel

    group = dist.group.WORLD
    x = torch.randn(2, 22, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    single = Model()
    single(x).square().mean().backward()
    for wrap, hook in ((lambda model: model, False), (lambda model: model, True), (DistributedDataParallel, False)):
        model = Model(group=group, inputs="full", layout="zigzag", sync_gradients=hook)
        wrapped = wrap(model)
        wrapped(x).square().mean().backward()
        ringattn.sync_gradients(wrapped, group)
        for name, p in single.named_parameters():
            close(model.get_parameter(name).grad, p.grad, 1e-11)
    report = ringattn.check(model, x)
    assert report, str(report)
    mixed = torch.nn.ModuleList([ringattn.RingDilatedAttention(), ringattn.RingDilatedAttentionV3()])
    raises(ValueError, "some attention modules of this model have inputs", ringattn.sync_gradients, mixed, group)


@check
def a_call_that_keeps_nothing_may_come_late_on_one_rank():
    """Each makes communicators anew: the last words of the old one come when the other rank has the new one already."""
    import ringattn
    from ringattn.dist import resolve

    group, rank = resolve(dist.group.WORLD), dist.get_rank()
    options = {"group": dist.group.WORLD, "timeout": 1.0}
    x = torch.randn(1, 10, 2, 8, generator=torch.Generator().manual_seed(rank))
    kept, fresh = (ringattn.RingDilatedAttention(enable_memory_pool=keep, **options) for keep in (True, False))
    expected, renew = kept(x, x, x), group.renew
    for late in (0, 1):
        group.renew = lambda: (time.sleep(1.5 * (rank == late)), renew())
        assert torch.equal(fresh(x, x, x), expected)
        del group.renew
        time.sleep(1.5 * (rank == late))
        assert torch.equal(kept(x, x, x), expected)
    mixed = ringattn.RingDilatedAttention(enable_memory_pool=rank == 1, **options)
    raises(ValueError, "rank 1 keeps buffers and plans for its next call and rank 0 does not", mixed, x, x, x)
    assert torch.equal(kept(x, x, x), expected)


@check
def full_inputs_work_inside_a_compiled_function():
    if dist.get_world_size() > 2:
        return  # the compiler takes seconds of each rank
    import ringattn

    q, k, v, _ = whole(seq_k=21)
    module = ringattn.RingDilatedAttentionV3()
    compiled = torch.compile(lambda q, k, v: 2 * module(q + 0, k, v, is_causal=True), backend="aot_eager")
    close(compiled(q, k, v), 2 * ringattn.attention(q, k, v, is_causal=True))
