"""Checks of a Hugging Face model whose tokens are spread over a group of processes."""

import ringattn.transformers
import torch
import torch.distributed as dist
import transformers
from common import check, main

TOKENS, LAYOUTS = 22, ("contiguous", "zigzag", "striped")


def model(name, kind="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        attn_implementation=name,
        **options,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch(padding):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 64, (3, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    if padding == "right":
        mask[0, 13:], mask[2, 5:] = 0, 0
    if padding == "left":
        mask[0, :7], mask[2, :16] = 0, 0
    labels = torch.nn.functional.pad(tokens.masked_fill(mask == 0, -100), (0, 1), value=-100)[:, 1:]  # of the next token
    return tokens, mask if padding else None, labels


def losses(net, padding, layout=None, steps=10):
    """The losses of some steps; with a layout on this rank's rows."""
    tokens, mask, labels = batch(padding)
    count, places, group = (labels != -100).sum(), torch.arange(TOKENS), dist.group.WORLD
    if layout:
        tokens, labels = (ringattn.shard(x, group, layout) for x in (tokens, labels))
        mask = None if mask is None else ringattn.shard(mask, group, layout)
        places = ringattn.positions(TOKENS, group, layout)
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.3), []
    for _ in range(steps):
        loss = net(
            tokens,
            attention_mask=mask,
            position_ids=places[None],
            labels=labels,
            shift_labels=labels.contiguous(),
            num_items_in_batch=count,
            use_cache=False,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if layout:
            ringattn.sync_gradients(net, group)
            dist.all_reduce(total)
        optimizer.step()
        found.append(total.item())
    return found


def register(layout, **options):
    name = f"ring-{layout}"
    ringattn.transformers.register(name, group=dist.group.WORLD, layout=layout, **options)
    return name


def equal(ours, theirs):
    assert len(ours) == len(theirs) and theirs[-1] < 0.9 * theirs[0], theirs
    assert all(abs(a - b) <= 1e-4 * b for a, b in zip(ours, theirs)), (ours, theirs)


@check
def ten_steps_of_a_llama_have_the_losses_of_one_process():
    for padding in (None, "left", "right"):
        theirs = losses(model("sdpa"), padding)
        for layout in LAYOUTS:
            equal(losses(model(register(layout)), padding, layout), theirs)


@check
def ten_steps_with_a_sliding_window_have_the_losses_of_one_process():
    theirs = losses(model("sdpa", "Mistral", sliding_window=6), "left")
    for layout in LAYOUTS:
        equal(losses(model(register(layout), "Mistral", sliding_window=6), "left", layout), theirs)


def refused(words, call):
    """One rank says what is wrong, and the others that it does not take part."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert any(words in text for text in texts), texts
        return
    dist.all_gather_object([None] * dist.get_world_size(), "nothing")
    raise AssertionError(f"nothing was raised; expected {words!r}")


@check
def what_cannot_be_right_is_refused_on_every_rank():
    group, (tokens, mask, _) = dist.group.WORLD, batch("left")
    for layout in LAYOUTS:
        net = model(register(layout)).eval()
        mine = ringattn.shard(tokens, group, layout)
        places = ringattn.positions(TOKENS, group, layout)[None]
        refused(f"ringattn.positions({TOKENS}, group", lambda: net(mine))
        refused("ringattn.shard(attention_mask", lambda: net(mine, attention_mask=mask, position_ids=places))
        if layout == "contiguous":
            refused("register(group=...)", lambda: net.generate(mine, max_new_tokens=3, do_sample=False))
            with torch.no_grad():
                cache = net(mine, position_ids=places, use_cache=True).past_key_values
                refused("cache", lambda: net(mine[:, :1], position_ids=places[:, :1], past_key_values=cache))


@check
def a_model_that_hides_its_positions_is_refused():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        attn_implementation=register("contiguous"),
    )
    net = transformers.BertModel(config).eval()
    mine = ringattn.shard(batch(None)[0], dist.group.WORLD)
    refused("does not hand position_ids to attention", lambda: net(input_ids=mine))


if __name__ == "__main__":
    main()
