"""ringattn.attention on NumPy arrays, against attention by its definition."""

import os
import threading

import numpy as np
import pytest
import ringattn
from conftest import Foreign

import reference

DENSE = {}
BRANCHES = {"segment_lengths": [8, 16, 0], "dilation_rates": [1, 2, 3]}


def inputs(rng, batch=2, seq_q=20, seq_k=20, heads=6, kv_heads=3, dim=8, dtype=np.float32):
    q = rng.standard_normal((batch, seq_q, heads, dim))
    k, v = rng.standard_normal((2, batch, seq_k, kv_heads, dim))
    return tuple(x.astype(dtype) for x in (q, k, v))


def agrees(q, k, v, dtype="float32", **options):
    out, lse = ringattn.attention(q, k, v, return_lse=True, **options)
    for name in ("group", "layout", "query_placement", "schedule", "bucket", "threads", "kernel", "timeout"):
        options.pop(name, None)
    expected = reference.attention(q, k, v, **options)
    reference.assert_close(out, expected, "out", dtype)
    reference.assert_close(lse, expected, "lse", dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_dense_attention_is_its_definition(rng, dtype):
    agrees(*inputs(rng, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("seq_q, seq_k", [(20, 20), (7, 20), (20, 7), (1, 33), (5, 0), (0, 5)])
def test_causal_attention_aligns_the_last_query_with_the_last_key(rng, seq_q, seq_k):
    agrees(*inputs(rng, seq_q=seq_q, seq_k=seq_k), is_causal=True)


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
@pytest.mark.parametrize("dilate_queries", [True, False])
@pytest.mark.parametrize("offset", ["branch", "head", "head-block", "residue"])
@pytest.mark.parametrize("combine", ["heads", "mix"])
def test_every_dilated_mode_is_its_definition(rng, combine, offset, dilate_queries):
    for is_causal in (False, True):
        agrees(*inputs(rng), **BRANCHES, combine=combine, offset=offset, dilate_queries=dilate_queries, is_causal=is_causal)


def test_windows_and_key_ranges_are_respected(rng):
    q, k, v = inputs(rng)
    agrees(q, k, v, window=(3, 2))
    agrees(q, k, v, window=(4, -1), is_causal=True)
    agrees(q, k, v, key_range=(3, 17))
    agrees(q, k, v, key_range=[[0, 5], [9, 9]], is_causal=True)


def test_scale_is_used_as_given(rng):
    agrees(*inputs(rng), scale=0.3)
    agrees(*inputs(rng), scale=-0.2)


def test_dropout_draws_the_documented_mask(rng):
    q, k, v = inputs(rng, dim=4)
    agrees(q, k, v, dropout_p=0.4, seed=123456789012345)
    agrees(q, k, v, dropout_p=0.25, seed=7, **BRANCHES, combine="mix", dilate_queries=False, is_causal=True)


def test_dropout_without_a_seed_follows_numpys_generator(rng):
    q, k, v = inputs(rng)
    np.random.seed(5)
    first, second = (ringattn.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    np.random.seed(5)
    assert np.array_equal(first, ringattn.attention(q, k, v, dropout_p=0.5))
    assert not np.array_equal(first, second)


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
@pytest.mark.parametrize(
    "placement, schedule",
    [("sharded", "ring"), ("sharded", "gather"), ("sharded", "auto"), ("replicated", "ring"), ("replicated", "merge")],
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_in_process_ranks_compute_the_same_function(rng, layout, placement, schedule):
    q, k, v = inputs(rng, seq_q=21, seq_k=23)
    for group in (2, 3, 5):
        agrees(q, k, v, group=group, layout=layout, query_placement=placement, schedule=schedule, is_causal=True)
        agrees(
            q,
            k,
            v,
            **BRANCHES,
            combine="mix",
            group=group,
            layout=layout,
            query_placement=placement,
            schedule=schedule,
            is_causal=True,
        )


def test_more_ranks_than_rows_still_work(rng):
    agrees(*inputs(rng, seq_q=3, seq_k=3), group=7, is_causal=True)


def test_strided_inputs_are_read_in_place(rng):
    packed = rng.standard_normal((2, 20, 3, 6, 8)).astype(np.float32)
    q, k, v = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]  # as one projection makes them
    agrees(q, k, v, is_causal=True)
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    agrees(*heads_first, is_causal=True, group=2)
    agrees(q[:, ::2], k[:, 1::2], v[:, 1::2])
    agrees(q[::-1], k[:, ::-1], v[:, :, ::-1])
    agrees(np.broadcast_to(q[:1], q.shape), k, v)


def test_inputs_are_never_copied_or_changed():
    """A gigabyte of keys of which a range of two is read: copying them would show."""
    import resource

    rows = 1 << 22
    k = np.lib.stride_tricks.as_strided(np.ones(64, np.float32), (1, rows, 1, 64), (0, 0, 0, 4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = ringattn.attention(np.zeros((1, 2, 1, 64), np.float32), k, k, key_range=(rows - 2, rows))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert np.array_equal(out, np.ones_like(out))
    assert grown < 64 << 20, f"memory grew by {grown >> 20} MiB for inputs of {k.nbytes >> 20} MiB"


def test_outputs_are_plain_arrays_of_the_input_type(rng):
    q, k, v = inputs(rng, dtype=np.float16)
    out, lse = ringattn.attention(q, k, v, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == np.float16 and out.shape == q.shape and out.flags.c_contiguous
    assert type(lse) is np.ndarray and lse.dtype == np.float32 and lse.shape == (2, 6, 20)
    assert isinstance(ringattn.attention(q, k, v), np.ndarray)


def test_bfloat16_of_ml_dtypes_is_supported(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes, NumPy's bfloat16, is not installed")
    q, k, v = inputs(rng, dtype=ml_dtypes.bfloat16)
    agrees(q, k, v, dtype="bfloat16")


def test_dlpack_objects_are_taken(rng):
    q, k, v = inputs(rng)
    out = ringattn.attention(Foreign(q), Foreign(k), Foreign(v), is_causal=True)
    assert np.array_equal(out, ringattn.attention(q, k, v, is_causal=True))
    assert np.array_equal(out, ringattn.attention(q, Foreign(k), v, is_causal=True))

    class Older(Foreign):
        def __dlpack__(self, stream=None):  # as before 2023
            return self.array.__dlpack__()

    assert np.array_equal(out, ringattn.attention(Older(q), Older(k), Older(v), is_causal=True))


def test_threads_and_kernels_change_rounding_only(rng):
    q, k, v = inputs(rng)
    for kernel in [found["name"] for found in ringattn.info()["kernels"] if found["available"]]:
        agrees(q, k, v, kernel=kernel, is_causal=True)
    assert np.array_equal(ringattn.attention(q, k, v, threads=1), ringattn.attention(q, k, v, threads=2))


def test_many_python_threads_may_call_at_once(rng):
    q, k, v = inputs(rng)
    expected, wrong = ringattn.attention(q, k, v, is_causal=True), []

    def work(number):
        for _ in range(20):
            if not np.array_equal(ringattn.attention(q, k, v, is_causal=True, group=1 + number % 2 * 0), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_can_call_too(rng):
    q, k, v = inputs(rng)
    expected = ringattn.attention(q, k, v, threads=2)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if np.array_equal(ringattn.attention(q, k, v, threads=2), expected) else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_like_reproduces_other_libraries(rng):
    q, k, v = inputs(rng, dim=4)
    pattern = {"segment_lengths": [4, 12], "dilation_rates": [1, 3], "dilate_queries": False}
    for name, settings in {
        "fkodom": {"combine": "heads", "offset": "branch"},
        "longnet": {"combine": "mix", "offset": "head"},
        "torchscale": {"combine": "mix", "offset": "head-block"},
        "strided": {"offset": "residue"},
    }.items():
        assert ringattn.like(name) == settings
        agrees(q, k, v, **pattern, **ringattn.like(name))
    agrees(q, k, v, **ringattn.like("dense"))


def test_stats_tell_of_the_latest_call(rng):
    q, k, v = inputs(rng)
    ringattn.attention(q, k, v)
    assert ringattn.stats()["bytes_sent"] == 0
    ringattn.attention(q, k, v, group=2, schedule="ring")
    ring = ringattn.stats()
    assert ring["bytes_sent"] == ring["bytes_received"] > 0 and len(ring["ranks"]) == 2
    assert ring["schedule"] == "ring" and ring["kernel"]
    plan = ringattn.describe(seq=20, heads=6, kv_heads=3, head_dim=8, batch=2, ranks=2, schedule="ring")
    assert [rank["bytes_sent"] for rank in ring["ranks"]] == [rank["bytes_sent"] for rank in plan]


def test_plans_and_buffers_are_reused_between_calls(rng):
    q, k, v = inputs(rng)
    x = inputs(rng, seq_q=9, seq_k=9)
    for _ in range(2):
        ringattn.attention(q, k, v, group=2)
        ringattn.attention(*x, group=2)
    before = ringattn.stats()
    for _ in range(3):
        ringattn.attention(q, k, v, group=2)
        ringattn.attention(*x, group=2)
    after = ringattn.stats()
    assert after["cache_misses"] == before["cache_misses"] and after["cache_hits"] > before["cache_hits"]
    assert after["pool_misses"] == before["pool_misses"]


def test_holes_warn_once_with_the_share_of_rows(rng):
    q, k, v = inputs(rng, seq_q=16, seq_k=16, heads=2, kv_heads=2)
    with pytest.warns(ringattn.HolesWarning, match=r"75\.0% of the query rows") as caught:
        ringattn.attention(q, k, v, segment_lengths=[16], dilation_rates=[4])
        ringattn.attention(q, k, v, segment_lengths=[16], dilation_rates=[4])
        ringattn.attention(q[:1], k[:1], v[:1], segment_lengths=[16], dilation_rates=[4], is_causal=True)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_pattern_without_holes_does_not_warn(rng, recwarn):
    q, k, v = inputs(rng)
    ringattn.attention(q, k, v, segment_lengths=[16], dilation_rates=[4], offset="residue")
    ringattn.attention(q, k, v, is_causal=True)
    ringattn.attention(q, k, v, key_range=(0, 0))
    assert not [warning for warning in recwarn if issubclass(warning.category, ringattn.HolesWarning)]


def test_describe_counts_what_the_definition_counts():
    for options in ({}, {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "combine": "mix"}):
        tables = reference.pairs(13, 13, 4, 2, is_causal=True, **options)
        plan = ringattn.describe(seq=13, heads=4, kv_heads=2, head_dim=8, ranks=3, is_causal=True, **options)
        assert sum(rank["pairs"] for rank in plan) == sum(table.sum() for table in tables)
        assert sum(rank["holes"] for rank in plan) == (sum(tables).sum(-1) == 0).sum()


def test_holes_that_are_too_many_to_count_are_estimated(recwarn):
    """Mixed branches of a very long sequence: the library declines to count, and the warning says "about"."""
    rows = 1 << 19
    x = np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (1, rows, 1, 4), (0, 0, 0, 4))
    pattern = {"segment_lengths": [0, 0, 0], "dilation_rates": [63, 64, 65], "combine": "mix", "window": (0, 0)}
    assert ringattn.describe(seq=rows, heads=1, head_dim=4, **pattern)[0]["holes"] == -1
    ringattn.attention(x, x, x, **pattern)
    (warning,) = [w for w in recwarn if issubclass(w.category, ringattn.HolesWarning)]
    assert str(warning.message).startswith("about 95.")
