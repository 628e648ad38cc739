"""KVCache in one process; over processes it is tested in workers/cache_checks.py."""

import pytest
import ringattn
import torch


def tensors(rows=150):
    torch.manual_seed(0)
    return torch.randn(1, rows, 4, 8), *torch.randn(2, 1, rows, 2, 8)


@pytest.mark.parametrize("group", [None, 3])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_rows_one_by_one_and_by_pieces_give_causal_attention(group, layout):
    q, k, v = tensors()
    expected = ringattn.attention(q, k, v, is_causal=True, window=(70, 0))
    for capacity in (None, 200):
        cache = ringattn.KVCache(group, layout, capacity)
        for begin, end in ((0, 60), (60, 61), (61, 62), (62, 150)):
            cache.append(k[:, begin:end], v[:, begin:end])
            out = cache.attention(q[:, begin:end], is_causal=True, window=(70, 0))
            torch.testing.assert_close(out, expected[:, begin:end], rtol=0, atol=2e-6)
        assert len(cache) == 150 and torch.equal(cache.key, k) and torch.equal(cache.value, v)


def test_rows_are_copied_seldom():
    _, k, v = tensors(1000)
    cache, rooms = ringattn.KVCache(), set()
    for row in range(1000):
        cache.append(k[:, row : row + 1], v[:, row : row + 1])
        rooms.add(cache.key.untyped_storage().nbytes())
    assert len(rooms) <= 5


def test_what_does_not_fit_is_refused():
    q, k, v = tensors(10)
    cache = ringattn.KVCache(capacity=12)
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.attention(q)
    cache.append(k, v)
    for arguments, match in (
        ((k, v), "the cache holds 10 rows; 10 more exceed its capacity of 12"),
        ((k[:, :1], v), "key has shape"),
        ((k[:, :1].double(), v[:, :1].double()), "the cache holds torch.float32"),
        ((k[:, :1, :1], v[:, :1, :1]), "the cache holds"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.append(*arguments)
    assert len(cache) == 10 and torch.equal(cache.key, k)
    with pytest.raises(ValueError, match="capacity is 0"):
        ringattn.KVCache(capacity=0)
    with pytest.raises(ValueError, match="layout"):
        ringattn.KVCache(layout="diagonal")
    with pytest.raises(ValueError, match="key and value are ndarray and Tensor; they must be torch tensors"):
        cache.append(k.numpy(), v)


def test_a_cache_that_was_filled_in_inference_mode_grows_outside():
    q, k, v = tensors(70)
    for capacity in (None, 70):
        cache = ringattn.KVCache(capacity=capacity)
        with torch.inference_mode():
            cache.append(k[:, :6], v[:, :6])
        cache.append(k[:, 6:10], v[:, 6:10])
        with torch.inference_mode():
            cache.append(k[:, 10:], v[:, 10:])
        assert torch.equal(cache.attention(q), ringattn.attention(q, k, v))
