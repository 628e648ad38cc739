"""Wrong arguments raise, with a sentence that names them; nothing is silently ignored."""

import pickle
import warnings

import numpy as np
import pytest
import ringattn
from ringattn import _lib

X = np.zeros((1, 8, 4, 8), np.float32)


def refused(match, q=X, k=X, v=X, error=ValueError, **options):
    with pytest.raises(error, match=match):
        ringattn.attention(q, k, v, **options)


def test_flags_may_be_of_any_kind_that_is_true_or_false():
    causal, dense = (ringattn.attention(X + 1, X, X, is_causal=flag, return_lse=True)[1] for flag in (True, False))
    for flag in (1, np.True_, np.array([True])):
        assert np.array_equal(ringattn.attention(X + 1, X, X, is_causal=flag, return_lse=True)[1], causal)
    for flag in (0, None, np.False_):
        assert np.array_equal(ringattn.attention(X + 1, X, X, is_causal=flag, return_lse=True)[1], dense)


def test_an_array_that_is_not_aligned_is_called_by_its_name():
    crooked = np.frombuffer(bytes(X.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(X.shape)
    refused("query is not aligned to its elements of 4 bytes", q=crooked)
    refused("value is not aligned to its elements of 4 bytes", v=crooked)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"segment_lengths": [8]}, "dilation_rates is missing"),
        ({"dilation_rates": [1]}, "segment_lengths is missing"),
        ({"segment_lengths": [8, 8], "dilation_rates": [1]}, "2 entries and dilation_rates 1"),
        ({"segment_lengths": [8.5], "dilation_rates": [1]}, "segment_lengths .* list of integers"),
        ({"segment_lengths": 8, "dilation_rates": 1}, "segment_lengths .* list of integers"),
        ({"segment_lengths": [-1], "dilation_rates": [1]}, "segment_lengths"),
        ({"segment_lengths": [8], "dilation_rates": [0]}, "dilation_rates"),
        ({"segment_lengths": [8] * 5, "dilation_rates": [1] * 5}, "mix"),
        ({"window": 3}, "window"),
        ({"window": (1, 2, 3)}, "window"),
        ({"window": (-2, 0)}, "window"),
        ({"window": (2**64, 0)}, "window is 18446744073709551616; it must fit into 64 bits"),
        ({"window": (0, -(2**64) - 1)}, "window is -18446744073709551617; it must fit into 64 bits"),
        ({"segment_lengths": [2**64 + 8], "dilation_rates": [1]}, "segment_lengths .* 64 bits"),
        ({"segment_lengths": [8], "dilation_rates": [2**64 + 1]}, "dilation_rates .* 64 bits"),
        ({"key_range": (0, 2**64 + 8)}, "key_range .* 64 bits"),
        ({"bucket": 2**64 + 4}, "bucket"),
        ({"threads": 2**32 + 1}, "threads"),
        ({"key_range": (0, 9)}, "key"),
        ({"key_range": (3, 2)}, "key"),
        ({"key_range": [[0, 1], [0, 1]]}, "2 entries for a batch of 1"),
        ({"key_range": "all"}, "key_range"),
        ({"key_range": 5}, "key_range is 5; it must be a pair"),
        ({"key_range": np.ones((1, 2), bool)}, "key_range is array.*it must be a pair"),  # a mask of two keys
        ({"is_causal": "False"}, "is_causal is 'False'; it must be True or False"),
        ({"is_causal": np.array([True, False])}, "is_causal is array.*it must be True or False"),
        ({"dilate_queries": [False]}, "dilate_queries is .*it must be True or False"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": "large"}, "scale"),
        ({"dropout_p": 1.0}, "dropout"),
        ({"dropout_p": -0.1}, "dropout"),
        ({"dropout_p": 0.1, "seed": 1.5}, "seed"),
        ({"dropout_p": 0.1, "seed": 2**64}, "64 bits"),
        ({"combine": "sum"}, "combine is 'sum'; it must be one of heads, mix"),
        ({"offset": "none"}, "offset .* branch, head, head-block, residue"),
        ({"layout": "auto"}, "layout .* contiguous, zigzag, striped"),
        ({"query_placement": "both"}, "query_placement"),
        ({"schedule": "merge", "group": 2}, "merge"),
        ({"schedule": "fast"}, "schedule"),
        ({"bucket": -1}, "bucket"),
        ({"threads": -1}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -3.0}, "timeout"),
        ({"call_timeout": 0}, "call_timeout"),
        ({"call_timeout": -3.0}, "call_timeout"),
        ({"kernel": 5}, "kernel"),
        ({"group": 0}, "group"),
        ({"group": -100}, "no member"),
        ({"group": True}, "group"),
        ({"group": 2.0}, "group"),
        ({"group": "world"}, "group"),
    ],
)
def test_a_wrong_option_is_named(options, match):
    refused(match, **options)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"attn_mask": np.zeros((8, 8))}, "attn_mask is not supported: .*is_causal, window, key_range"),
        ({"attention_mask": np.ones((8, 8), bool)}, "attention_mask is not supported"),
        ({"attn_bias": 1.0}, "attn_bias is not supported"),
        ({"need_weights": True}, "need_weights is not supported: the weights are never formed"),
        ({"softcap": 30.0}, "softcap is not supported"),
        ({"sinks": [0.0]}, "sinks is not supported"),
        ({"cu_seqlens": [0, 4, 8]}, "cu_seqlens is not supported"),
        ({"causal": True}, "causal is called is_causal here"),
        ({"softmax_scale": 0.5}, "softmax_scale is called scale here"),
        ({"softmax_scale": 0.0}, "softmax_scale is called scale here"),  # no default: it makes all scores equal
        ({"window_size": (3, 0)}, r"window_size is called window=\(left, right\) here"),
        ({"dropout": 0.1}, "dropout is called dropout_p here"),
        ({"key_padding_mask": np.zeros((1, 8), bool)}, "key_padding_mask is called key_range"),
        ({"alibi_slopes": np.ones(4)}, "alibi_slopes is not supported"),
        ({"return_attn_probs": True}, "return_attn_probs is not supported: .*return_lse"),
    ],
)
def test_an_argument_that_is_not_supported_raises_with_the_reason(options, match):
    refused(match, **options)


def test_an_argument_that_asks_for_nothing_is_taken_and_an_unknown_one_is_a_type_error():
    off = {
        "attn_mask": None,
        "need_weights": False,
        "causal": False,
        "softmax_scale": None,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_attn_probs": False,
        "dropout": 0,
    }
    for either in (False, True):
        found = ringattn.attention(X, X, X, **off, deterministic=either, enable_gqa=either)
        assert np.array_equal(found, ringattn.attention(X, X, X))
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_casual'"):
        ringattn.attention(X, X, X, is_casual=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_casual'"):
        ringattn.describe(seq=8, heads=1, head_dim=8, is_casual=True)


@pytest.mark.parametrize(
    "q, k, v, match",
    [
        (X[0], X, X, r"query has shape \(8, 4, 8\)"),
        (X, X[..., None], X, "key has shape"),
        (X, X, X[:, :7], r"key has shape .* and value"),
        (X, X[..., :4], X[..., :4], "head dim"),
        (X[:0], X, X, "batch"),
        (X, X[:, :, :3], X[:, :, :3], "multiple"),
        (X, X[:, :, :0], X[:, :, :0], "multiple"),
        (X, X.astype(np.float64), X, "dtypes"),
        (X.astype(np.int32), X.astype(np.int32), X.astype(np.int32), "float32, float16, bfloat16"),
        (X.astype(np.float32).astype(">f4"), X.astype(">f4"), X.astype(">f4"), "dtype"),
        (X.tolist(), X, X, "query is a list"),
        (X, None, X, "key is a NoneType"),
        (X, np.ma.masked_array(X), X, "key is a masked array"),
    ],
)
def test_tensors_that_do_not_fit_are_named(q, k, v, match):
    refused(match, q, k, v)


def test_a_strided_last_dimension_is_refused():
    refused("last dimension of query", X[..., ::2], X[..., ::2], X[..., ::2])


def test_head_dims_over_256_are_refused_by_the_library():
    wide = np.zeros((1, 2, 1, 257), np.float32)
    refused("head_dim.*256", wide, wide, wide)


def test_a_missing_kernel_is_a_runtime_error_with_its_name():
    with pytest.raises(RuntimeError, match="no-such-kernel") as caught:
        ringattn.attention(X, X, X, kernel="no-such-kernel")
    assert caught.value.status == "RA_NOT_AVAILABLE"
    assert isinstance(caught.value, ringattn.RingattnError)


def test_an_error_in_a_ring_is_the_one_that_caused_it_and_does_not_stick():
    with pytest.raises(RuntimeError, match="no-such-kernel"):
        ringattn.attention(X, X, X, kernel="no-such-kernel", group=3)
    assert ringattn.attention(X, X, X, group=3).shape == X.shape


@pytest.mark.parametrize(
    "sizes, match",
    [
        ({"seq": 2**64 + 8}, "seq_q is .* 64 bits"),
        ({"seq_q": 2**64 + 8}, "seq_q .* 64 bits"),
        ({"heads": 2**64 + 1}, "heads .* 64 bits"),
        ({"kv_heads": 2**64 + 1}, "heads .* 64 bits"),
        ({"head_dim": 2**64 + 8}, "head_dim .* 64 bits"),
        ({"batch": 2**64 + 1}, "batch .* 64 bits"),
        ({"batch": 1.5}, "batch is 1.5; it must be an integer"),
        ({"ranks": 2**32 + 2}, "ranks .* 32 bits"),
    ],
)
def test_sizes_of_a_description_that_do_not_fit_are_named(sizes, match):
    with pytest.raises(ValueError, match=match):
        ringattn.describe(**{"seq": 8, "heads": 1, "head_dim": 8, **sizes})


def test_every_integer_that_is_handed_to_the_library_is_checked():
    for struct in (_lib.Desc, _lib.Rows, _lib.Shard, _lib.Summary, _lib.Meeting, _lib.Stats, _lib.CommOps):
        for name, kind in struct._fields_:
            if kind in _lib._RANGE:
                least, bits = _lib._RANGE[kind]
                for wrong in (least - 1, least + 2**bits):
                    with pytest.raises(ValueError, match="must fit into"):
                        setattr(struct(), name, wrong)
                setattr(struct(), name, least)
    for name, (_, arguments) in _lib._FUNCTIONS.items():
        for index, kind in enumerate(arguments):
            if kind in _lib._RANGE:
                with pytest.raises(ValueError, match=f"{name} is .* must fit into"):
                    getattr(_lib.lib, name).argtypes[index].from_param(2**64)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_settings_in_arrays_that_change_are_read_in_each_call(kind, rng):
    array = np.array if kind == "numpy" else pytest.importorskip("torch").tensor
    q, k, v = rng.standard_normal((3, 1, 16, 2, 8), dtype=np.float32)
    for name, numbers, others in (
        ("scale", (0.5, 2.0), {}),
        ("is_causal", (True, False), {}),
        ("dropout_p", (0.5, 0.0), {"seed": 1}),
        ("segment_lengths", (4, 8), {"dilation_rates": (1,)}),
    ):
        place = array(numbers[0])
        for number in numbers:
            place[...] = number
            given, plain = ((place,), (number,)) if name == "segment_lengths" else (place, number)
            found = ringattn.attention(q, k, v, **{name: given}, **others)
            assert np.array_equal(found, ringattn.attention(q, k, v, **{name: plain}, **others)), name


def test_a_setting_that_wants_a_gradient_is_refused():
    torch = pytest.importorskip("torch")
    scale, x = torch.tensor(0.5, requires_grad=True), torch.ones(1, 8, 2, 4)
    for call in (lambda: ringattn.attention(x, x, x, scale=scale), lambda: ringattn.RingDilatedAttention(scale=scale)):
        with pytest.raises(ValueError, match="scale requires a gradient.*multiply query"):
            call()


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_nested_tensors_are_refused_with_a_remedy():
    torch = pytest.importorskip("torch")
    parts = [torch.ones(5, 2, 8), torch.ones(3, 2, 8)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout)
        with pytest.raises(ValueError, match="nested.*key_range"):
            ringattn.attention(x, x, x)
    with pytest.raises(ValueError, match="enable_nested_tensor=False"):
        ringattn.RingMultiheadDilatedAttention(16, 2)(torch.nested.nested_tensor([part.flatten(1) for part in parts]))


def test_an_error_gets_out_of_a_worker_process(rng):
    x = rng.standard_normal((1, 8, 2, 4), dtype=np.float32)
    with pytest.raises(ringattn.RingattnError) as caught:
        ringattn.attention(x, x, x, kernel="abacus")
    found = pickle.loads(pickle.dumps(caught.value))
    assert (type(found), str(found)) == (ringattn.RingattnError, str(caught.value)) and found.status == "RA_NOT_AVAILABLE"


def test_tensors_with_heads_first_are_warned_about_once():
    swapped = np.zeros((1, 64, 8, 4), np.float32).swapaxes(1, 2)
    few = np.zeros((1, 8, 63, 4), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ringattn.attention(swapped.swapaxes(1, 2), *[swapped.swapaxes(1, 2)] * 2)  # 64 rows of 8 heads
        ringattn.attention(few, few, few)
        ringattn.attention(swapped[:, :1], swapped, swapped)  # a step of decoding
    with pytest.warns(UserWarning, match=r"8 rows of 64 heads.*ringattn.sdpa") as caught:
        ringattn.attention(swapped, swapped, swapped)
        ringattn.attention(swapped, swapped, swapped)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_like_describe_draw_and_dtype_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="longnet"):
        ringattn.like("LongNet")
    with pytest.raises(ValueError, match="dtype"):
        ringattn.describe(seq=8, heads=1, head_dim=8, dtype="float8")
    with pytest.raises(ValueError, match="ranks is 0"):
        ringattn.describe(seq=8, heads=1, head_dim=8, ranks=0)
    with pytest.raises(ValueError, match="device"):
        ringattn.recommended_dtype("tpu")
    with pytest.raises(ValueError, match="2048"):
        ringattn.draw(4096)
