"""CUDA calls among streams: asynchronous, captured in graphs, beside each other; and the pairs that dropout drops there."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)
import ringattn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")


def inputs(dtype, rows=300, dim=64):
    torch.manual_seed(0)
    return [torch.randn(2, rows, heads, dim, device="cuda", dtype=dtype) for heads in (8, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pattern", [{}, {"segment_lengths": (32,), "dilation_rates": (2,)}])
def test_dropout_drops_the_same_pairs_as_on_the_cpu(dtype, pattern):
    """Queries of zeros weigh all keys alike and values of an identity show each pair in a column of its own."""
    q = torch.zeros(2, 64, 4, 64, dtype=dtype)
    k, v = torch.zeros(2, 64, 2, 64, dtype=dtype), torch.eye(64, dtype=dtype)[None, :, None].repeat(2, 1, 2, 1)
    kept = [
        ringattn.attention(q.to(d), k.to(d), v.to(d), dropout_p=0.3, seed=2**40 + 5, **pattern).cpu() != 0
        for d in ("cuda", "cpu")
    ]
    assert torch.equal(*kept)
    assert 0 < kept[0].sum() < (kept[0] | True).sum()


def test_a_gradient_that_cannot_be_computed_is_refused_before_anything_runs(monkeypatch):
    q, k, v = (x.requires_grad_() for x in inputs(torch.bfloat16, dim=40))
    monkeypatch.setenv("RINGATTN_KERNEL", "sm90a")
    with torch.no_grad():
        try:
            ringattn.attention(q, k, v)
        except ringattn.RingattnError:
            pytest.skip("the forward pass needs a Hopper GPU, too")
    try:
        out = ringattn.attention(q, k, v)
    except ringattn.RingattnError as error:
        assert "cannot compute gradients" in str(error)
    else:  # then backward runs
        out.sum().backward()
        assert torch.isfinite(q.grad).all()


PATTERNS = [
    {"is_causal": True},
    {"segment_lengths": (64, 128), "dilation_rates": (1, 2), "is_causal": True},
    {"combine": "mix", "segment_lengths": (64, 128), "dilation_rates": (2, 4)},
    {"segment_lengths": (32,), "dilation_rates": (2,), "dropout_p": 0.3, "seed": 2**40 + 5},
    {"window": (50, 0)},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("more", PATTERNS)
def test_gradients_are_those_of_the_cpu_and_the_same_bits_every_time(dtype, more):
    tensors = inputs(dtype)
    dout = torch.randn(2, 300, 8, 64, device="cuda", dtype=dtype)
    dlse = torch.randn(2, 8, 300, device="cuda")

    def gradients(device, kind):
        leaves = [x.to(device, kind).requires_grad_() for x in tensors]
        out, lse = ringattn.attention(*leaves, **more, return_lse=True)
        given = (torch.where(torch.isinf(lse), 0.0, lse), dlse.to(device))
        return torch.autograd.grad((out, given[0]), leaves, (dout.to(device, kind), given[1]))

    first = gradients("cuda", dtype)
    for _ in range(3):
        for a, b in zip(first, gradients("cuda", dtype)):
            assert torch.equal(a, b)
    bound = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for a, b in zip(first, gradients("cpu", torch.float32)):
        assert (a.cpu().float() - b).abs().max() <= bound * 4 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("more", PATTERNS[:3])
def test_a_captured_training_step_replays_on_new_data(more):
    q, k, v = (x.requires_grad_() for x in inputs(torch.bfloat16, rows=512))
    dout = torch.randn_like(q)

    def step():
        return torch.autograd.grad(ringattn.attention(q, k, v, **more), (q, k, v), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            q.copy_(torch.randn_like(q))
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(found, step()):
            assert torch.equal(a, b)


def test_a_compiled_training_step_is_the_eager_one():
    q, k, v = (x.requires_grad_() for x in inputs(torch.bfloat16))
    dout = torch.randn_like(q)
    compiled = torch.compile(lambda q, k, v: ringattn.attention(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(ringattn.attention(q, k, v, is_causal=True), (q, k, v), dout)
    for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), dout), expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("more", [{}, {"combine": "mix", "segment_lengths": (64, 128), "dilation_rates": (1, 2)}])
def test_calls_return_before_the_work_is_done_and_allocate_nothing_after_the_first(more):
    q, k, v = inputs(torch.bfloat16, rows=4096)
    expected = ringattn.attention(q, k, v, **more)
    misses = ringattn.stats()["pool_misses"]
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds of the device's clock
    out = ringattn.attention(q, k, v, **more)
    assert not torch.cuda.current_stream().query()
    assert ringattn.stats()["pool_misses"] == misses
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("more", [{}, {"combine": "mix", "segment_lengths": (256, 512), "dilation_rates": (1, 2)}])
def test_streams_do_not_share_a_workspace(more):
    """Calls that run at the same time on different streams, through one communicator."""
    problems = [inputs(torch.bfloat16, rows) for rows in (3000, 4096, 2500, 3500)]
    expected = [ringattn.attention(*p, **more) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, problem in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append(ringattn.attention(*problem, **more))
        torch.cuda.synchronize()
        for one, other in zip(results, expected):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "more", [{"is_causal": True}, {"combine": "mix", "segment_lengths": (64, 128), "dilation_rates": (1, 2)}]
)
def test_a_captured_call_replays_on_new_data_beside_others(more):
    q, k, v = inputs(torch.bfloat16, rows=2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call of all on the stream of the capture
        out = ringattn.attention(q, k, v, **more)
    for seed in range(3):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        out.fill_(torch.nan)
        graph.replay()
        beside = ringattn.attention(q, k, v, **more)
        torch.cuda.synchronize()
        assert torch.equal(out, beside)
