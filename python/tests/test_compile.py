"""The operators under torch.compile, torch.library.opcheck and the transforms that watch operators."""

import sys

import pytest
import ringattn
import torch
from ringattn._config import Settings
from ringattn.torch import backward_op, forward_op

pytestmark = pytest.mark.filterwarnings("ignore::ringattn.HolesWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def arguments(group="", **options):
    return (*Settings(**options), group)


def tensors(dtype=torch.float64, requires_grad=True):
    return [torch.randn(2, 6, heads, 4, dtype=dtype, requires_grad=requires_grad) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "segment_lengths": (4, 0), "dilation_rates": (1, 2), "combine": "mix"}, {"group": "threads:2"}],
)
def test_opcheck_passes_for_forward(options):
    torch.library.opcheck(forward_op, (*tensors(), None, None, *arguments(**options)))


def test_opcheck_passes_with_a_range_and_a_seed():
    torch.library.opcheck(forward_op, (*tensors(), torch.tensor(5), torch.tensor([[0, 4], [1, 6]]), *arguments(dropout_p=0.25)))


def test_opcheck_passes_for_backward():
    q, k, v = tensors(requires_grad=False)
    out, lse, state = forward_op(q, k, v, None, None, *arguments())
    torch.library.opcheck(
        backward_op, (q, k, v, out, lse, torch.randn_like(out), torch.randn_like(lse), state, None, *arguments())
    )


def same(function, *inputs, **compile_options):
    """A compiled function gives the results and gradients of the plain one, in one graph."""
    compiled = torch.compile(function, fullgraph=True, **compile_options)
    out, expected = compiled(*inputs), function(*inputs)
    assert torch.equal(out, expected)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout)):
        torch.testing.assert_close(a, b)
    return compiled


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "group": 2, "layout": "zigzag"},
        {"key_range": (1, 5), "scale": 0.5},
        {"segment_lengths": [4, 0], "dilation_rates": [1, 2], "combine": "mix", "window": (3, 3)},
    ],
)
def test_compiled_attention_is_attention_in_one_graph(options):
    same(lambda q, k, v: ringattn.attention(q, k, v, **options), *tensors(), backend="aot_eager")


def test_the_inductor_backend_compiles_a_model_around_it():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 4, 4)).unbind(2)
            return ringattn.attention(q, k, v, is_causal=True).flatten(2).relu()

    block, x = Block(), torch.randn(2, 12, 16)
    try:
        out = torch.compile(block, fullgraph=True)(x)
    except Exception as error:
        if "compiler" in str(error).lower() and "InvalidCxxCompiler" in repr(error):
            pytest.skip("the inductor backend finds no C++ compiler here")
        raise
    torch.testing.assert_close(out, block(x), rtol=1e-4, atol=1e-5)


def test_autocast_and_checkpoints_stay_inside_one_graph():
    from torch.utils.checkpoint import checkpoint

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = ringattn.attention(x, x, x, is_causal=True)
        return narrow.float() + checkpoint(lambda y: ringattn.attention(y, y, y), x, use_reentrant=False)

    same(function, torch.randn(2, 6, 4, 4, requires_grad=True), backend="aot_eager")


@pytest.mark.parametrize("first_of_all", [False, True])
def test_new_lengths_do_not_need_a_new_graph(first_of_all, monkeypatch):
    torch._dynamo.reset()
    if first_of_all:
        monkeypatch.setattr(sys.modules["ringattn._attention"], "_for_torch", None)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, k, v: ringattn.attention(q, k, v, is_causal=True), backend=counting, fullgraph=True, dynamic=True
    )
    for rows in (5, 9, 14):
        x = torch.randn(1, rows, 2, 4)
        assert torch.equal(compiled(x, x, x), ringattn.attention(x, x, x, is_causal=True))
    assert len(graphs) == 1


def test_a_seed_drawn_inside_the_graph_is_new_for_each_call():
    q, k, v = tensors(torch.float32)
    compiled = torch.compile(lambda q, k, v: ringattn.attention(q, k, v, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_a_range_given_as_a_tensor_does_not_need_a_new_graph():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x, r: ringattn.attention(x, x, x, key_range=r), backend=counting, fullgraph=True)
    x = torch.randn(2, 6, 2, 4)
    for end in (3, 4, 5):
        r = torch.tensor([[0, end], [1, 6]])
        assert torch.equal(compiled(x, r), ringattn.attention(x, x, x, key_range=r))
    assert len(graphs) == 1


def test_a_range_of_numbers_may_change():
    compiled = torch.compile(lambda x, r: ringattn.attention(x, x, x, key_range=r), backend="eager", fullgraph=True)
    x = torch.randn(1, 9, 2, 4)
    for pair in ((0, 5), (1, 5), (2, 9)):
        assert torch.equal(compiled(x, pair), ringattn.attention(x, x, x, key_range=pair))


def test_a_number_of_ranks_may_change():
    compiled = torch.compile(
        lambda x, group: ringattn.attention(x, x, x, group=group), backend="eager", fullgraph=True, dynamic=True
    )
    x = torch.randn(1, 9, 2, 4)
    for group in (2, 3, None):
        torch.testing.assert_close(compiled(x, group), ringattn.attention(x, x, x))


def test_a_mask_of_other_rows_than_keys_is_refused_in_a_graph():
    module = ringattn.RingMultiheadDilatedAttention(8, 2)
    q, k, mask = torch.randn(1, 3, 8), torch.randn(1, 6, 8), torch.ones(3, 6, dtype=torch.bool).triu(1)
    with pytest.raises(Exception, match="3 queries and 6 keys"):  # torch wraps what is raised while it traces
        torch.compile(module, backend="eager", fullgraph=True)(q, k, k, attn_mask=mask, is_causal=True)


def test_modules_compile_in_one_graph():
    ring = ringattn.RingDilatedAttention([4, 0], [1, 2], combine="mix", ring_size=2)
    q, k, v = tensors(torch.float32)
    same(lambda q, k, v: ring(q, k, v, is_causal=True), q, k, v, backend="aot_eager")
    multihead = ringattn.RingMultiheadDilatedAttention(16, 4)
    x = torch.randn(2, 6, 16, requires_grad=True)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    same(lambda x: multihead(x, x, x, is_causal=True, key_padding_mask=mask)[0], x, backend="aot_eager")


def test_fake_tensors_give_shapes_without_computing():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 1 << 30, 8, 64)
        out, lse = ringattn.attention(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 8, 1 << 30) and lse.dtype == torch.float32


def test_export_keeps_the_operator():
    class Model(torch.nn.Module):
        def forward(self, x):
            return ringattn.attention(x, x, x, is_causal=True)

    x = torch.randn(1, 6, 2, 4)
    program = torch.export.export(Model(), (x,))
    assert "ringattn.forward" in str(program.graph)
    assert torch.equal(program.module()(x), ringattn.attention(x, x, x, is_causal=True))


def test_settings_are_checked_under_compile_too():
    x = torch.randn(1, 6, 2, 4)
    with pytest.raises(Exception, match="combine is 'sum'"):
        torch.compile(lambda x: ringattn.attention(x, x, x, combine="sum"), backend="eager")(x)
