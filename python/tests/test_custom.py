"""Groups over a transport of one's own: threads of this process that pass bytes through queues."""

import collections
import queue
import threading

import numpy as np
import pytest
import ringattn
import torch


class Queues(ringattn.Transport):
    def __init__(self, rank, ranks, boxes):
        super().__init__(rank, ranks)
        self.boxes, self.aborted, self.closed = boxes, [], False

    def post_send(self, peer, tag, buffer):
        self.boxes[self.rank, peer, tag].put(bytes(buffer))

    def post_receive(self, peer, tag, buffer):
        return self.boxes[peer, self.rank, tag], buffer

    def wait(self, request, seconds):
        if request is None:
            return 0
        box, buffer = request
        try:
            message = box.get(timeout=seconds) if seconds > 0 else box.get_nowait()
        except queue.Empty:
            return None
        buffer[: len(message)] = message
        return len(message)

    def abort(self, reason):
        self.aborted.append(reason)

    def close(self):
        self.closed = True


def on_ranks(ranks, function, kind=Queues):
    """What a function of (rank, group) gives on each rank; exceptions are results, too."""
    boxes, found = collections.defaultdict(queue.SimpleQueue), [None] * ranks
    transports = [kind(rank, ranks, boxes) for rank in range(ranks)]

    def work(rank):
        try:
            found[rank] = function(rank, ringattn.custom_group(transports[rank]))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, AssertionError):
            raise result
    return found, transports


@pytest.fixture(autouse=True)
def close_groups():
    yield
    ringattn.dist.close()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_outputs_and_gradients_are_those_of_one_rank(layout):
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 31, 2, 8, dtype=torch.float64)
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = ringattn.attention(*alone, is_causal=True)
    expected.backward(dout)

    def work(rank, group):
        mine = [ringattn.shard(x, group, layout).clone().requires_grad_() for x in (q, k, v)]
        out = ringattn.attention(*mine, is_causal=True, group=group, layout=layout)
        out.backward(ringattn.shard(dout, group, layout))
        for x, whole in zip((out, *(x.grad for x in mine)), (expected, *(x.grad for x in alone))):
            torch.testing.assert_close(x, ringattn.shard(whole.detach(), group, layout))
        return ringattn.unshard(out.detach(), group, layout)

    for result in on_ranks(3, work)[0]:
        torch.testing.assert_close(result, expected.detach())


def test_numpy_arrays_travel_too():
    x = np.random.default_rng(0).standard_normal((1, 20, 2, 4))
    found, _ = on_ranks(2, lambda rank, group: ringattn.attention(*[ringattn.shard(x, group)] * 3, group=group))
    assert np.abs(np.concatenate(found, 1) - ringattn.attention(x, x, x)).max() < 1e-12


def test_modules_and_sums_of_gradients_run_on_such_a_group():
    def build(**options):
        torch.manual_seed(3)
        return ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64, **options)

    alone, lock = build(), threading.Lock()
    x = torch.randn(2, 22, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (alone(x, is_causal=True)[0] ** 2).sum().backward()

    def work(rank, group):
        with lock:  # the generator is one for all threads
            ring = build(group=group)
        (ring(ringattn.shard(x, group), is_causal=True)[0] ** 2).sum().backward()
        ringattn.sync_gradients(ring, group)
        for a, b in zip(ring.parameters(), alone.parameters()):
            torch.testing.assert_close(a.grad, b.grad)
        return True

    assert on_ranks(2, work)[0] == [True, True]


def test_a_peer_that_the_transport_lost_is_an_error_with_its_reason():
    class Broken(Queues):
        def wait(self, request, seconds):
            if self.rank == 1 and request is not None:
                raise ConnectionError("the cable is cut")
            return super().wait(request, seconds)

    x = np.ones((1, 4, 1, 4))
    found, transports = on_ranks(2, lambda rank, group: ringattn.attention(x, x, x, group=group, timeout=2.0), Broken)
    assert isinstance(found[1], ringattn.RingattnError) and found[1].status == "RA_PEER_LOST"
    assert "the cable is cut" in str(found[1]) and transports[1].aborted
    assert isinstance(found[0], ringattn.RingattnError)


def test_an_exception_of_the_transport_comes_out_of_the_call():
    class Lacking(ringattn.Transport):
        pass

    with pytest.raises(NotImplementedError, match="Lacking lacks post_"):
        ringattn.custom_group(Lacking(0, 2))

    class Late(Queues):
        def post_send(self, peer, tag, buffer):
            if len(buffer) > 400:
                raise OSError("no room")
            return super().post_send(peer, tag, buffer)

    x = np.ones((1, 4, 1, 4))
    found, _ = on_ranks(2, lambda rank, group: ringattn.attention(x, x, x, group=group, timeout=2.0), Late)
    assert any(isinstance(error, OSError) and str(error) == "no room" for error in found), found


def test_a_closed_group_closes_its_transport():
    transport = Queues(0, 2, collections.defaultdict(queue.SimpleQueue))
    ringattn.custom_group(transport)
    ringattn.dist.close()
    assert transport.closed


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="rank is 2 and ranks 2"):
        ringattn.Transport(2, 2)
    with pytest.raises(ValueError, match="transport is a int"):
        ringattn.custom_group(3)
    x = np.ones((1, 4, 1, 4))
    assert ringattn.attention(x, x, x, group=ringattn.custom_group(ringattn.Transport(0, 1))).shape == x.shape
