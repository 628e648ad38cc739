"""CUDA tensors, where there is a GPU and the library has its kernels."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)
import ringattn  # noqa: E402
from conftest import Foreign  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import reference  # noqa: E402

DTYPES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}


def inputs(dtype, rows=300, dim=64):
    torch.manual_seed(0)
    return [torch.randn(2, rows, heads, dim, device="cuda", dtype=dtype, requires_grad=True) for heads in (8, 2, 2)]


def sdpa(q, k, v):
    """Causal attention in float64, with leaves of its own."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device="cuda").tril()
    heads_first = (x.transpose(1, 2) for x in wide)
    return scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2), wide


def unless_missing(call):
    """What a call gives; skips where the library says that it has no such kernel in this version."""
    try:
        return call()
    except ringattn.RingattnError as error:
        if error.status != "RA_NOT_AVAILABLE":
            raise
        pytest.skip(f"the library says: {error}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_those_of_sdpa(dtype):
    q, k, v = (x.detach() for x in inputs(dtype))
    out, lse = unless_missing(lambda: ringattn.attention(q, k, v, is_causal=True, return_lse=True))
    assert out.is_cuda and out.dtype == dtype and lse.is_cuda and lse.dtype == torch.float32
    assert (out.double() - sdpa(q, k, v)[0]).abs().max() < DTYPES[dtype] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_sdpa(dtype):
    q, k, v = inputs(dtype)
    theirs, wide = sdpa(q, k, v)
    dout = torch.randn_like(theirs)
    ours = unless_missing(lambda: torch.autograd.grad(ringattn.attention(q, k, v, is_causal=True), (q, k, v), dout.to(dtype)))
    for a, b in zip(ours, torch.autograd.grad(theirs, wide, dout)):
        assert (a.double() - b).abs().max() < DTYPES[dtype] * max(1.0, b.abs().max().item())


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
@pytest.mark.parametrize("combine, offset", [("heads", "branch"), ("mix", "head"), ("heads", "residue")])
def test_dilated_results_are_those_of_the_cpu(combine, offset):
    q, k, v = (x.detach() for x in inputs(torch.bfloat16))
    options = {"segment_lengths": [64, 256], "dilation_rates": [1, 4], "combine": combine, "offset": offset, "is_causal": True}
    found = unless_missing(lambda: ringattn.attention(q, k, v, **options)).cpu().float()
    expected = ringattn.attention(*(x.cpu().float() for x in (q, k, v)), **options)
    assert (found - expected).abs().max() < 2e-2


def test_strided_views_are_read_in_place():
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = packed.unbind(2)
    found = unless_missing(lambda: ringattn.attention(*views, is_causal=True))
    assert torch.equal(found, ringattn.attention(*(x.contiguous() for x in views), is_causal=True))


def test_in_process_ranks_on_one_gpu_equal_one_rank():
    q, k, v = (x.detach() for x in inputs(torch.bfloat16))
    ring = unless_missing(lambda: ringattn.attention(q, k, v, is_causal=True, group=4))
    assert (ring.float() - ringattn.attention(q, k, v, is_causal=True).float()).abs().max() < 3e-2


def test_work_runs_on_the_current_stream():
    q, k, v = (x.detach() for x in inputs(torch.bfloat16, rows=4096))
    stream = torch.cuda.Stream()
    expected = unless_missing(lambda: ringattn.attention(q, k, v))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        late = q + 0 * busy[0, 0].to(q.dtype)
        out = ringattn.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_compiled_attention_is_attention():
    q, k, v = (x.detach() for x in inputs(torch.bfloat16))
    expected = unless_missing(lambda: ringattn.attention(q, k, v, is_causal=True))
    compiled = torch.compile(lambda q, k, v: ringattn.attention(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)


def test_dlpack_exporters_on_the_device_are_taken():
    tensors = [x.detach() for x in inputs(torch.bfloat16)]
    out = unless_missing(lambda: ringattn.attention(*map(Foreign, tensors)))
    assert out.is_cuda and torch.equal(out, ringattn.attention(*tensors))


def test_modules_compute_in_the_recommended_type_of_the_device():
    module = ringattn.RingMultiheadDilatedAttention(64, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 100, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        out, _ = unless_missing(lambda: module(x, x, x, is_causal=True))
    assert out.is_cuda and out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    q, k, v = (x.detach() for x in inputs(torch.float32))
    found = ringattn.RingDilatedAttention()(q, k, v, is_causal=True)
    expected = reference.attention(*(x.cpu().double().numpy() for x in (q, k, v)), is_causal=True)["out"]
    assert found.dtype == torch.float32 and np.abs(found.cpu().double().numpy() - expected).max() < 8e-2


def test_mixed_devices_raise():
    q, k, v = inputs(torch.float32)
    with pytest.raises(ValueError, match="one device"):
        ringattn.attention(q, k.cpu(), v)
