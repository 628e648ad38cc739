"""The building blocks, in one process; over processes they are tested in workers/ring_checks.py."""

import math

import pytest
import ringattn
import torch


def test_neighbours_close_the_ring_inside_each_ring():
    assert [ringattn.circular_rank_left(rank, 3) for rank in range(6)] == [2, 0, 1, 5, 3, 4]
    assert [ringattn.circular_rank_right(rank, 3) for rank in range(6)] == [1, 2, 0, 4, 5, 3]
    assert ringattn.circular_rank_right(1, 4, num=6) == 3 and ringattn.circular_rank_left(1, 4, num=6) == 3
    with pytest.raises(ValueError, match="ring_size"):
        ringattn.circular_rank_left(0, 0)


def test_splits_are_the_contiguous_layout_and_views():
    x = torch.arange(22).reshape(1, 11, 2)
    parts = [ringattn.split_by_rank(x, rank, 4) for rank in range(4)]
    assert [part.size(1) for part in parts] == [3, 3, 3, 2] and torch.equal(torch.cat(parts, 1), x)
    assert parts[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_one_process_is_a_ring_of_one():
    x = torch.ones(2, 3)
    assert ringattn.ring_pass(x) is x and ringattn.gather_from_rank(x) is x
    ((info, (y,)),) = ringattn.all_ring_pass(x)
    assert y is x and info == ringattn.RingInfo(ring_rank=0, iteration=0, is_first=True, is_last=True)


def test_a_buffer_that_shares_memory_with_what_is_sent_is_refused():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="shares memory"):
        ringattn.send_and_receive_(x[:2], x[2:], 0, 0)
    with pytest.raises(ValueError, match="receive_buffer"):
        ringattn.send_and_receive_(x, torch.zeros(5), 0, 0)


def chunks(q, k, v, count, is_causal):
    """Attention chunk by chunk, merged."""
    parts = ringattn.StableRingAccumulator(q.shape, dtype=q.dtype)
    step = -(-k.size(2) // count)
    for begin in range(0, k.size(2), step):
        mask = (
            ringattn.create_causal_mask(q.size(2), len(range(begin, min(begin + step, k.size(2)))), k_start=begin)
            if is_causal
            else None
        )
        parts.update(
            *ringattn.compute_attention_with_lse(q, k[:, :, begin : begin + step], v[:, :, begin : begin + step], mask=mask)
        )
    return parts


@pytest.mark.parametrize("is_causal", [False, True])
def test_merged_chunks_are_the_whole_with_gradients(is_causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 13, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    for count in (1, 3, 13):
        merged = chunks(q, k, v, count, is_causal)
        torch.testing.assert_close(merged.get_output(), expected)
        _, lse = ringattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal, return_lse=True)
        torch.testing.assert_close(merged.get_lse(), lse)
        for a, b in zip(torch.autograd.grad(merged.get_output(), (q, k, v), dout), wanted):
            torch.testing.assert_close(a, b)


def test_no_constant_shifts_the_result():
    """Scores of -40 make denominators of 1e-17, which an added 1e-8 would drown."""
    q = torch.full((1, 1, 2, 4), -20.0)
    k, v = torch.ones(1, 1, 6, 4), torch.arange(24.0).reshape(1, 1, 6, 4)
    torch.testing.assert_close(chunks(q, k, v, 3, False).get_output(), v.mean(2, keepdim=True).expand(1, 1, 2, 4))


def test_rows_without_keys_are_zero_and_never_nan():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    out, lse = ringattn.compute_attention_with_lse(q, q, q, mask=torch.zeros(3, 3, dtype=torch.bool))
    assert not out.any() and torch.isneginf(lse).all()
    parts = ringattn.StableRingAccumulator(q.shape)
    parts.update(out, lse)
    assert not parts.get_output().any() and torch.isneginf(parts.get_lse()).all()
    parts.get_output().sum().backward()
    assert torch.isfinite(q.grad).all()
    parts.update(*ringattn.compute_attention_with_lse(q, q, q))
    torch.testing.assert_close(parts.get_output(), ringattn.compute_attention_with_lse(q, q, q)[0])
    empty = ringattn.compute_attention_with_lse(q, q[:, :, :0], q[:, :, :0])
    assert not empty[0].any() and torch.isneginf(empty[1]).all()


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 2, 4), 300.0)
    out, lse = ringattn.compute_attention_with_lse(q, q, q)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_masks_follow_global_positions():
    mask = ringattn.create_causal_mask(3, 4, q_start=5, k_start=4)
    assert mask.tolist() == [[True, True, False, False], [True, True, True, False], [True, True, True, True]]
    scores = ringattn.apply_ring_mask(torch.zeros(3, 4), q_start=5, k_start=4)
    assert torch.equal(torch.isneginf(scores), ~mask)
    window = ringattn.apply_ring_mask(torch.zeros(3, 4), q_start=5, k_start=4, is_causal=False, window=(1, 1))
    expected = torch.tensor([[abs(q - k) <= 1 for k in range(4, 8)] for q in range(5, 8)])
    assert torch.equal(torch.isneginf(window), ~expected)


def test_dropout_scales_what_it_keeps():
    torch.manual_seed(0)
    q = torch.zeros(1, 1, 500, 2)
    v = torch.ones(1, 1, 500, 2)
    out, lse = ringattn.compute_attention_with_lse(q, q, v, dropout=0.5)
    assert abs(out.mean() - 1) < 0.02 and out.std() > 0.01
    assert torch.allclose(lse, torch.full_like(lse, math.log(500)))
    assert torch.allclose(ringattn.compute_attention_with_lse(q, q, v, dropout=0.5, training=False)[0], torch.ones_like(out))


def test_updates_of_wrong_shapes_are_refused():
    parts = ringattn.StableRingAccumulator((1, 2, 3, 4))
    with pytest.raises(ValueError, match="must be"):
        parts.update(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3))
    parts.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 1))
