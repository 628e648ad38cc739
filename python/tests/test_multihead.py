"""RingMultiheadDilatedAttention against torch's nn.MultiheadAttention."""

import pytest
import ringattn
import torch
from torch import nn


def pair(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64, **options)
    for p in theirs.parameters():  # biases start as zero, which would hide mistakes
        nn.init.normal_(p, std=0.3)
    ours = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64, **options)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    return ours, theirs


def data(rows=11, dim=24):
    torch.manual_seed(1)
    return torch.randn(2, rows, dim, dtype=torch.float64)


def same(ours, theirs, inputs, theirs_kwargs=None, **kwargs):
    """Outputs, input gradients and weight gradients agree."""
    out, weights = ours(*inputs, **kwargs)
    expected, _ = theirs(*inputs, **(kwargs if theirs_kwargs is None else theirs_kwargs), need_weights=False)
    assert weights is None
    torch.testing.assert_close(out, expected)
    for module, result in ((ours, out), (theirs, expected)):
        module.zero_grad()
        (result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    for (name, p), (other, r) in zip(sorted(ours.named_parameters()), sorted(theirs.named_parameters())):
        assert name == other
        torch.testing.assert_close(p.grad, r.grad, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 14}])
def test_state_dicts_load_and_results_and_weight_gradients_are_equal(options):
    ours, theirs = pair(**options)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    same(ours, theirs, (data(), data(8, options.get("kdim", 24)), data(8, options.get("vdim", 24))))
    theirs.load_state_dict(ours.state_dict())  # and back


def test_self_attention_is_one_projection_and_equal():
    ours, theirs = pair()
    x = data()
    same(ours, theirs, (x, x, x))


def test_initial_weights_are_drawn_as_theirs():
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(24, 3, batch_first=True)
    torch.manual_seed(7)
    ours = ringattn.RingMultiheadDilatedAttention(24, 3)
    for name, p in theirs.named_parameters():
        q = ours.get_parameter(name)
        assert p.shape == q.shape and abs(p.std() - q.std()) < 0.05 and (p.abs().max() > 0) == (q.abs().max() > 0)


def test_causal_masks_are_understood_in_every_form():
    ours, theirs = pair()
    x = data()
    boolean = torch.ones(11, 11, dtype=torch.bool).triu(1)
    additive = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    for mask in (boolean, additive):
        same(ours, theirs, (x, x, x), attn_mask=mask)
        same(ours, theirs, (x, x, x), attn_mask=mask, is_causal=True)
    same(ours, theirs, (x, x, x), {"attn_mask": boolean, "is_causal": True}, is_causal=True)
    same(ours, theirs, (x, x, x), {}, attn_mask=torch.zeros(11, 11, dtype=torch.bool))


def test_padding_masks_that_leave_a_range_are_equal():
    ours, theirs = pair()
    x = data()
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 7:], mask[1, :3] = True, True
    same(ours, theirs, (x, x, x), key_padding_mask=mask)
    same(
        ours,
        theirs,
        (x, x, x),
        {"key_padding_mask": mask},
        key_padding_mask=torch.zeros(2, 11).masked_fill(mask, float("-inf")),
    )


def test_a_fully_padded_entry_is_the_bias_alone_and_never_nan():
    ours, _ = pair()
    x = data()
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0] = True
    out, _ = ours(x, x, x, key_padding_mask=mask)
    torch.testing.assert_close(out[0], ours.out_proj.bias.expand(11, 24))


def test_rows_first_and_unbatched_inputs_are_taken():
    ours, theirs = pair()
    x = data()
    single, _ = ours(x[0], x[0], x[0])
    torch.testing.assert_close(single, theirs(x[0], x[0], x[0])[0])
    turned = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64, batch_first=False)
    turned.load_state_dict(ours.state_dict())
    torch.testing.assert_close(turned(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), ours(x, x, x)[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_process_ranks_give_the_same_output_and_weight_gradients(ranks):
    for layout in ("contiguous", "zigzag", "striped"):
        ours, theirs = pair()
        ours.group, ours.attention.layout = ranks, layout
        x = data()
        same(ours, theirs, (x, x, x))
        ringattn.sync_gradients(ours, ranks)  # nothing to add: the gradients are whole
        report = ringattn.check(ours, x, is_causal=True)
        assert report.ok and report.ranks == ranks, str(report)


def test_a_transformer_encoder_layer_takes_it_and_really_calls_it():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = data()
    for training in (True, False):
        layer.train(training)
        expected = layer(x)
        ours = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64)
        ours.load_state_dict(layer.self_attn.state_dict())
        calls = []
        ours.register_forward_hook(lambda *_: calls.append(1))
        theirs, layer.self_attn = layer.self_attn, ours.train(training)
        with torch.no_grad():  # in evaluation torch would take a fast path around the module if it could
            torch.testing.assert_close(layer(x), expected)
            mask = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
            layer(x, src_mask=mask, is_causal=True)
        assert len(calls) == 2
        layer.self_attn = theirs


def test_activation_checkpointing_keeps_less_and_gives_the_same():
    ours, _ = pair()
    ours.attention.dropout = 0.4
    x = data().requires_grad_()

    def run(checkpoint):
        ours.checkpoint = checkpoint
        ours.zero_grad()
        x.grad = None
        kept = []
        torch.manual_seed(9)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            out, _ = ours(x, x, x, is_causal=True)
            total = sum(kept)
        out.square().sum().backward()
        return out.detach(), x.grad.clone(), ours.in_proj_weight.grad.clone(), total

    plain, again = run(False), run(True)
    for a, b in zip(plain[:3], again[:3]):
        assert torch.equal(a, b)
    assert again[3] < plain[3] / 2


def test_layer_norm_is_an_option_that_is_off():
    ours, _ = pair()
    assert ours.norm is None
    normed = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64, layer_norm=True)
    missing = normed.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing == ["norm.weight", "norm.bias"]
    x, inner = data(), {}
    normed.norm.register_forward_hook(lambda module, inputs, out: inner.update(out=out))
    out, _ = normed(x, x, x)
    torch.testing.assert_close(inner["out"].mean(-1), torch.zeros(2, 11, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(out, normed.out_proj(inner["out"]))


def test_dilated_settings_reach_the_attention():
    torch.manual_seed(0)
    ours = ringattn.RingMultiheadDilatedAttention(
        24, 3, segment_lengths=[4, 8], dilation_rates=[1, 2], combine="mix", offset="head", dilate_queries=False, window=(5, 5)
    )
    x = torch.randn(2, 11, 24)
    q, k, v = (
        y.unflatten(-1, (3, 8)) for y in torch.nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).chunk(3, -1)
    )
    inner = ringattn.attention(
        q,
        k,
        v,
        segment_lengths=[4, 8],
        dilation_rates=[1, 2],
        combine="mix",
        offset="head",
        dilate_queries=False,
        window=(5, 5),
    )
    assert torch.equal(ours(x)[0], ours.out_proj(inner.flatten(2)))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_autocast_and_narrow_weights_work():
    x = data().float()
    ours = ringattn.RingMultiheadDilatedAttention(24, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = ours(x, x, x)
    assert out.dtype == torch.bfloat16
    half = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.bfloat16)
    assert half(x.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, match",
    [
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"num_heads": 5}, "multiple of num_heads"),
        ({"embed_dim": 1024, "num_heads": 2}, "256"),
        ({"query_placement": "replicated"}, "query_placement"),
        ({"segment_lengths": [4]}, "dilation_rates"),
        ({"combine": "sum"}, "combine"),
    ],
)
def test_unsupported_construction_raises_with_the_reason(options, match):
    with pytest.raises(ValueError, match=match):
        ringattn.RingMultiheadDilatedAttention(**{"embed_dim": 24, "num_heads": 3, **options})


def test_unsupported_calls_raise_with_the_reason():
    ours, _ = pair()
    x = data()
    holes = torch.zeros(2, 11, dtype=torch.bool)
    holes[1, 5] = True
    for match, kwargs in {
        "need_weights": {"need_weights": True},
        "not the causal mask": {"attn_mask": torch.ones(11, 11, dtype=torch.bool).tril(-1)},
        "adds numbers": {"attn_mask": torch.full((11, 11), 0.5)},
        "must end in": {"attn_mask": torch.zeros(11, 12, dtype=torch.bool)},
        "batch entry 1 .* not adjacent": {"key_padding_mask": holes},
        "key_padding_mask adds numbers": {"key_padding_mask": torch.full((2, 11), 0.5)},
        "key_padding_mask has shape": {"key_padding_mask": torch.zeros(2, 10, dtype=torch.bool)},
    }.items():
        with pytest.raises(ValueError, match=match):
            ours(x, x, x, **kwargs)
    with pytest.raises(ValueError, match="query has shape"):
        ours(x[None], x[None], x[None])
    with pytest.raises(TypeError):
        ringattn.RingMultiheadDilatedAttention(24, 3, no_such_option=1)
