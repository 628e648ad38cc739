"""One rank under mpirun: NumPy and torch on a ring over an mpi4py communicator."""

import sys

import numpy as np
import ringattn
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, ranks = comm.Get_rank(), comm.Get_size()
rng = np.random.default_rng(0)
q = rng.standard_normal((2, 21, 6, 8))
k, v = rng.standard_normal((2, 2, 23, 3, 8))


def rows(count):
    sizes = [count // ranks + (r < count % ranks) for r in range(ranks)]
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


out, lse = ringattn.attention(q[:, rows(21)], k[:, rows(23)], v[:, rows(23)], is_causal=True, group=comm, return_lse=True)
expected, expected_lse = ringattn.attention(q, k, v, is_causal=True, return_lse=True)
assert np.abs(out - expected[:, rows(21)]).max() < 1e-12 and np.abs(lse - expected_lse[:, :, rows(21)]).max() < 1e-12

# long messages, split communicators, and the caller's own traffic on the same communicator meanwhile
big = rng.standard_normal((1, 1024, 4, 64)).astype(np.float32)
half = big[:, rows(1024)]
request = comm.irecv(source=(rank - 1) % ranks, tag=1)
comm.send(rank, dest=(rank + 1) % ranks, tag=1)
found = ringattn.attention(half, half, half, group=comm, schedule="ring", bucket=300)
assert request.wait() == (rank - 1) % ranks
assert ringattn.stats()["bytes_sent"] > 100_000
error = np.abs(found - ringattn.attention(big, big, big)[:, rows(1024)]).max()
assert error < 1e-5, error
alone = comm.Split(rank)
assert np.array_equal(ringattn.attention(big, big, big, group=alone), ringattn.attention(big, big, big))

try:
    ringattn.attention(half[..., :8] if rank else half, half, half, group=comm)
except ValueError as error:
    assert rank and "head dim" in str(error)
except RuntimeError as error:
    assert not rank and "rank 1" in str(error), error
else:
    raise AssertionError("no rank noticed")

# A freed communicator's handle goes to the next one, whose ranks may lie in another order. Nothing is left of the old one.
kept = len(ringattn.dist._processes)
for turn in range(8):
    other = comm.Split(0, rank if turn % 2 else -rank)
    place = other.Get_rank()
    part = q[:, place * 3 : place * 3 + 3]
    found = ringattn.attention(part, part, part, is_causal=True, group=other)
    joined = q[:, : 3 * ranks]
    expected = ringattn.attention(joined, joined, joined, is_causal=True)[:, place * 3 : place * 3 + 3]
    assert np.abs(found - expected).max() < 1e-12, turn
    where = ringattn.dist.resolve(other)
    other.Free()
    assert len(ringattn.dist._processes) == kept and where.mailbox.comm == MPI.COMM_NULL, turn
for group, match in ((where, "the group is closed"), (other, "MPI.COMM_NULL"), (MPI.COMM_NULL, "MPI.COMM_NULL")):
    try:
        ringattn.attention(part, part, part, group=group)
    except (ValueError, RuntimeError) as error:
        assert match in str(error), error
    else:
        raise AssertionError("a group that is gone serves a call")
try:
    ringattn.shard(part, MPI.COMM_NULL)
except ValueError as error:
    assert "MPI.COMM_NULL" in str(error), error
else:
    raise AssertionError("a group that is gone has shards")

if "torch" in sys.argv:
    import torch

    module = ringattn.RingMultiheadDilatedAttention(24, 3, dtype=torch.float64, group=comm)
    for index, p in enumerate(module.parameters()):
        p.data = torch.from_numpy(np.random.default_rng(index).standard_normal(p.shape))
    x = torch.from_numpy(rng.standard_normal((2, 22, 24)))
    report = ringattn.check(module, x, is_causal=True)
    assert report, str(report)
    part = x[:, rows(22)]
    module(part, is_causal=True)[0].sum().backward()
    ringattn.sync_gradients(module, comm)
    total = module.in_proj_weight.grad.clone()
    module.zero_grad()
    module.group = None
    module(x, is_causal=True)[0].sum().backward()
    assert torch.allclose(total, module.in_proj_weight.grad)
comm.Barrier()
sys.stdout.write(f"rank {rank} of {ranks} ok\n")  # in one piece: the ranks share the output
sys.stdout.flush()
