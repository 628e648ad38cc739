"""CUDA tensors, where there is a GPU and the library has its kernels."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)
import ringattn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402


def inputs(dtype, rows=300, dim=64):
    torch.manual_seed(0)
    return [torch.randn(2, rows, heads, dim, device="cuda", dtype=dtype, requires_grad=True) for heads in (8, 2, 2)]


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 2e-5)])
def test_results_and_gradients_are_those_of_sdpa(dtype, bound):
    q, k, v = inputs(dtype)
    out = ringattn.attention(q, k, v, is_causal=True)
    mask = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    theirs = scaled_dot_product_attention(*(x.transpose(1, 2) for x in wide), attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert (out.double() - theirs).abs().max() < bound * 4
    dout = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout.to(dtype)), torch.autograd.grad(theirs, wide, dout)):
        assert (a.double() - b).abs().max() < bound * max(1.0, b.abs().max().item())


def test_in_process_ranks_on_one_gpu_equal_one_rank():
    q, k, v = (x.detach() for x in inputs(torch.bfloat16))
    ring = ringattn.attention(q, k, v, is_causal=True, group=4)
    assert (ring.float() - ringattn.attention(q, k, v, is_causal=True).float()).abs().max() < 3e-2


def test_work_runs_on_the_current_stream():
    q, k, v = (x.detach() for x in inputs(torch.bfloat16, rows=4096))
    stream = torch.cuda.Stream()
    expected = ringattn.attention(q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        late = q + 0 * busy[0, 0].to(q.dtype)
        out = ringattn.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_mixed_devices_raise():
    q, k, v = inputs(torch.float32)
    with pytest.raises(ValueError, match="one device"):
        ringattn.attention(q, k.cpu(), v)
