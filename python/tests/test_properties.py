"""Properties that hold for every configuration, on configurations drawn by hypothesis."""

import os
import warnings

import numpy as np
import pytest
import ringattn

import reference

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LONG = bool(os.environ.get("RINGATTN_LONG"))
drawn = settings(max_examples=400 if LONG else 40, deadline=None, derandomize=not LONG, print_blob=True)


@st.composite
def cases(draw):
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    combine = draw(st.sampled_from(["heads", "mix"]))
    branches = draw(st.integers(0, kv_heads if combine == "heads" else 3))
    options = {
        "combine": combine,
        "offset": draw(st.sampled_from(["branch", "head", "head-block", "residue"])),
        "dilate_queries": draw(st.booleans()),
        "is_causal": draw(st.booleans()),
    }
    if branches:
        options["segment_lengths"] = [draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40])) for _ in range(branches)]
        options["dilation_rates"] = [draw(st.integers(1, 5)) for _ in range(branches)]
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(-1, 9)), draw(st.integers(-1, 9)))
    seq_q, seq_k = draw(st.integers(0, 24)), draw(st.integers(0, 24))
    batch = draw(st.integers(1, 2))
    if draw(st.booleans()):
        ends = [sorted((draw(st.integers(0, seq_k)), draw(st.integers(0, seq_k)))) for _ in range(batch)]
        options["key_range"] = ends
    placement = draw(st.sampled_from(["sharded", "replicated"]))
    ring = {
        "query_placement": placement,
        "schedule": draw(st.sampled_from(["auto", "ring", "gather"] + ["merge"] * (placement == "replicated"))),
        "group": draw(st.sampled_from([None, 2, 3, 5])),
        "layout": draw(st.sampled_from(["contiguous", "zigzag", "striped"])),
        "bucket": draw(st.sampled_from([None, 1, 3])),
    }
    return (batch, seq_q, seq_k, heads, kv_heads), options, ring


def draw_inputs(shape, dim=5, dtype=np.float32):
    batch, seq_q, seq_k, heads, kv_heads = shape
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(s).astype(dtype)
        for s in ((batch, seq_q, heads, dim), (batch, seq_k, kv_heads, dim), (batch, seq_k, kv_heads, dim))
    ]


def run(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ringattn.HolesWarning)
        return ringattn.attention(*arguments, **options)


@drawn
@given(cases())
def test_any_configuration_on_any_ring_is_the_definition(case):
    shape, options, ring = case
    q, k, v = draw_inputs(shape)
    out, lse = run(q, k, v, return_lse=True, **options, **ring)
    expected = reference.attention(q, k, v, **options)
    reference.assert_close(out, expected, "out", "float32")
    reference.assert_close(lse, expected, "lse", "float32")


@drawn
@given(cases())
def test_with_q_zero_lse_counts_the_keys_and_out_is_their_mean(case):
    shape, options, ring = case
    q, k, v = draw_inputs(shape, dtype=np.float64)
    out, lse = run(np.zeros_like(q), k, np.ones_like(v), return_lse=True, **options, **ring)
    assert np.allclose(out[out != 0], 1.0)
    counts = np.exp(lse)
    assert np.allclose(counts, np.rint(counts)) and np.array_equal(counts == 0, np.moveaxis(out[..., 0], 1, 2) == 0)


@drawn
@given(cases(), st.integers(0, 2**31))
def test_gradients_are_those_of_the_definition(case, seed):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    shape, options, ring = case
    arrays = draw_inputs(shape, dtype=np.float64)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays)
    dout = np.random.default_rng(seed).standard_normal(arrays[0].shape)
    out = run(q, k, v, **options, **ring)
    found = torch.autograd.grad(out, (q, k, v), torch.from_numpy(dout))
    expected = reference.attention(*arrays, dout, **options)
    for name, gradient in zip(("dq", "dk", "dv"), found):
        reference.assert_close(gradient.numpy(), expected, name, "float64")


@drawn
@given(cases())
def test_keys_that_are_not_attended_are_not_read(case):
    shape, options, ring = case
    q, k, v = draw_inputs(shape)
    tables = reference.pairs(shape[1], shape[2], shape[3], shape[4], **{n: x for n, x in options.items() if n != "key_range"})
    group = shape[3] // shape[4]
    used = sum(tables).sum(1).reshape(shape[4], group, shape[2]).sum(1).T > 0  # [keys, kv_heads]
    expected = run(q, k, v, **options, **ring)
    k[:, ~used], v[:, ~used] = np.nan, np.inf
    assert np.array_equal(run(q, k, v, **options, **ring), expected)
