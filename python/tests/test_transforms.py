"""torch.jit.trace, torch.func, second derivatives: each works or raises a sentence, and none goes round the operator."""

import io

import pytest
import ringattn
import torch
from torch.autograd import forward_ad

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
torch.manual_seed(0)
X, Y = torch.randn(2, 1, 9, 2, 4, dtype=torch.float64).unbind()


def ours(q, **options):
    return ringattn.attention(q, q, q, is_causal=True, **options)


def theirs(q):
    """By plain operations, which torch can transform in every way."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, q) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[-3], q.shape[-3], dtype=torch.bool).triu(1)
    return torch.einsum("...hqk,...khd->...qhd", scores.masked_fill(mask, float("-inf")).softmax(-1), q)


def loss(attend):
    return lambda q: attend(q).sin().sum()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_traced_function_computes_attention_of_its_own_inputs(requires_grad):
    traced = torch.jit.trace(ours, (X.clone().requires_grad_(requires_grad),))
    torch.testing.assert_close(traced(Y), theirs(Y))
    longer = torch.randn(2, 13, 2, 4, dtype=torch.float64, requires_grad=True)
    traced(longer).sin().sum().backward()
    torch.testing.assert_close(longer.grad, torch.func.grad(loss(theirs))(longer.detach()))


def test_a_traced_module_is_saved_and_loaded():
    class Module(torch.nn.Module):
        def forward(self, q):
            return ours(q)

    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(Module(), (X,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(Y), theirs(Y))


@pytest.mark.parametrize("group", [None, 3])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(loss(f))(X),
        lambda f: torch.func.vjp(f, X)[1](Y)[0],
        lambda f: torch.func.jacrev(f)(X),
        lambda f: torch.func.vmap(f)(torch.stack([X, Y])),
        lambda f: torch.func.vmap(f, in_dims=2, out_dims=1)(torch.stack([X, Y], 2)),
        lambda f: torch.func.vmap(torch.func.vmap(f))(torch.stack([X, Y])[None]),
        lambda f: torch.func.vmap(torch.func.grad(loss(f)))(torch.stack([X, Y])),
        lambda f: torch.autograd.functional.jacobian(f, X, vectorize=True),
        lambda f: torch.func.jvp(lambda q: q * f(Y), (X,), (Y,))[1],  # attention itself has no tangent here
    ],
)
def test_reverse_mode_and_vmap_are_those_of_plain_operations(transform, group):
    torch.testing.assert_close(transform(lambda q: ours(q, group=group)), transform(theirs))


def test_vmap_takes_shared_tensors_and_padding():
    mapped = torch.func.vmap(lambda q, k: ringattn.attention(q, k, k, key_range=(1, 7)), in_dims=(0, None))
    found = mapped(torch.stack([X, Y]), Y)
    assert torch.equal(found, torch.stack([ringattn.attention(q, Y, Y, key_range=(1, 7)) for q in (X, Y)]))
    pairs = torch.tensor([[1, 7], [0, 3]])
    for ranges, dim in ((pairs, 0), (pairs[0], None)):
        mapped = torch.func.vmap(lambda q, ends: ringattn.attention(q, q, q, key_range=ends), in_dims=(0, dim))
        expected = [ringattn.attention(q, q, q, key_range=pairs[i if dim == 0 else 0]) for i, q in enumerate((X, Y))]
        assert torch.equal(mapped(torch.stack([X, Y]), ranges), torch.stack(expected))


def test_gradients_of_a_module_by_functional_call():
    module, x = ringattn.RingMultiheadDilatedAttention(8, 2), torch.randn(1, 5, 8)
    weights = dict(module.named_parameters())
    found = torch.func.grad(lambda given: torch.func.functional_call(module, given, (x,))[0].sin().sum())(weights)
    module(x)[0].sin().sum().backward()
    for name, p in weights.items():
        torch.testing.assert_close(found[name], p.grad)


def dual(f, **options):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(X.clone().requires_grad_(**options), Y))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.jvp(f, (X,), (Y,)),
        lambda f: torch.func.jacfwd(f)(X),
        lambda f: torch.func.hessian(loss(f))(X),
        lambda f: torch.func.vmap(lambda t: torch.func.jvp(f, (X,), (t,)))(torch.stack([X, Y])),
        lambda f: dual(f, requires_grad=False),
        lambda f: dual(f, requires_grad=True),
    ],
)
def test_forward_mode_raises_instead_of_zero_tangents(transform):
    with pytest.raises(NotImplementedError, match="ringattn.attention has no forward-mode derivative .* use reverse mode"):
        transform(ours)


def twice(f):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(f)(x), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize(
    "transform",
    [
        twice,
        lambda f: torch.func.grad(lambda q: torch.func.grad(loss(f))(q).sum())(X),
        lambda f: torch.autograd.functional.hessian(loss(f), X),
        lambda f: torch.func.jacrev(torch.func.jacrev(loss(f)))(X),
    ],
)
def test_a_second_derivative_raises(transform):
    with pytest.raises(RuntimeError, match="ringattn.attention has no second derivative"):
        transform(ours)


def test_vmap_over_no_entries_gives_none():
    x = torch.zeros(0, 2, 6, 2, 4)
    found = torch.func.vmap(lambda q: ringattn.attention(q, q, q, return_lse=True))(x)
    assert found[0].shape == x.shape and found[1].shape == (0, 2, 2, 6)
    assert torch.func.vmap(torch.func.grad(lambda q: ringattn.attention(q, q, q).sum()))(x).shape == x.shape


def test_dropout_under_vmap_needs_one_seed():
    both = torch.stack([X, Y])
    same = torch.func.vmap(lambda q: ours(q, dropout_p=0.5), randomness="same")(both)
    assert not torch.equal(same, torch.func.vmap(ours)(both))
    with pytest.raises(ValueError, match='randomness="same"'):
        torch.func.vmap(lambda q: ours(q, dropout_p=0.5), randomness="different")(both)
