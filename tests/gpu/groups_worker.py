"""Checks of the Python package on a group of processes that share a GPU, or of stand-ins for one each. Started by torchrun:

    groups_worker.py RESULTS BACKEND"""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python/tests/workers")]
import nccl  # noqa: E402

if "nccl" in (sys.argv[2], os.environ.get("RINGATTN_LANE")):
    os.environ.update(nccl.apart(os.environ["RANK"]))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from common import check, close, main, raises, rows, shard, whole  # noqa: E402
from place import GPU, PLACE, on_the_cpu  # noqa: E402
from torch import nn  # noqa: E402

import ringattn  # noqa: E402

BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MIX = {"segment_lengths": [8, 16, 0], "dilation_rates": [1, 2, 3], "combine": "mix", "is_causal": True}
RESIDUE = {"segment_lengths": [32, 0], "dilation_rates": [1, 4], "offset": "residue"}


def compare(dtype=torch.float32, layout="contiguous", placement="sharded", seq_q=210, seq_k=230, **options):
    """Results and gradients of this rank's rows on the ring are those of one CPU in float64."""
    tensors = [x.to(dtype) for x in whole(2, seq_q, seq_k, 6, 3, 32)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, dout = (x.double() for x in tensors)
    alone = [x.requires_grad_() for x in (q, k, v)]
    with on_the_cpu():
        out, lse = ringattn.attention(*alone, return_lse=True, **{**options, "schedule": "auto"})
        finite = torch.isfinite(lse)
        wanted = torch.autograd.grad((out * dout).sum() + lse[finite].sum(), alone)
    part = list(range(seq_q)) if placement == "replicated" else rows(layout, seq_q, rank, ranks)
    q, k, v, dout = (x.to(PLACE) for x in tensors)
    mine = [q[:, part], shard(k, layout), shard(v, layout)]
    mine = [x.detach().clone().requires_grad_() for x in mine]
    found, found_lse = ringattn.attention(
        *mine, return_lse=True, group=dist.group.WORLD, layout=layout, query_placement=placement, **options
    )
    assert found.device == PLACE and found.dtype == dtype and found_lse.device == PLACE
    there = torch.isfinite(found_lse)
    gradients = torch.autograd.grad((found * dout[:, part]).sum() + found_lse[there].sum(), mine)
    bound = BOUND[dtype]
    close(found.cpu(), out[:, part], bound)
    assert torch.equal(there.cpu(), finite[:, :, part])
    close(found_lse[there].cpu(), lse[:, :, part][finite[:, :, part]], 1e-4)
    close(gradients[0].cpu(), wanted[0][:, part], bound)
    for index in (1, 2):
        close(gradients[index].cpu(), shard(wanted[index], layout), bound)


@check
def attention_in_every_layout_equals_one_process():
    for layout in ("contiguous", "zigzag", "striped"):
        compare(layout=layout, is_causal=True)
        compare(layout=layout, **MIX)
        compare(layout=layout, segment_lengths=[5, 0], dilation_rates=[1, 2], offset="residue", window=(9, 3))


@check
def attention_in_16_bits_equals_one_process():
    for dtype in (torch.bfloat16, torch.float16):
        compare(dtype, layout="zigzag", is_causal=True)
        compare(dtype, **MIX)


@check
def every_way_to_meet_equals_one_process():
    compare(schedule="gather", is_causal=True)
    compare(schedule="ring", bucket=16, is_causal=True)
    compare(placement="replicated", layout="zigzag", is_causal=True)
    compare(placement="replicated", schedule="merge", seq_q=1)
    compare(seq_q=3, seq_k=3, is_causal=True)  # some rank has no row
    compare(dropout_p=0.25, seed=7)


@check
def calls_that_keep_nothing_give_the_same():
    module = ringattn.RingDilatedAttention(enable_memory_pool=False, group=dist.group.WORLD)
    kept = ringattn.RingDilatedAttention(group=dist.group.WORLD)
    x = shard(whole(1, 60, 60, 4, 4, 16, torch.float32)[0], "contiguous").to(PLACE)
    for _ in range(3):
        assert torch.equal(module(x, x, x, is_causal=True), kept(x, x, x, is_causal=True))


@check
def modules_that_take_whole_tensors_equal_one_process():
    q, k, v, dout = (x.to(PLACE) for x in whole(1, 96, 96, 4, 4, 16, torch.float32))
    for name in ("Hybrid", "V2", "V2Collective"):
        kind, results = getattr(ringattn, "RingDilatedAttention" + name), []
        for size in (1, None):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = kind([16, 32], [1, 2], ring_size=size)(*leaves, is_causal=True)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        for found, expected in zip(results[1], results[0]):
            close(found, expected, 1e-5)


@check
def a_multihead_module_agrees_with_one_rank_weights_included():
    torch.manual_seed(0)
    module = ringattn.RingMultiheadDilatedAttention(32, 4, **RESIDUE, layout="zigzag", group=dist.group.WORLD, device=PLACE)
    sample = torch.randn(2, 101, 32, generator=torch.Generator().manual_seed(1)).to(PLACE)
    report = ringattn.check(module, sample, is_causal=True)
    assert report.ok and report.ranks == dist.get_world_size(), str(report)


@check
def shards_come_together_again_with_gradients():
    x = whole(2, 31, 31, 3, 3, 4, torch.bfloat16)[0].to(PLACE)
    for layout in ("contiguous", "zigzag", "striped"):
        leaf = x.clone().requires_grad_()
        back = ringattn.unshard(ringattn.shard(leaf, dist.group.WORLD, layout), dist.group.WORLD, layout)
        assert torch.equal(back, x) and back.device == PLACE
        (gradient,) = torch.autograd.grad(back, leaf, x)
        assert torch.equal(gradient, x)


@check
def a_cache_that_grows_equals_attention():
    q, k, v, _ = (x.to(PLACE) for x in whole(1, 20, 20, 4, 2, 16, torch.float32))
    cache = ringattn.KVCache(dist.group.WORLD)
    for row in range(20):
        cache.append(k[:, row : row + 1], v[:, row : row + 1])
        out = cache.attention(q[:, row : row + 1], is_causal=True)
    close(out, ringattn.attention(q, k, v, is_causal=True)[:, -1:], 1e-5)


@check
def a_wrong_call_raises_on_every_rank_and_the_next_one_works():
    q, k, v, _ = (x.to(PLACE) for x in whole(1, 40, 40, 4, 4, 16, torch.float32))
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = shard(q, "contiguous")
    raises(ValueError, "rows", ringattn.attention, mine[:, : mine.size(1) - 2 * (rank == 1)], mine, mine, group=group)
    kind, text = (ValueError, "shape") if rank == 0 else (ringattn.RingattnError, "rank 0 does not take part")
    raises(kind, text, ringattn.attention, mine[0] if rank == 0 else mine, mine, mine, group=group)
    close(ringattn.attention(mine, mine, mine, group=group), shard(ringattn.attention(q, q, q), "contiguous"), 1e-5)


# --------------------------------------------------------------------------------------------------------------------- training


class Block(nn.Module):
    def __init__(self, width, **options):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = ringattn.RingMultiheadDilatedAttention(width, 4, **RESIDUE, **options)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.before(x), is_causal=True)[0]
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Model(nn.Module):
    def __init__(self, tokens, width, rows, **options):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(2))
        self.head = nn.Linear(width, tokens)

    def forward(self, x, places):
        x = self.tokens(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(group, layout, steps=10):
    """The losses of a small model, on this process alone where group is None."""
    length, tokens = (2048, 64) if GPU else (120, 16)
    torch.manual_seed(0)
    model = Model(tokens, 64 if GPU else 32, length, group=group, layout=layout).to(PLACE)
    data = torch.randint(0, tokens, (2, length + 1), generator=torch.Generator().manual_seed(1)).to(PLACE)
    labels = (data[:, :-1] * 3 + 1) % tokens
    places = ringattn.positions(length, group, layout, device=PLACE)
    inputs, labels = (ringattn.shard(x, group, layout) for x in (data[:, :-1], labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs, places).flatten(0, 1), labels.flatten(), reduction="sum") / (2 * length)
        optimizer.zero_grad()
        loss.backward()
        ringattn.sync_gradients(model, group)
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.cpu()


@check
def a_model_trains_to_the_losses_of_one_process():
    alone = train(None, "contiguous")
    assert alone[-1] < 0.8 * alone[0], alone
    for layout in ("contiguous", "zigzag"):
        ring = train(dist.group.WORLD, layout)
        if dist.get_rank() == 0:
            print(f"{layout}: {ring.tolist()}, one process: {alone.tolist()}", flush=True)
        close(ring, alone, 1e-4)


@check
def a_hugging_face_model_trains_to_the_losses_of_one_process():
    import ringattn.transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    group, layout, length = dist.group.WORLD, "zigzag", 60
    ringattn.transformers.register("ring", group=group, layout=layout)
    ringattn.transformers.register("alone")
    tokens = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(1)).to(PLACE)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    losses = {}
    for name, where in (("alone", None), ("ring", group)):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, attn_implementation=name)  # fmt: skip
        model = LlamaForCausalLM(config).to(PLACE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        mine, targets = (ringattn.shard(x, where, layout).contiguous() for x in (tokens, labels))
        places = ringattn.positions(length, where, layout, device=PLACE)[None]
        seen = []
        for _ in range(5):
            loss = model(mine, position_ids=places, labels=targets, shift_labels=targets,
                         num_items_in_batch=(labels != -100).sum()).loss  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            ringattn.sync_gradients(model, where)
            optimizer.step()
            seen.append(loss.detach())
        losses[name] = torch.stack(seen)
    dist.all_reduce(losses["ring"], group=group)
    close(losses["ring"].cpu(), losses["alone"].cpu(), 2e-5)


if __name__ == "__main__":
    if GPU:
        torch.cuda.set_device(PLACE)
    main(sys.argv[2])
