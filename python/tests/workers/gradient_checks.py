"""Gradients of a whole small language model on a ring, plain and wrapped, against one process: every parameter of it."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import check, close, rows
from torch import nn

VOCABULARY, DIM, TOKENS, BATCH, IGNORED = 23, 12, 27, 2, -100


class Block(nn.Module):
    def __init__(self, group, layout):
        import ringattn

        super().__init__()
        self.attention = ringattn.RingMultiheadDilatedAttention(
            DIM, 3, dtype=torch.float64, segment_lengths=[8, 0], dilation_rates=[1, 2], combine="mix", dilate_queries=False,
            group=group, layout=layout,
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(DIM, dtype=torch.float64) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 2 * DIM, dtype=torch.float64), nn.GELU(), nn.Linear(2 * DIM, DIM, dtype=torch.float64)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x), is_causal=True)[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Embeddings of tokens and positions, two blocks, a head, and a weight that nobody uses."""

    def __init__(self, group=None, layout="contiguous"):
        super().__init__()
        torch.manual_seed(11)
        self.tokens = nn.Embedding(VOCABULARY, DIM, dtype=torch.float64)
        self.positions = nn.Embedding(TOKENS, DIM, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(group, layout) for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number):
    """Tokens, labels (some are ignored, all of them in the first rows) and positions of a micro-batch."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels[0, : 5 + number] = IGNORED
    return tokens, labels, torch.arange(TOKENS).expand(BATCH, TOKENS)


def loss(model, number, micro_batches, mine=None, entries=slice(None)):
    """The sum over this rank's rows, divided by the number of labels that all ranks have in the step."""
    tokens, labels, positions = (x[entries] for x in batch(number))
    counted = sum(int((batch(other)[1][entries] != IGNORED).sum()) for other in range(micro_batches))
    if mine is not None:
        tokens, labels, positions = (x[:, mine] for x in (tokens, labels, positions))
    scores = model(tokens, positions)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / counted


def expected(micro_batches=1, entries=(slice(None),)):
    """The gradients of one process; with several entries the mean over these, as data parallelism gives it."""
    model = Model()
    for part in entries:
        for number in range(micro_batches):
            (loss(model, number, micro_batches, entries=part) / len(entries)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found, wanted):
    assert set(wanted) <= set(found), sorted(set(wanted) - set(found))
    for name, gradient in wanted.items():
        close(found[name], gradient, 1e-11)


def plain_gradients(model):
    return {name.replace("module.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(model, group, layout="contiguous", micro_batches=1, quiet=lambda model: nullcontext(), entries=slice(None)):
    """One step up to sync_gradients."""
    import ringattn

    mine = rows(layout, TOKENS, dist.get_rank(group), dist.get_world_size(group))
    for number in range(micro_batches):
        with quiet(model) if number + 1 < micro_batches else nullcontext():
            loss(model, number, micro_batches, mine, entries).backward()
    ringattn.sync_gradients(model, group)


def ddp(model, **options):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, find_unused_parameters=True, **options)


def no_sync(model):
    return model.no_sync()


@check
def a_plain_model_has_the_gradients_of_one_process():
    for layout in ("contiguous", "zigzag"):
        for micro_batches in (1, 3):
            model = Model(dist.group.WORLD, layout)
            train(model, dist.group.WORLD, layout, micro_batches)
            same(plain_gradients(model), expected(micro_batches))


@check
def a_ddp_model_has_the_gradients_of_one_process():
    for micro_batches, quiet in ((1, no_sync), (2, no_sync), (2, lambda model: nullcontext())):
        model = ddp(Model(dist.group.WORLD))
        train(model, dist.group.WORLD, "contiguous", micro_batches, quiet)
        same(plain_gradients(model), expected(micro_batches))


def fsdp1(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options)


def fsdp1_gradients(model, change):
    """What change() (a step of SGD with rate 1) takes from the full parameters, which is the gradient."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def full():
        with FullyShardedDataParallel.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}

    before = full()
    change()
    return {name: before[name] - p for name, p in full().items()}


@check
def an_fsdp1_model_has_the_gradients_of_one_process():
    from torch.distributed.fsdp import ShardingStrategy

    for micro_batches, options in (
        (1, {"use_orig_params": True}),
        (2, {"use_orig_params": False}),
        (1, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD}),
    ):
        model = fsdp1(Model(dist.group.WORLD), **options)
        train(model, dist.group.WORLD, "contiguous", micro_batches, no_sync)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        same(fsdp1_gradients(model, optimizer.step), expected(micro_batches))


def fsdp2(model, mesh=None):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cpu_mesh(*shape, names=("shard",)):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp2_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


class Unsynchronised:
    """What no_sync is to FSDP2."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.model.set_requires_gradient_sync(False)

    def __exit__(self, *_):
        self.model.set_requires_gradient_sync(True)


@check
def an_fsdp2_model_has_the_gradients_of_one_process():
    ranks = dist.get_world_size()
    for micro_batches, factor in ((1, None), (2, None), (1, 1.0)):
        model = fsdp2(Model(dist.group.WORLD), cpu_mesh(ranks))
        if factor is not None:
            for part in model.modules():
                if hasattr(part, "set_gradient_divide_factor"):
                    part.set_gradient_divide_factor(factor)
        train(model, dist.group.WORLD, "contiguous", micro_batches, Unsynchronised)
        same(fsdp2_gradients(model), expected(micro_batches))


@check
def data_parallelism_over_rings_gives_the_mean_of_the_rings():
    """Two rings of two: each ring has a batch entry, each rank of it half of the rows."""
    if dist.get_world_size() != 4:
        return
    rings = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    ring, column, mine = rings[rank // 2], columns[rank % 2], slice(rank // 2, rank // 2 + 1)
    wanted = expected(entries=(slice(0, 1), slice(1, 2)))
    for group in (None, column):
        model = ddp(Model(ring), process_group=group)
        train(model, ring, entries=mine)
        same(plain_gradients(model), wanted)
        model = fsdp1(Model(ring), process_group=group, use_orig_params=True)
        train(model, ring, entries=mine)
        same(fsdp1_gradients(model, torch.optim.SGD(model.parameters(), lr=1.0).step), wanted)
    for mesh in (cpu_mesh(4), cpu_mesh(2, 2, names=("rings", "ring")), cpu_mesh(2, 2, names=("rings", "ring"))["rings"]):
        model = fsdp2(Model(ring), mesh)
        train(model, ring, entries=mine)
        same(fsdp2_gradients(model), wanted)


def refused(error, words, function):
    try:
        function()
    except error as raised:
        assert all(word in str(raised) for word in words), repr(raised)
    else:
        raise AssertionError(f"nothing was said of {words}")


@check
def a_second_call_before_gradients_are_cleared_raises():
    import ringattn

    group = dist.group.WORLD
    mine = rows("contiguous", TOKENS, dist.get_rank(), dist.get_world_size())
    wraps = {
        "plain": lambda model: model,
        "ddp": ddp,
        "ddp with views": lambda model: ddp(model, gradient_as_bucket_view=True),
        "fsdp1": lambda model: fsdp1(model, use_orig_params=True),
        "fsdp1 flat": lambda model: fsdp1(model, use_orig_params=False),
        "fsdp2": lambda model: fsdp2(model, cpu_mesh(dist.get_world_size())),
    }
    for name, wrap in wraps.items():
        model = wrap(Model(group))

        def again():
            loss(model, 0, 1, mine).backward()
            ringattn.sync_gradients(model, group)

        try:
            again()
            refused(RuntimeError, ["once a step", "zero_grad"], lambda: ringattn.sync_gradients(model, group))
            refused(RuntimeError, ["once a step", "zero_grad"], again)  # after another micro-batch
            model.zero_grad()
            again()
            if "fsdp" not in name:
                model.zero_grad(set_to_none=False)
                again()
                same(plain_gradients(model), expected())
        except BaseException as error:
            raise AssertionError(f"{name}: {error!r}") from error


@check
def ranks_that_hold_other_parameters_are_told_which_before_anything_is_added():
    import ringattn

    group, rank = dist.group.WORLD, dist.get_rank()
    others = {
        "other shape, as many elements": ([6, 2] if rank == 1 else [4, 3], 2, ["parameter 1", "[4, 3]", "[6, 2]", "rank 1"]),
        "one more parameter": ([4, 3], 3 if rank == 1 else 2, ["parameter 2", "missing (2 in all)", "rank 1"]),
    }
    for name, (shape, count, words) in others.items():
        parameters = [nn.Parameter(torch.ones(3))] + [nn.Parameter(torch.ones(shape)) for _ in range(count - 1)]
        for p in parameters:
            p.grad = torch.full_like(p, float(rank))
        refused(ValueError, words, lambda: ringattn.sync_gradients(parameters, group))
        assert all(bool((p.grad == rank).all()) for p in parameters), name
    ringattn.sync_gradients([nn.Parameter(torch.ones(2))], group)  # the group is not broken


@check
def a_weight_that_is_listed_twice_is_added_once():
    import ringattn
    from ringattn import gradients

    shared, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    for p in (shared, other):
        p.grad = torch.ones_like(p)
    bucket, gradients._BUCKET = gradients._BUCKET, 16  # large weights are added one by one
    try:
        ringattn.sync_gradients([shared, other, shared], dist.group.WORLD)
    finally:
        gradients._BUCKET = bucket
    assert bool((shared.grad == dist.get_world_size()).all()) and bool((other.grad == dist.get_world_size()).all())


@check
def gradients_that_something_has_averaged_unseen_are_refused():
    import ringattn

    model = ddp(Model(dist.group.WORLD))
    mine = rows("contiguous", TOKENS, dist.get_rank(), dist.get_world_size())
    loss(model, 0, 1, mine).backward()
    refused(ValueError, ["the same on every rank", ".module"], lambda: ringattn.sync_gradients(model.module, dist.group.WORLD))


@check
def weights_that_are_whole_already_are_left_alone():
    import ringattn

    group = dist.group.WORLD
    for wrap in (lambda model: model, ddp, lambda model: fsdp1(model, use_orig_params=True)):  # FSDP drops the hooks
        model = Model(group)
        for block in model.blocks:
            ringattn.gradients.sync_on_backward(block.attention)
        model = wrap(model)
        train(model, group)
        if hasattr(model, "sharding_strategy"):
            same(fsdp1_gradients(model, torch.optim.SGD(model.parameters(), lr=1.0).step), expected())
        else:
            same(plain_gradients(model), expected())


@check
def gradients_of_whole_inputs_are_left_alone():
    import ringattn

    model = Model(dist.group.WORLD)
    for block in model.blocks:
        block.attention.attention.inputs = "full"
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ringattn.sync_gradients(model, dist.group.WORLD)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    model.blocks[0].attention.attention.inputs = "shard"
    refused(ValueError, ["inputs"], lambda: ringattn.sync_gradients(model, dist.group.WORLD))


@check
def averages_over_a_part_of_the_ring_are_refused():
    if dist.get_world_size() != 4:
        return
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = ddp(Model(dist.group.WORLD), process_group=halves[dist.get_rank() // 2])
    refused(ValueError, ["whole rings"], lambda: train(model, dist.group.WORLD))
