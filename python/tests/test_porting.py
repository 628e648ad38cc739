"""ringattn.sdpa against torch's scaled_dot_product_attention, and ringattn.flash_attn_func against what flash-attn promises."""

import numpy as np
import pytest
import ringattn
import torch
import torch.nn.functional as F

torch.manual_seed(0)


def heads_first(rows=10, keys=10, heads=6, kv_heads=6, dtype=torch.float64):
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys))]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 2.0}])
def test_sdpa_is_torchs(options):
    q, k, v = (x.requires_grad_() for x in heads_first())
    found, expected = ringattn.sdpa(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    for x, y in zip(*(torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (found, expected))):
        torch.testing.assert_close(x, y)


def test_sdpa_takes_arguments_by_place():
    given = (*heads_first(), None, 0.0, True)
    torch.testing.assert_close(ringattn.sdpa(*given), F.scaled_dot_product_attention(*given))


def test_sdpa_lets_heads_share_where_it_is_asked_for():
    q, k, v = heads_first(kv_heads=2)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(ringattn.sdpa(q, k, v, enable_gqa=True), expected)
    with pytest.raises(ValueError, match="6 heads and key 2; enable_gqa=True"):
        ringattn.sdpa(q, k, v)


def test_causal_sdpa_begins_at_the_first_key():
    q, k, v = heads_first(rows=4)
    torch.testing.assert_close(ringattn.sdpa(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with pytest.raises(ValueError, match="query has 10 rows and key 4"):
        ringattn.sdpa(k, q, q, is_causal=True)
    with pytest.raises(ValueError, match="on a group exactly as many"):
        ringattn.sdpa(q, k, v, is_causal=True, group=2)
    torch.testing.assert_close(ringattn.sdpa(k, q, q), F.scaled_dot_product_attention(k, q, q))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_causal_sdpa_takes_ranges_of_all_keys(kind):
    q, k, v = heads_first(rows=4)
    ranges = [(1, 9), (0, 2)]
    mask = torch.ones(4, 10, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    for entry, (begin, end) in enumerate(ranges):
        mask[entry, ..., :begin], mask[entry, ..., end:] = False, False
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num(0.0)
    torch.testing.assert_close(ringattn.sdpa(q, k, v, is_causal=True, key_range=kind(ranges)), expected)


def test_sdpa_takes_numpy_arrays_and_our_settings():
    q, k, v = heads_first()
    arrays = [x.numpy() for x in (q, k, v)]
    out, lse = ringattn.sdpa(*arrays, is_causal=True, group=2, layout="zigzag", return_lse=True)
    assert type(out) is np.ndarray and lse.shape == (2, 6, 10)
    np.testing.assert_allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=True).numpy(), atol=1e-12)


def test_sdpa_refuses_masks_and_other_shapes():
    q, k, v = heads_first()
    with pytest.raises(ValueError, match="attn_mask is not supported"):
        ringattn.sdpa(q, k, v, attn_mask=torch.zeros(10, 10))
    with pytest.raises(ValueError, match=r"key has shape \(6, 10, 8\); it must be .* \[batch, heads, rows, head dim\]"):
        ringattn.sdpa(q, k[0], v)
    with pytest.raises(ValueError, match="query is a list"):
        ringattn.sdpa([1.0], k, v)
    with pytest.raises(TypeError, match="is_casual"):
        ringattn.sdpa(q, k, v, is_casual=True)


def test_flash_attn_func_is_attention_under_other_names():
    q, k, v = (x.transpose(1, 2) for x in heads_first(rows=4, kv_heads=3))
    found = ringattn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, -1))
    assert torch.equal(found, ringattn.attention(q, k, v, scale=0.3, is_causal=True, window=(3, -1)))
    assert torch.equal(ringattn.flash_attn_func(q, k, v, deterministic=True), ringattn.attention(q, k, v))
    # The last query at the last key, as flash-attn has it.
    mask = torch.ones(4, 10, dtype=torch.bool).tril(6).triu(3)
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"softcap": 30.0}, "softcap is not supported"),
        ({"alibi_slopes": torch.ones(6)}, "alibi_slopes is not supported"),
        ({"return_attn_probs": True}, "return_attn_probs is not supported: .*return_lse"),
        ({"window_size": 3}, "window"),
    ],
)
def test_flash_attn_func_refuses_what_is_not_there(options, match):
    q, k, v = (x.transpose(1, 2) for x in heads_first())
    with pytest.raises(ValueError, match=match):
        ringattn.flash_attn_func(q, k, v, **options)


def test_flash_attn_varlen_func_says_that_there_are_no_packed_sequences():
    q, k, v = torch.randn(3, 10, 4, 8)
    lengths = torch.tensor([0, 4, 10])
    with pytest.raises(ValueError, match="flash_attn_varlen_func is not supported: packed sequences"):
        ringattn.flash_attn_varlen_func(q, k, v, lengths, lengths, 6, 6, causal=True)
