"""Checks of attention, modules and helpers on a group of processes. Those of the files beside this one run with them, in one
start of torchrun."""

import itertools

import cache_checks  # noqa: F401
import gradient_checks  # noqa: F401
import group_checks  # noqa: F401
import module_checks  # noqa: F401
import sharding_checks  # noqa: F401
import torch
import torch.distributed as dist
from common import check, close, compare, main, raises, rows, shard, whole

MIX = {"segment_lengths": [8, 16, 0], "dilation_rates": [1, 2, 3], "combine": "mix"}


@check
def outputs_and_gradients_of_dense_causal_attention_equal_those_of_one_rank():
    for layout in ("contiguous", "zigzag", "striped"):
        compare(layout=layout, is_causal=True)


@check
def outputs_and_gradients_of_dilated_attention_equal_those_of_one_rank():
    for layout in ("contiguous", "zigzag", "striped"):
        compare(layout=layout, **MIX, is_causal=True)
        compare(layout=layout, segment_lengths=[5, 0], dilation_rates=[1, 2], offset="residue", window=(9, 3))


@check
def every_schedule_equals_one_rank():
    for schedule in ("ring", "gather"):
        compare(schedule=schedule, is_causal=True)


@check
def replicated_queries_equal_one_rank():
    for schedule in ("ring", "merge"):
        compare(placement="replicated", schedule=schedule, is_causal=True)


@check
def key_ranges_are_global_positions():
    compare(key_range=[[3, 17], [0, 9]], is_causal=True)


@check
def dropout_with_a_seed_equals_one_rank():
    compare(dropout_p=0.3, seed=17, is_causal=True)


@check
def dropout_without_a_seed_takes_rank_zeros():
    import ringattn

    torch.manual_seed(dist.get_rank())
    q, k, v, _ = whole(seq_k=21)
    out = ringattn.attention(*(shard(x, "contiguous") for x in (q, k, v)), dropout_p=0.5, group=dist.group.WORLD)
    torch.manual_seed(0)
    alone = ringattn.attention(q, k, v, dropout_p=0.5)
    close(out, shard(alone, "contiguous"))


@check
def long_messages_arrive_whole():
    """Buckets far beyond what a frame carries inline."""
    import ringattn

    q, k, v, _ = whole(batch=1, seq_q=1024, seq_k=1024, heads=4, kv_heads=4, dim=64, dtype=torch.float32)
    out = ringattn.attention(*(shard(x, "contiguous") for x in (q, k, v)), group=dist.group.WORLD, schedule="ring", bucket=300)
    assert ringattn.stats()["bytes_sent"] > 100_000
    close(out, shard(ringattn.attention(q, k, v), "contiguous"), 2e-6)


@check
def numpy_arrays_travel_too():
    import numpy as np
    import ringattn

    q, k, v, _ = (x.numpy() for x in whole())
    part = [x[:, rows("zigzag", x.shape[1], dist.get_rank(), dist.get_world_size())] for x in (q, k, v)]
    out = ringattn.attention(*part, is_causal=True, layout="zigzag", group=dist.group.WORLD)
    alone = ringattn.attention(q, k, v, is_causal=True)
    mine = alone[:, rows("zigzag", q.shape[1], dist.get_rank(), dist.get_world_size())]
    assert type(out) is np.ndarray and np.abs(out - mine).max() < 1e-12


@check
def ranks_without_rows_take_part():
    import ringattn

    q, k, v, _ = whole(seq_q=1, seq_k=1)
    out = ringattn.attention(*(shard(x, "contiguous") for x in (q, k, v)), group=dist.group.WORLD)
    close(out, shard(ringattn.attention(q, k, v), "contiguous"))


@check
def a_subgroup_is_a_ring_of_its_own():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    compare(group=groups[dist.get_rank()])
    if dist.get_world_size() == 4:
        pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        compare(group=pairs[dist.get_rank() % 2], layout="zigzag", is_causal=True)


@check
def a_group_that_knows_no_memory_of_the_host_serves_host_tensors_too():
    """As nccl's groups are: the ring and the sums of gradients go over gloo."""
    import ringattn

    group = dist.new_group(backend="cuda:gloo")
    compare(group=group, is_causal=True)
    ring = build(group=group)
    x, weight = (shard(y, "contiguous") for y in data())
    loss(ring, x, weight).backward()
    ringattn.sync_gradients(ring, group)
    equal_gradients(weight_gradients(ring))


@check
def a_compiled_ring_equals_one_rank():
    if dist.get_world_size() > 2:
        return  # the compiler takes seconds of each rank; what it makes does not depend on their number
    import ringattn

    compiled = torch.compile(
        lambda q, k, v, **options: ringattn.attention(q, k, v, **options), backend="aot_eager", fullgraph=True
    )
    compare(function=compiled, is_causal=True, layout="zigzag")


@check
def checkpointing_on_a_ring_equals_one_rank():
    import ringattn
    from torch.utils.checkpoint import checkpoint

    compare(
        function=lambda q, k, v, **options: checkpoint(
            lambda *x: ringattn.attention(*x, **options), q, k, v, use_reentrant=False
        ),
        is_causal=True,
    )


@check
def ranks_that_disagree_are_told_in_what():
    import ringattn

    q, k, v, _ = whole()
    group = dist.new_group(list(range(dist.get_world_size())))  # its ring breaks
    try:
        ringattn.attention(*(shard(x, "contiguous") for x in (q, k, v)), is_causal=dist.get_rank() == 0, group=group)
    except RuntimeError as error:
        assert "disagree" in str(error) and "rank 0" in str(error) and error.status == "RA_DISAGREE", repr(error)
    else:
        raise AssertionError("no rank noticed")


@check
def a_rank_that_refuses_its_arguments_tells_the_others():
    import ringattn

    q, k, v, _ = whole()
    part = [shard(x, "contiguous") for x in (q, k, v)]
    if dist.get_rank() == 1:
        part[1] = part[1].float()
    try:
        ringattn.attention(*part, group=dist.group.WORLD)
    except ValueError as error:
        assert dist.get_rank() == 1 and "dtypes" in str(error)
    except RuntimeError as error:
        assert dist.get_rank() != 1 and "rank 1" in str(error) and "dtypes" in str(error), repr(error)
    else:
        raise AssertionError("no rank noticed")
    compare(is_causal=True)  # the group is not broken


@check
def shards_of_wrong_lengths_are_named_on_every_rank():
    import ringattn

    q, k, v, _ = whole(seq_q=20, seq_k=20)
    extra = 1 if dist.get_rank() == dist.get_world_size() - 1 else 0
    part = [torch.cat([shard(x, "contiguous"), x[:, : 2 * extra]], 1) for x in (q, k, v)]
    try:
        ringattn.attention(*part, group=dist.group.WORLD)
    except ValueError as error:
        assert "rows; with layout contiguous" in str(error), repr(error)
    else:
        raise AssertionError("no rank noticed")
    compare(is_causal=True)


def build(**options):
    import ringattn

    torch.manual_seed(3)
    return ringattn.RingMultiheadDilatedAttention(
        24,
        3,
        dtype=torch.float64,
        segment_lengths=[8, 0],
        dilation_rates=[1, 2],
        combine="mix",
        dilate_queries=False,
        **options,
    )


def weight_gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def loss(module, x, weight, **options):
    return (module(x, x, x, is_causal=True, **options)[0] * weight).sum()


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 22, 24, generator=generator, dtype=torch.float64), torch.randn(
        2, 22, 24, generator=generator, dtype=torch.float64
    )


def expected_gradients():
    alone = build()
    loss(alone, *data()).backward()
    return weight_gradients(alone)


def equal_gradients(found):
    for name, gradient in expected_gradients().items():
        close(found[name], gradient, 1e-11)


@check
def synchronised_weight_gradients_equal_those_of_one_rank():
    import ringattn

    for layout in ("contiguous", "zigzag"):
        ring = build(group=dist.group.WORLD, layout=layout)
        x, weight = (shard(y, layout) for y in data())
        loss(ring, x, weight).backward()
        ringattn.sync_gradients(ring, dist.group.WORLD)
        equal_gradients(weight_gradients(ring))


@check
def a_module_is_printed_by_one_rank_alone_and_copied_with_its_group():
    import copy

    group = dist.new_group(list(range(dist.get_world_size())))  # no call has met on it yet
    ring = build(group=group)
    if dist.get_rank() == 0:
        assert f"ring_size={dist.get_world_size()}" in repr(ring)
    other = copy.deepcopy(ring)
    assert other.group is group and other.in_proj_weight is not ring.in_proj_weight
    x = shard(data()[0], "contiguous")
    close(other(x, is_causal=True)[0], ring(x, is_causal=True)[0])


@check
def a_module_on_a_group_is_not_pickled_with_it():
    import copy
    import pickle

    import ringattn

    for module in (build(group=dist.group.WORLD), ringattn.RingDilatedAttention(group=dist.group.WORLD)):
        match = "a RingDilatedAttention on a ProcessGroup cannot be pickled: save its state_dict(), or set its group to None"
        raises(TypeError, match, pickle.dumps, torch.nn.Sequential(module))
        assert copy.copy(module).group is dist.group.WORLD
        module.group = None
        assert pickle.loads(pickle.dumps(module)).group is None


@check
def arrays_in_place_of_tensors_are_refused_and_the_others_told():
    import ringattn

    mine, x = dist.get_rank() == 1, torch.randn(1, 4, 2, 8)
    modules = [ringattn.RingDilatedAttention(group=dist.group.WORLD), ringattn.RingDilatedAttentionHybrid()]
    modules.append(ringattn.RingDilatedAttention(group=dist.group.WORLD, dtype=torch.float64))
    for module in modules:
        raises(ValueError if mine else RuntimeError, "they must all be torch tensors", module, x.numpy() if mine else x, x, x)


@check
def messages_are_on_the_cpu_whatever_the_default_device():
    import ringattn

    ring, group = build(group=dist.group.WORLD), dist.group.WORLD
    x = shard(data()[0], "contiguous")
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    expected = ring(x, key_padding_mask=padding)[0]
    with torch.device("meta"):  # as torch.set_default_device; a tensor that is made here has no values
        fresh = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
        found = ring(x, key_padding_mask=padding)[0]
        rows = x.detach()[:, :, None]
        close(ringattn.attention(rows, rows, rows, group=fresh), ringattn.attention(rows, rows, rows, group=group))
    close(found, expected)


@check
def an_argument_that_one_rank_alone_gives_is_told_to_the_others():
    import ringattn

    group, x, multihead = dist.group.WORLD, torch.randn(1, 4, 2, 8), build(group=dist.group.WORLD)
    rows = shard(data()[0], "contiguous")
    causal = torch.ones(rows.size(1), rows.size(1), dtype=torch.bool).triu(1)
    longer = torch.zeros(rows.size(0), rows.size(1) + 1, dtype=torch.bool)
    cases = [
        (ringattn.attention, (x, x, x), {"group": group}, {"attn_mask": x}),
        (ringattn.attention, (x, x, x), {"group": group}, {"no_such_argument": 1}),
        (ringattn.sdpa, (x, x, x), {"group": group}, {"attn_mask": x}),
        (ringattn.flash_attn_func, (x, x, x), {"group": group}, {"softcap": 2.0}),
        (ringattn.RingDilatedAttention(group=group), (x, x, x), {}, {"need_weights": True}),
        (multihead, (rows,), {}, {"need_weights": True}),
        (multihead, (rows,), {}, {"attn_mask": causal}),
        (multihead, (rows,), {}, {"key_padding_mask": longer}),
    ]
    mine = dist.get_rank() == 1
    kind = (TypeError, ValueError) if mine else ringattn.RingattnError
    for function, tensors, settings, wrong in cases:
        raises(kind, next(iter(wrong)), function, *tensors, **settings, **(wrong if mine else {}))
    keys = x[:, :1] if mine else x  # heads come second here
    raises(kind, "enable_gqa", ringattn.sdpa, x, keys, keys, group=group)
    compare(is_causal=True)  # the group is not broken


@check
def what_an_operator_refuses_on_one_rank_is_told_to_the_others():
    import ringattn
    from ringattn._hf_mask import write_op
    from ringattn._hf_op import masked_forward
    from ringattn.torch import forward_op

    group, mine, x = dist.group.WORLD, dist.get_rank() == 1, torch.randn(2, 4, 2, 8)
    key = ringattn.dist.key_of(group)
    settings = ringattn._config.Settings(dropout_p=0.5)
    mask, places = (
        write_op(None, None, None, None, (2, 4, 0, 4, 0, -1, 0), key, "contiguous"),
        ringattn.positions(4 * dist.get_world_size(), group)[None],
    )
    lazy = torch._neg_view(x)  # no plain tensor: an operator takes it
    halves = torch.tensor([[0, 0.5], [0, 4]])
    cases = [
        ("key_range is", lambda wrong: forward_op(x, x, x, None, halves if wrong else None, *settings, key)),
        ("seed is", lambda wrong: forward_op(x, x, x, halves if wrong else None, None, *settings, key)),
        ("bucket is", lambda wrong: forward_op(x, x, x, None, None, *settings._replace(bucket=-1 * wrong), key)),
        ("seed is", lambda wrong: masked_forward(x, x, x, mask, places, halves if wrong else None, *settings, key)),
        (
            "not consecutive",
            lambda wrong: write_op(None, halves, halves + wrong, None, (2, 4, 0, 4, 0, -1, 0), key, "contiguous"),
        ),
        ("combine is", lambda wrong: ringattn.attention(lazy, x, x, group=group, combine="all" if wrong else "mix")),
        ("key_range is", lambda wrong: ringattn.attention(lazy, x, x, group=group, key_range=0.5 if wrong else None)),
    ]
    for match, call in cases:
        raises(ValueError if mine else RuntimeError, match, call, mine)
    compare(is_causal=True)  # the group is not broken


@check
def a_sparse_gradient_is_refused_by_name():
    import ringattn

    model = torch.nn.Sequential(torch.nn.Embedding(5, 24, sparse=True, dtype=torch.float64), build(group=dist.group.WORLD))
    model(torch.arange(4)[None])[0].sum().backward()
    raises(ValueError, "gradient of 0.weight is sparse", ringattn.sync_gradients, model, dist.group.WORLD)


@check
def a_hook_on_construction_synchronises_by_itself():
    ring = build(group=dist.group.WORLD, sync_gradients=True)
    x, weight = (shard(y, "contiguous") for y in data())
    loss(ring, x, weight).backward()
    equal_gradients(weight_gradients(ring))


@check
def a_module_that_synchronises_by_itself_still_does_when_its_weights_are_others():
    import copy

    def assigned(ring):
        ring.load_state_dict({name: w.clone() for name, w in ring.state_dict().items()}, assign=True)
        return ring

    def emptied(ring):
        weights = {name: w.clone() for name, w in ring.state_dict().items()}
        ring.to("meta").to_empty(device="cpu").load_state_dict(weights)
        return ring

    def copied_while_frozen(ring):
        return copy.deepcopy(ring.requires_grad_(False)).requires_grad_()

    for change in (copy.deepcopy, assigned, emptied, copied_while_frozen):
        ring = change(build(group=dist.group.WORLD, sync_gradients=True))
        x, weight = (shard(y, "contiguous") for y in data())
        loss(ring, x, weight).backward()
        equal_gradients(weight_gradients(ring))
    ring = build(sync_gradients=True)
    ring.group = dist.group.WORLD
    loss(ring, *(shard(y, "contiguous") for y in data())).backward()
    equal_gradients(weight_gradients(ring))


@check
def a_module_that_synchronises_by_itself_is_compared_with_one_rank():
    import ringattn

    report = ringattn.check(build(group=dist.group.WORLD, sync_gradients=True), data()[0].detach(), is_causal=True)
    assert report.ok, str(report)


@check
def a_model_can_be_saved_after_its_gradients_were_synchronised():
    import io

    import ringattn

    ring = build(group=dist.group.WORLD)
    loss(ring, *(shard(y, "contiguous") for y in data())).backward()
    ringattn.sync_gradients(ring, dist.group.WORLD)
    ring.group, file = None, io.BytesIO()
    torch.save(ring, file)
    file.seek(0)
    same = torch.load(file, weights_only=False)
    assert torch.equal(same.in_proj_weight, ring.in_proj_weight)


@check
def under_ddp_gradients_equal_those_of_one_rank_by_hook_and_by_call():
    import ringattn
    from torch.nn.parallel import DistributedDataParallel

    for hook in (True, False):
        ring = build(group=dist.group.WORLD, sync_gradients=hook)
        ddp = DistributedDataParallel(ring)
        x, weight = (shard(y, "contiguous") for y in data())
        loss(ddp, x, weight).backward()
        if not hook:
            ringattn.sync_gradients(ddp, dist.group.WORLD)
        equal_gradients(weight_gradients(ring))


@check
def ddp_across_rings_averages_the_sums_of_each():
    """Two rings of two: the batch is divided over the rings, the sequence inside each."""
    if dist.get_world_size() != 4:
        return
    import ringattn
    from torch.nn.parallel import DistributedDataParallel

    rings = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ring, column = rings[dist.get_rank() // 2], columns[dist.get_rank() % 2]
    x, weight = data()
    entry = dist.get_rank() // 2
    part = [shard(y[entry : entry + 1], "contiguous", dist.get_rank(ring), 2) for y in (x, weight)]
    for group in (None, column):  # DDP over all ranks, and over the ranks that hold the same rows
        module = build(group=ring)
        ddp = DistributedDataParallel(module, process_group=group)
        loss(ddp, *part).backward()
        ringattn.sync_gradients(ddp, ring)
        for name, gradient in expected_gradients().items():
            close(module.get_parameter(name).grad, gradient / 2, 1e-11)


@check
def padding_masks_of_shards_are_joined_to_a_global_range():
    ring = build(group=dist.group.WORLD)
    x, weight = data()
    mask = torch.zeros(2, 22, dtype=torch.bool)
    mask[0, 15:], mask[1, :4] = True, True
    out, _ = ring(*[shard(x, "contiguous")] * 3, key_padding_mask=shard(mask, "contiguous"), is_causal=True)
    alone, _ = build()(x, x, x, key_padding_mask=mask, is_causal=True)
    close(out, shard(alone, "contiguous"))


@check
def a_padding_mask_that_is_wrong_or_missing_on_one_rank_is_named_on_every_rank():
    ring, first = build(group=dist.group.WORLD), dist.get_rank() == 0
    x = shard(data()[0], "contiguous")
    padding = torch.zeros(x.shape[:2], dtype=x.dtype)
    for other in ("query, key, value", "attention"):  # the first call of a module compares its inputs
        match = f"rank 0 is at key_padding_mask and rank 1 at {other}"
        raises(RuntimeError, match, ring, x, key_padding_mask=padding if first else None)
        ring(x)
    wrong = padding + 0.5 if first else padding
    raises(ValueError if first else RuntimeError, "key_padding_mask adds numbers", ring, x, key_padding_mask=wrong)
    compare(is_causal=True)  # the group is not broken


@check
def the_check_function_finds_agreement_and_names_what_differs():
    import ringattn

    module = build(group=dist.group.WORLD, layout="zigzag")
    x, _ = data()
    report = ringattn.check(module, x, is_causal=True)
    assert report and report.ranks == dist.get_world_size() and not report.differs, str(report)
    assert {"output", "input 0 gradient", "in_proj_weight", "out_proj.bias"} <= {tensor.name for tensor in report.tensors}

    class Shifted(torch.nn.Module):  # leaks rows over the border of a shard
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x, **options):
            return self.inner(x.roll(1, 1), **options)

    report = ringattn.check(Shifted(), x, is_causal=True)
    assert not report and "output" in report.differs and "DIFFERS" in str(report)


@check
def helpers_pass_tensors_round_the_ring_and_gather_them():
    import ringattn

    rank, ranks = dist.get_rank(), dist.get_world_size()
    seen = [(info.ring_rank, int(x)) for info, (x,) in ringattn.all_ring_pass(torch.tensor([float(rank)]))]
    assert seen == [((rank - i) % ranks, (rank - i) % ranks) for i in range(ranks)]
    x = torch.full((2, 3), float(rank), requires_grad=True)
    came = ringattn.ring_pass(x)
    assert torch.equal(came, torch.full((2, 3), float((rank - 1) % ranks)))
    (came * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), float((rank + 1) % ranks + 1)))
    full = torch.arange(11.0).reshape(1, 11)
    mine = ringattn.split_by_rank(full).clone().requires_grad_()
    again = ringattn.gather_from_rank(mine)
    assert torch.equal(again, full)
    (again * full).sum().backward()
    assert torch.equal(mine.grad, ranks * ringattn.split_by_rank(full))
    buffer = torch.empty(2)
    ringattn.send_and_receive_(
        torch.full((2,), float(rank)), buffer, ringattn.circular_rank_right(), ringattn.circular_rank_left()
    )
    assert torch.equal(buffer, torch.full((2,), float((rank - 1) % ranks)))


@check
def ring_attention_from_the_helpers_equals_the_library_for_any_length():
    import ringattn

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Shards of equal length, of unequal ones, and one without rows; later ranks' keys are masked, or skipped.
    for n, skips in itertools.product((24, 23, ranks - 1), (False, True)):
        q, k, v, dout = (x.requires_grad_() for x in whole(seq_q=n, seq_k=n, heads=3))
        starts = [ringattn.positions(n, ranks, rank=other)[:1].tolist() for other in range(ranks)]
        local = [ringattn.split_by_rank(x).transpose(1, 2) for x in (q, k, v)]
        parts = ringattn.StableRingAccumulator(local[0].shape, dtype=torch.float64)
        for info, (kk, vv) in ringattn.all_ring_pass(local[1], local[2]):
            if skips and info.ring_rank > rank:
                continue
            begin_q, begin_k = (starts[i][0] if starts[i] else n for i in (rank, info.ring_rank))
            mask = ringattn.create_causal_mask(local[0].size(2), kk.size(2), q_start=begin_q, k_start=begin_k)
            parts.update(*ringattn.compute_attention_with_lse(local[0], kk, vv, mask=mask))
        out = parts.get_output().transpose(1, 2)
        (out * ringattn.split_by_rank(dout)).sum().backward()
        alone = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        expected = ringattn.attention(*alone, is_causal=True)
        expected.backward(dout)
        close(out, ringattn.split_by_rank(expected))
        for found, whole_gradient in zip((q, k, v), alone):
            close(ringattn.split_by_rank(found.grad), ringattn.split_by_rank(whole_gradient.grad))


@check
def gradients_of_tensors_that_go_round_come_home_from_whoever_used_them():
    import ringattn

    rank, ranks = dist.get_rank(), dist.get_world_size()
    use = torch.tensor([[1 + i * ranks + j if (i + 2 * j) % 3 else 0 for j in range(ranks)] for i in range(ranks)])
    use[range(ranks), [(i - 1) % ranks for i in range(ranks)]] = 1  # the left neighbour's are used by all
    x, constant = torch.ones(2, requires_grad=True), torch.full((1,), float(rank))
    y, loss = torch.ones(2, rank + 1, requires_grad=True), 0.0
    for info, (a, b, c) in ringattn.all_ring_pass(x, constant, y):
        assert b.item() == info.ring_rank and not b.requires_grad and c.shape == (2, info.ring_rank + 1)
        weight = int(use[rank, info.ring_rank])
        if weight:
            loss = loss + weight * a.sum() + (3 * weight * c.sum() if info.ring_rank % 2 else 0)
    for turn in (1, 2):  # twice over the same graph
        loss.backward(retain_graph=True)
        assert bool((x.grad == turn * use[:, rank].sum()).all()), (x.grad, use)
        if rank % 2:
            assert bool((y.grad == 3 * turn * use[:, rank].sum()).all())


if __name__ == "__main__":
    main()
