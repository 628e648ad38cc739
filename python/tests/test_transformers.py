"""attn_implementation="ringattn" in Hugging Face models: a tiny Llama, randomly initialised, against sdpa."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import ringattn.transformers  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    ringattn.transformers.register()


def model(implementation, kind="Llama", **options):
    torch.manual_seed(0)
    base = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "attn_implementation": implementation,
    }
    config = getattr(transformers, f"{kind}Config")(**{**base, **options})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch(padding):
    torch.manual_seed(1)
    tokens = torch.randint(1, 64, (3, 20))
    mask = torch.ones_like(tokens)
    if padding == "right":
        mask[0, 13:], mask[2, 17:] = 0, 0
    if padding == "left":
        mask[0, :7], mask[2, :3] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask if padding else None, "labels": labels}


def losses(implementation, padding, steps=4, **options):
    net = model(implementation, **options).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        loss = net(**batch(padding)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_a_llama_trains_with_the_losses_of_sdpa(padding):
    ours, theirs = losses("ringattn", padding), losses("sdpa", padding)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert theirs[-1] < theirs[0]


def test_logits_of_the_tokens_that_count_are_equal_under_padding():
    for padding in ("left", "right"):
        data = batch(padding)
        ours, theirs = (model(name).eval()(**data).logits for name in ("ringattn", "sdpa"))
        kept = data["attention_mask"].bool()
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-4, atol=1e-5)


def test_sliding_windows_are_equal():
    data = batch("left")
    ours, theirs = (model(name, "Mistral", sliding_window=5).eval()(**data).logits for name in ("ringattn", "sdpa"))
    kept = data["attention_mask"].bool()
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_gives_the_tokens_of_sdpa(cache):
    data = {name: value for name, value in batch("left").items() if name != "labels"}
    found = []
    for name in ("ringattn", "sdpa"):
        options = {} if cache == "dynamic" else {"cache_implementation": "static"}
        found.append(model(name).eval().generate(**data, max_new_tokens=6, do_sample=False, disable_compile=True, **options))
    assert torch.equal(*found)


def test_a_bidirectional_encoder_is_equal():
    torch.manual_seed(0)
    outputs = []
    for name in ("ringattn", "sdpa"):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            attn_implementation=name,
        )
        net = transformers.BertModel(config).eval()
        data = batch("right")
        outputs.append(net(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).last_hidden_state)
    kept = batch("right")["attention_mask"].bool()
    torch.testing.assert_close(outputs[0][kept], outputs[1][kept], rtol=1e-4, atol=1e-5)


def test_a_pattern_given_to_register_is_used():
    ringattn.transformers.register(
        "ringattn-dilated", segment_lengths=[4, 0], dilation_rates=[1, 2], combine="mix", dilate_queries=False
    )
    data = batch(None)
    dense, dilated = (model(name).eval()(**data).logits for name in ("ringattn", "ringattn-dilated"))
    assert not torch.allclose(dense, dilated, atol=1e-3)


def test_what_is_not_supported_raises_with_the_reason():
    net = model("ringattn").eval()
    tokens = batch(None)["input_ids"]
    holes = torch.ones_like(tokens)
    holes[0, 5] = 0
    with pytest.raises(ValueError, match="not adjacent"):
        net(tokens, attention_mask=holes)
    with pytest.raises(ValueError, match="given whole"):
        net(tokens, attention_mask=torch.ones(3, 1, 20, 20))
    with pytest.raises(ValueError, match="packed"):
        net(tokens, position_ids=torch.cat([torch.arange(10), torch.arange(10)])[None].expand(3, -1), use_cache=False)
    with pytest.raises(ValueError, match="no option 'is_causal'"):
        ringattn.transformers.register(is_causal=False)
