"""attn_implementation="ringattn" in Hugging Face models: a tiny Llama, randomly initialised, against sdpa."""

import json
import pathlib

import pytest
import torch
from conftest import run_python

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


def test_a_model_that_asks_for_windows_of_no_layer_is_equal():
    few = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    data = batch("left")
    ours, theirs = (model(name, "Qwen2Moe", **few).eval()(**data).logits for name in ("ringattn", "sdpa"))
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


def seq2seq(kind, name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        attn_implementation=name,
    )
    suffix = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    return getattr(transformers, kind + suffix)(config).eval()


@pytest.mark.parametrize("kind", ["Bart", "Marian", "Pegasus"])
def test_encoders_with_decoders_generate_the_tokens_of_sdpa(kind):
    data = batch("right")
    data = {"input_ids": data["input_ids"].clamp(min=3), "attention_mask": data["attention_mask"]}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(*(seq2seq(kind, name).generate(**data, **options) for name in ("ringattn", "sdpa")))


@pytest.mark.parametrize("kind, padding", [("Llama", None), ("Llama", "left"), ("Mistral", None), ("Mistral", "left")])
def test_one_graph_holds_a_training_step(kind, padding):
    options = {"sliding_window": 5} if kind == "Mistral" else {}
    found = []
    for name in ("ringattn", "sdpa"):
        torch._dynamo.reset()
        net = model(name, kind, num_hidden_layers=1, **options).train()
        call = torch.compile(net, fullgraph=True, backend="aot_eager") if name == "ringattn" else net
        loss = call(**batch(padding), use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [None, "right"])
def test_operators_of_masks_say_what_they_give(padding):
    """Sizes and strides, which the default backend of torch.compile asserts."""
    from ringattn._hf_mask import write_op
    from ringattn._hf_op import masked_forward
    from ringattn.multihead import _range_op

    kept = batch(padding)["attention_mask"]
    arguments = (kept, None, None, None, [3, 20, 0, 20, 0, -1, 0], "", "contiguous")
    settings = ringattn._config.checked(ringattn._config.Settings())
    x = torch.randn(3, 20, 2, 4, requires_grad=True)
    torch.library.opcheck(write_op, arguments)
    torch.library.opcheck(masked_forward, (x, x, x, write_op(*arguments), None, None, *settings, ""))
    if kept is not None:
        torch.library.opcheck(_range_op, (kept == 0, "", "contiguous"))


def test_one_graph_serves_a_static_cache_that_fills():
    data = {name: value for name, value in batch("left").items() if name != "labels"}
    found, graphs = [], []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    for name in ("ringattn", "sdpa"):
        torch._dynamo.reset()
        net = model(name, num_hidden_layers=1).eval()
        if name == "ringattn":
            net.forward = torch.compile(net.forward, fullgraph=True, backend=counting)
        options = {"cache_implementation": "static", "disable_compile": True}
        found.append(net.generate(**data, max_new_tokens=6, do_sample=False, **options))
    assert torch.equal(*found)
    assert len(graphs) <= 3, f"{len(graphs)} graphs for a prompt and 5 tokens"


@pytest.mark.parametrize("padding", [None, "left"])
def test_a_model_is_exported_where_sdpa_is(padding):
    data = {name: value for name, value in batch(padding).items() if name != "labels" and value is not None}
    net = model("ringattn", num_hidden_layers=1).eval()
    exported = torch.export.export(net, (), {**data, "use_cache": False}, strict=False).module()
    torch.testing.assert_close(exported(**data, use_cache=False).logits, net(**data).logits)


def test_a_graph_refuses_packed_documents_when_it_runs():
    torch._dynamo.reset()
    net = torch.compile(model("ringattn", num_hidden_layers=1).eval(), fullgraph=True, backend="eager")
    tokens = batch(None)["input_ids"]
    places = torch.arange(20)[None].expand(3, -1)
    net(tokens, position_ids=places, use_cache=False)
    with pytest.raises(ValueError, match="position_ids that are not consecutive"):
        net(tokens, position_ids=places % 10, use_cache=False)


def test_a_token_costs_one_call_of_the_library_a_layer(monkeypatch):
    from ringattn import _engine

    calls, plans = [], []
    forward, plan = _engine.Communicator.forward, _engine.lib.ra_plan_create
    monkeypatch.setattr(_engine.Communicator, "forward", lambda self, *rest: (calls.append(1), forward(self, *rest))[1])
    monkeypatch.setattr(_engine.lib, "ra_plan_create", lambda *rest: (plans.append(1), plan(*rest))[1])
    for padding in (None, "left"):
        data = {name: value for name, value in batch(padding).items() if name != "labels"}
        calls.clear(), plans.clear()
        model("ringattn").eval().generate(**data, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert len(calls) == 6 * 2, "6 tokens, 2 layers"
        assert len(plans) == 6, "layers share a plan"


def test_on_a_group_of_processes(tmp_path):
    path = tmp_path / "results.json"
    worker = pathlib.Path(__file__).parent / "workers" / "hf_checks.py"
    done = run_python(worker, ranks=3, arguments=[path])
    found = json.loads(path.read_text())
    assert len(found) == 4 and set(found.values()) == {"ok"}, f"{found}\n{done.stderr[-4000:]}"


def test_what_is_not_supported_raises_with_the_reason():
    net = model("ringattn").eval()
    tokens = batch(None)["input_ids"]
    holes = torch.ones_like(tokens)
    holes[0, 5] = 0
    with pytest.raises(ValueError, match="attention_mask leaves 19 keys of batch entry 0 that are not adjacent"):
        net(tokens, attention_mask=holes)
    with pytest.raises(ValueError, match="attention_mask has shape .* for each query and key is not supported"):
        net(tokens, attention_mask=torch.ones(3, 1, 20, 20))
    with pytest.raises(ValueError, match="no option 'is_causal'"):
        ringattn.transformers.register(is_causal=False)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("padding", [None, "left"])
def test_packed_documents_are_refused(cache, padding):
    net, data = model("ringattn").eval(), batch(padding)
    del data["labels"]
    with pytest.raises(ValueError, match="position_ids .*packed documents"):
        net(**data, position_ids=(torch.arange(20) % 10)[None].expand(3, -1), use_cache=cache)
    lengths = torch.tensor([0, 10, 20], dtype=torch.int32)
    for name, given in (("cu_seq_lens_q", lengths), ("cu_seq_lens_k", lengths), ("max_length_q", 10), ("seq_idx", lengths)):
        with pytest.raises(ValueError, match=f"{name} is not supported by ringattn: packed documents"):
            net(**data, use_cache=cache, **{name: given})


def test_positions_of_padding_may_be_anything():
    data = batch("left")
    places = (data["attention_mask"].cumsum(1) - 1).masked_fill(data["attention_mask"] == 0, 1)  # as generate has them
    model("ringattn").eval()(data["input_ids"], attention_mask=data["attention_mask"], position_ids=places)


def test_an_argument_that_nobody_knows_is_an_error():
    with pytest.raises(TypeError, match="'atention_mask'"):
        model("ringattn").eval()(batch(None)["input_ids"], atention_mask=torch.ones(3, 20))
