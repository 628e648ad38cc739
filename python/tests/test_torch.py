"""ringattn.attention on torch tensors: results, gradients, and the ways in which PyTorch calls it."""

import math
import os

import numpy as np
import pytest
import ringattn
import torch
from conftest import Foreign
from torch.nn.functional import scaled_dot_product_attention

import reference

BRANCHES = {"segment_lengths": [8, 16, 0], "dilation_rates": [1, 2, 3]}
RESULTS = ("out", "lse", "dq", "dk", "dv")


def inputs(batch=2, seq_q=20, seq_k=20, heads=6, kv_heads=3, dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq_q, heads, dim), (batch, seq_k, kv_heads, dim), (batch, seq_k, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def everything(q, k, v, dlse=True, **options):
    """Results and gradients of one call with random gradients of out and lse."""
    generator = torch.Generator().manual_seed(1)
    out, lse = ringattn.attention(q, k, v, return_lse=True, **options)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    weight = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
    if dlse:
        weight = torch.where(torch.isinf(lse.detach()), torch.zeros_like(weight), weight)
        loss = (out * dout).sum() + torch.where(torch.isinf(lse), torch.zeros_like(lse), lse * weight).sum()
        gradients = torch.autograd.grad(loss, (q, k, v))
    else:
        weight, gradients = None, torch.autograd.grad(out, (q, k, v), dout)
    found = dict(zip(RESULTS, (out.detach(), lse.detach(), *gradients)))
    return found, dout, weight


def agrees(q, k, v, dtype="float32", dlse=True, **options):
    found, dout, weight = everything(q, k, v, dlse, **options)
    for name in ("group", "layout", "query_placement", "schedule", "bucket", "threads", "kernel"):
        options.pop(name, None)
    as64 = [x.detach().double().numpy() for x in (q, k, v, dout)]
    expected = reference.attention(*as64, dlse=None if weight is None else weight.numpy(), **options)
    for name in RESULTS:
        bound = dtype
        reference.assert_close(found[name].double().numpy(), expected, name, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_those_of_the_definition(dtype):
    name = str(dtype).split(".")[1]
    agrees(*inputs(dtype=dtype), dtype=name, dlse=name.startswith("float") and name != "float16")
    agrees(*inputs(dtype=dtype), dtype=name, dlse=False, is_causal=True)


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
@pytest.mark.parametrize("dilate_queries", [True, False])
@pytest.mark.parametrize("offset", ["branch", "head", "head-block", "residue"])
@pytest.mark.parametrize("combine", ["heads", "mix"])
def test_gradients_of_every_dilated_mode_are_those_of_the_definition(combine, offset, dilate_queries):
    agrees(*inputs(), **BRANCHES, combine=combine, offset=offset, dilate_queries=dilate_queries, is_causal=True)
    agrees(*inputs(seq_q=9, seq_k=17), **BRANCHES, combine=combine, offset=offset, dilate_queries=dilate_queries, window=(7, 5))


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
@pytest.mark.parametrize(
    "placement, schedule", [("sharded", "ring"), ("sharded", "gather"), ("replicated", "ring"), ("replicated", "merge")]
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_gradients_of_in_process_ranks_are_those_of_the_definition(layout, placement, schedule):
    for group in (2, 3):
        agrees(
            *inputs(seq_q=21, seq_k=23),
            **BRANCHES,
            combine="mix",
            is_causal=True,
            group=group,
            layout=layout,
            query_placement=placement,
            schedule=schedule,
        )


def test_dropout_is_the_same_forward_and_backward_and_on_any_ranks():
    for group in (None, 3):
        agrees(*inputs(), dropout_p=0.3, seed=99, is_causal=True, group=group)


def bottom_right(seq_q, seq_k):
    return torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q)


@pytest.mark.parametrize(
    "seq_q, seq_k, heads, kv_heads, is_causal",
    [(33, 33, 4, 4, False), (33, 33, 4, 4, True), (17, 40, 4, 4, True), (32, 32, 8, 2, True), (1, 50, 4, 1, True)],
)
def test_dense_results_and_gradients_are_those_of_sdpa(seq_q, seq_k, heads, kv_heads, is_causal):
    q, k, v = inputs(seq_q=seq_q, seq_k=seq_k, heads=heads, kv_heads=kv_heads, dim=16)
    out = ringattn.attention(q, k, v, is_causal=is_causal)
    mask = bottom_right(seq_q, seq_k) if is_causal else None  # sdpa's own is_causal aligns unequal lengths at the top left
    if heads != kv_heads and torch.__version__ < "2.5":
        pytest.skip("this version's sdpa has no grouped heads")
    shared = {"enable_gqa": True} if heads != kv_heads else {}
    theirs = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, **shared).transpose(1, 2)
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=2e-6)
    dout = torch.randn_like(out)
    for ours, their in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(theirs, (q, k, v), dout)):
        torch.testing.assert_close(ours, their, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "window": (3, -1)},
        {**BRANCHES, "combine": "mix", "dilate_queries": False},
        {"key_range": [[0, 4], [2, 6]]},
        {"dropout_p": 0.4, "seed": 3},
        {"is_causal": True, "group": 2},
    ],
)
def test_gradcheck_passes_in_float64(options):
    q, k, v = inputs(seq_q=6, seq_k=7, heads=3, kv_heads=3, dim=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: ringattn.attention(*x, return_lse=True, **options), (q, k, v))


def test_rows_without_keys_are_zero_and_pass_no_gradient():
    q, k, v = inputs(seq_q=4, seq_k=4)
    out, lse = ringattn.attention(q, k, v, key_range=[[0, 0], [1, 3]], is_causal=True, return_lse=True)
    assert torch.isneginf(lse[0]).all() and torch.isneginf(lse[1, :, 0]).all() and not out[0].any()
    out.sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all() and not x.grad[0].any()


def test_results_combine_outside_through_lse():
    """Two halves of the keys, merged by their lse in torch, give the whole: forward and gradient."""
    q, k, v = inputs(dtype=torch.float64)
    halves = [ringattn.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 9), slice(9, None))]
    lse = torch.stack([half[1] for half in halves])
    weights = torch.softmax(lse, 0).transpose(2, 3)[..., None]
    merged = sum(weight * half[0] for weight, half in zip(weights, halves))
    whole = ringattn.attention(q, k, v)
    torch.testing.assert_close(merged, whole)
    dout = torch.randn_like(whole)
    for ours, their in zip(torch.autograd.grad(merged, (q, k, v), dout), torch.autograd.grad(whole, (q, k, v), dout)):
        torch.testing.assert_close(ours, their)


def test_only_lse_may_be_differentiated():
    q, k, v = inputs(dtype=torch.float64)
    _, lse = ringattn.attention(q, k, v, return_lse=True)
    ours = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) / math.sqrt(8)
    for a, b in zip(ours, torch.autograd.grad(torch.logsumexp(scores, -1).sum(), (q, k))):
        torch.testing.assert_close(a, b)


def test_gradients_that_are_expanded_views_are_read_right():
    q, k, v = inputs(dtype=torch.float64)
    ours = torch.autograd.grad(ringattn.attention(q, k, v).sum(), (q, k, v))
    dense = ringattn.attention(q, k, v)
    for a, b in zip(ours, torch.autograd.grad(dense, (q, k, v), torch.ones_like(dense))):
        assert torch.equal(a, b)


def test_strided_views_are_read_in_place():
    packed = torch.randn(2, 20, 3, 4, 8)
    views = packed.unbind(2)
    copies = [x.contiguous() for x in views]
    assert torch.equal(ringattn.attention(*views, is_causal=True), ringattn.attention(*copies, is_causal=True))
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in copies]
    assert torch.equal(
        ringattn.attention(*heads_first, is_causal=True, group=2), ringattn.attention(*copies, is_causal=True, group=2)
    )


@pytest.mark.parametrize("requires_grad", [False, True])
def test_inputs_and_outputs_are_never_copied(requires_grad, monkeypatch):
    from ringattn import _engine

    calls = []
    plain = _engine.Alone.run
    monkeypatch.setattr(_engine.Alone, "run", lambda self, *call: (calls.append((call[0], call[5])), plain(self, *call)))
    packed = torch.randn(2, 4, 20, 3, 8, requires_grad=requires_grad)
    views = packed.transpose(1, 2).unbind(3)
    out, lse = ringattn.attention(*views, is_causal=True, return_lse=True)
    dout = torch.randn(2, 4, 20, 8).transpose(1, 2)
    if requires_grad:
        out.backward(dout)
    expected = ["forward_with_gradient", "backward"] if requires_grad else ["forward"]
    assert [name for name, _ in calls] == expected
    for _, tensors in calls:
        for tensor, (address, *strides) in zip((*views, out), tensors):
            assert address == tensor.data_ptr() and tuple(strides) == tensor.stride()[:3]
        assert tensors[4][0] == lse.data_ptr()
    if requires_grad:
        address, *strides = calls[1][1][5]
        assert address == dout.data_ptr() and tuple(strides) == dout.stride()[:3]


def test_tensors_whose_signs_are_turned_lazily_are_read_right():
    q, k, v = inputs(dim=1)
    turned = torch._neg_view(q.detach())
    assert turned.is_neg()
    assert torch.equal(ringattn.attention(turned, k, v), ringattn.attention(-q, k, v))


def test_gradients_whose_signs_are_turned_lazily_are_read_right():
    q, k, v = inputs()
    out, lse = ringattn.attention(q, k, v, return_lse=True)
    for result in (out, lse):
        turned = torch._neg_view(torch.ones_like(result))
        found = torch.autograd.grad(result, (q, k), turned, retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(result, (q, k), -torch.ones_like(result), retain_graph=True)
        for one, other in zip(found, expected):
            assert torch.equal(one, other)


def test_saved_tensors_that_come_back_with_other_strides_are_read_right():
    def turned(x):  # as a hook that compresses or moves what is saved may do
        return x.detach().transpose(-1, -2).contiguous().transpose(-1, -2)

    found, expected = [], []
    for hooks, gradients in (((turned, turned), found), ((lambda x: x, lambda x: x), expected)):
        q, k, v = inputs()
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out, lse = ringattn.attention(q, k, v, is_causal=True, return_lse=True)
        (out.square().sum() + lse.square().sum()).backward()
        gradients += [q.grad, k.grad, v.grad]
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_saved_tensors_that_come_back_in_another_type_are_refused():
    q, k, v = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.bfloat16(), lambda x: x):
        out = ringattn.attention(q, k, v)
    with pytest.raises(RuntimeError, match="a hook of saved tensors gave back"):
        out.sum().backward()


def test_tensors_of_our_own_are_on_the_cpu_whatever_the_default_device():
    module = ringattn.RingMultiheadDilatedAttention(16, 4)
    x, padding = torch.randn(2, 9, 16), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    q, k, v = inputs()

    def results():
        out = ringattn.attention(q, k, v, group=2, key_range=[(0, 9), (3, 20)], dropout_p=0.25, seed=7)
        cache = ringattn.KVCache()
        cache.append(k, v)
        return [
            out,
            *torch.autograd.grad(out.square().sum(), (q, k, v)),
            cache.attention(q[:, -1:]),
            module(x, key_padding_mask=padding)[0],
            torch.tensor(bool(ringattn.check(module, x, 2)), device="cpu"),
        ]

    expected = results()
    with torch.device("meta"):  # as torch.set_default_device; a tensor that is made here has no values
        found = results()
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = inputs()
    k, v = k.detach(), v.detach()
    ringattn.attention(q, k, v).sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is None


def test_no_grad_saves_nothing():
    q, k, v = inputs()
    with torch.no_grad():
        out, lse = ringattn.attention(q, k, v, return_lse=True)
    assert out.grad_fn is None and lse.grad_fn is None
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        with torch.no_grad():
            ringattn.attention(q, k, v)
        ringattn.attention(q.detach(), k.detach(), v.detach())
        assert not packed
        ringattn.attention(q, k, v)
        assert packed


def test_autocast_computes_in_its_type_and_returns_gradients_in_the_inputs_type():
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ringattn.attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ringattn.attention(*(x.bfloat16() for x in (q, k, v)), is_causal=True))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ringattn.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
        for dtype in (torch.int64, torch.complex64):  # torch casts neither
            with pytest.raises(ValueError, match=f"query has dtype {dtype}"):
                ringattn.attention(*(x.detach().to(dtype) for x in (q, k, v)))


def test_checkpointing_gives_the_same_gradients_dropout_included():
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs()

    def attend(q, k, v):
        return ringattn.attention(q, k, v, dropout_p=0.5, is_causal=True)

    torch.manual_seed(4)
    plain = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    for reentrant in (False, True):
        torch.manual_seed(4)
        again = (
            torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=reentrant).square().sum(), (q, k, v))
            if not reentrant
            else None
        )
        if reentrant:  # the old way supports backward() alone
            for x in (q, k, v):
                x.grad = None
            checkpoint(attend, q, k, v, use_reentrant=True).square().sum().backward()
            again = [x.grad for x in (q, k, v)]
        for a, b in zip(plain, again):
            assert torch.equal(a, b)


def test_dropout_without_a_seed_follows_torchs_generator():
    q, k, v = inputs()
    torch.manual_seed(1)
    first, second = (ringattn.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, ringattn.attention(q, k, v, dropout_p=0.5)) and not torch.equal(first, second)


def test_a_seed_in_a_tensor_is_one_integer_of_any_size():
    q, k, v = inputs()
    seeded = [ringattn.attention(q, k, v, dropout_p=0.5, seed=seed) for seed in (torch.tensor([-1]), 2**64 - 1)]
    assert torch.equal(*seeded)
    for seed in (torch.tensor(3.7), torch.tensor([3, 4])):
        with pytest.raises(ValueError, match="seed is .*; it must be an integer"):
            ringattn.attention(q, k, v, dropout_p=0.5, seed=seed)


def test_a_second_derivative_is_refused_instead_of_zero():
    q, k, v = inputs(dtype=torch.float64)
    (gradient,) = torch.autograd.grad(ringattn.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="ringattn"):
        torch.autograd.grad(gradient.sum(), q)


def test_the_same_call_twice_gives_the_same_bits():
    q, k, v = inputs(seq_q=50, seq_k=50)
    first, second = (everything(q, k, v, is_causal=True, group=2)[0] for _ in range(2))
    for name in RESULTS:
        assert torch.equal(first[name], second[name])


def test_dlpack_exporters_of_bfloat16_come_back_as_torch_tensors():
    tensors = [x.detach().bfloat16() for x in inputs()]
    out = ringattn.attention(*map(Foreign, tensors))
    assert isinstance(out, torch.Tensor) and torch.equal(out, ringattn.attention(*tensors))


def test_numpy_and_torch_agree_bit_by_bit():
    q, k, v = (x.detach() for x in inputs())
    assert np.array_equal(ringattn.attention(q, k, v).numpy(), ringattn.attention(q.numpy(), k.numpy(), v.numpy()))


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda q, k, v: (q, k.to("meta"), v), "one device"),
        (lambda q, k, v: (q, k.double(), v), "dtypes"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "float32, bfloat16, float16"),
        (lambda q, k, v: (q, k.detach().numpy(), v), "all be torch tensors"),
        (lambda q, k, v: (q[0], k, v), "query has shape"),
        (lambda q, k, v: (q[..., ::2], k[..., ::2], v[..., ::2]), "last dimension of query"),
        (lambda q, k, v: (torch.zeros(1, 2, 1, 257), torch.zeros(1, 2, 1, 257), torch.zeros(1, 2, 1, 257)), "256"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_the_reason(change, match):
    with pytest.raises(ValueError, match=match):
        ringattn.attention(*change(*inputs()))


def test_meta_tensors_give_shapes():
    out, lse = ringattn.attention(*(x.to("meta") for x in inputs()), return_lse=True)
    assert out.is_meta and out.shape == (2, 20, 6, 8) and lse.shape == (2, 6, 20)


def test_meta_tensors_that_do_not_fit_are_refused():
    q, k, v = (x.to("meta") for x in inputs())
    with pytest.raises(ValueError, match="batch and head dim must be equal"):
        ringattn.attention(q, k[..., :4], v[..., :4])


def cuda_problem():
    """What a call with CUDA tensors would ask the library for."""
    from ringattn import _config, _lib

    shape = _config.Shape(_lib.F32, _lib.CUDA, 1, 8, 8, 2, 2, 16)
    return _config.problem_for(_config.make_options(_config.Settings()), shape)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_cuda_device_the_library_says_so():
    from ringattn import _devices, _engine

    with pytest.raises(ringattn.RingattnError, match="GPU|CUDA") as caught:
        _engine.alone(_devices.CPU).plan(cuda_problem(), 0, None, None)
    assert caught.value.status == "RA_NOT_AVAILABLE"


def flags_of(address):
    """What the system notes about the mapping that holds an address."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            bounds = line.split(" ", 1)[0].split("-")
            if len(bounds) == 2:
                inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    return []


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="this system has one size of pages")
def test_large_results_ask_for_large_pages():
    q, k, v = (torch.randn(1, 8192, 4, 64, requires_grad=True) for _ in range(3))  # 8 MiB each
    out = ringattn.attention(q, k, v, segment_lengths=[64], dilation_rates=[1])
    for result in (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))):
        assert "hg" in flags_of(result.data_ptr() + result.nbytes // 2)


def test_a_tensor_that_is_not_aligned_is_called_by_its_name():
    x = torch.zeros(1, 8, 4, 8)
    crooked = torch.frombuffer(bytearray(x.nbytes + 1), dtype=torch.float32, offset=1, count=x.numel()).view(x.shape)
    with pytest.raises(ValueError, match="key is not aligned to its elements of 4 bytes"):
        ringattn.attention(x, crooked, x)
