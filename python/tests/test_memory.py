"""Memory of large results: it comes back when nothing rests on it any more, and only then."""

import ctypes
import gc
import threading

import pytest
from ringattn import _memory
from ringattn._memory import LARGE_PAGE, MOST, PATIENCE, SMALL, Blocks


def address(taken):
    view, begin = taken
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) + begin


def test_a_block_comes_back_when_its_view_is_gone():
    blocks = Blocks()
    first, second = blocks.take(SMALL), blocks.take(SMALL)
    assert blocks.waiting() == 0
    one, other = address(first), address(second)
    assert abs(one - other) >= SMALL
    del first
    assert blocks.waiting() == SMALL
    again = blocks.take(SMALL)
    assert address(again) == one and blocks.waiting() == 0
    del again, second
    assert blocks.waiting() == 2 * SMALL


def test_sizes_are_enough_and_large_ones_begin_with_a_large_page():
    blocks = Blocks()
    for size in (SMALL + 1, LARGE_PAGE, 3 * LARGE_PAGE + 5):
        view, begin = blocks.take(size)
        assert len(view) >= begin + size
        view[begin], view[begin + size - 1] = 1, 2
        assert size < LARGE_PAGE or address((view, begin)) % LARGE_PAGE == 0
    del view
    assert address(blocks.take(LARGE_PAGE)) % LARGE_PAGE == 0


def test_no_more_waits_than_may():
    blocks = Blocks()
    views = [blocks.take(MOST // 4) for _ in range(6)]
    assert blocks.take(2 * MOST) is not None
    assert blocks.waiting() == 0, "larger than all that may wait"
    views.clear()
    assert blocks.waiting() == MOST


def test_nothing_waits_for_ever():
    blocks = Blocks()
    blocks.take(2 * SMALL)
    for _ in range(PATIENCE):
        blocks.take(SMALL)
    assert blocks.waiting() == 3 * SMALL
    blocks.take(SMALL)
    assert blocks.waiting() == SMALL


def test_without_memory_there_is_none(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no memory")

    blocks = Blocks()
    monkeypatch.setattr(_memory.mmap, "mmap", refuse)
    assert blocks.take(SMALL) is None


def test_threads_take_and_give_back():
    blocks, wrong = Blocks(), []

    def work(number):
        for turn in range(200):
            view, _ = blocks.take(SMALL * (1 + turn % 3))
            mark = bytes([number]) * 16
            view[:16] = mark
            if bytes(view[:16]) != mark:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert blocks.waiting() <= 4 * (1 + 2 + 3) * SMALL


# ----------------------------------------------------------------------------------------------------------------------- torch


@pytest.fixture
def inputs():
    torch = pytest.importorskip("torch")
    return [torch.randn(1, 2048, 2, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]  # 1 MiB each


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
def test_results_of_two_calls_do_not_meet(inputs):
    import ringattn
    import torch

    q, k, v, dout = inputs
    options = dict(segment_lengths=[256], dilation_rates=[4])
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    first = ringattn.attention(q, k, v, **options)
    grads = torch.autograd.grad(first, (q, k, v), dout)
    copies = [x.detach().clone() for x in (first, *grads)]
    for _ in range(3):  # memory of these may come back, that of the first must not
        again = ringattn.attention(q, k, v, **options)
        torch.autograd.grad(again, (q, k, v), 2 * dout)
    for result, copy in zip((first, *grads), copies):
        assert torch.equal(result, copy)


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
def test_gaps_are_zero_in_memory_that_was_used_before(inputs):
    import ringattn
    import torch

    q, k, v, dout = inputs
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dense = torch.autograd.grad(ringattn.attention(q, k, v), (q, k, v), dout)
    assert all(bool((x != 0).all()) for x in dense)
    del dense
    out = ringattn.attention(q, k, v, segment_lengths=[256], dilation_rates=[4])
    for x in (out, *torch.autograd.grad(out, (q, k, v), dout)):
        assert bool((x[:, ::4] != 0).all())
        assert all(bool((x[:, i::4] == 0).all()) for i in (1, 2, 3))


def test_a_result_is_like_any_tensor(inputs):
    import copy
    import io

    import ringattn
    import torch

    q, k, v, _ = inputs
    out = ringattn.attention(q, k, v)
    assert out.is_contiguous() and out.data_ptr() % 64 == 0
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    want = out.clone()
    assert torch.equal(torch.load(file), want)
    assert torch.equal(copy.deepcopy(out), want)
    assert out.numpy().sum() == pytest.approx(want.numpy().sum())
    with pytest.raises(RuntimeError, match="not resizable"):
        out.resize_(1, 4096, 2, 64)  # as docs/python.md says
    part = out[:, 5:7]
    del out
    gc.collect()
    ringattn.attention(k, v, q)
    assert torch.equal(part, want[:, 5:7])
    shared = ringattn.attention(q, k, v).share_memory_()
    assert shared.is_shared() and torch.equal(shared, want)
