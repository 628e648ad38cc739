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


def test_gradients_are_refused_with_the_reason():
    q, k, v = (x.requires_grad_() for x in inputs(torch.bfloat16))
    out = ringattn.attention(q, k, v, is_causal=True)
    with pytest.raises(ringattn.RingattnError, match="backward"):
        out.sum().backward()


def test_a_ring_of_gpus_is_refused_with_the_reason():
    q, k, v = inputs(torch.bfloat16)
    with pytest.raises(ringattn.RingattnError, match="one rank"):
        ringattn.attention(q, k, v, is_causal=True, group=4)


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
