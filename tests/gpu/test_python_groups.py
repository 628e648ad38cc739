"""The Python package on several ranks with CUDA tensors: ranks of one process, and processes that share a GPU.

    RINGATTN_CUDA_LIBRARY=build/libringattn_cuda.so RINGATTN_LIBRARY=build/libringattn.so PYTHONPATH=python \\
        python3 -m unittest discover -s tests/gpu -p test_python_groups.py

Without a GPU the same runs on the stand-in for one (place.py). RINGATTN_LONG=1: four processes there, too."""

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from kit import BF16, F16, F32, LSE_BOUND, OUT_BOUND, torch  # noqa: E402
from place import GPU, PLACE, library, stand_in, synchronize  # noqa: E402
from definition import Desc, gradients, reference  # noqa: E402

import ringattn  # noqa: E402

ROWS = 2000 if GPU else 150
DENSE = {"is_causal": True}
HEADS = {"segment_lengths": (64, 0), "dilation_rates": (1, 3), "is_causal": True}
BOTH = {"segment_lengths": (64, 0), "dilation_rates": (1, 3), "combine": "mix"}


def desc_of(is_causal=False, segment_lengths=(0,), dilation_rates=(1,), **more):
    return Desc(branches=zip(segment_lengths, dilation_rates), causal=is_causal, **more)


def inputs(dtype, rows=ROWS, heads=4, dim=64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, rows, heads, dim), (2, rows, heads // 2, dim), (2, rows, heads // 2, dim), (2, rows, heads, dim)]
    return [torch.randn(shape, generator=generator).to(PLACE, dtype) for shape in shapes]


def passes(q, k, v, dout, **options):
    """out, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ringattn.attention(*leaves, return_lse=True, **options)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


class IntegerGroups(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore", ringattn.HolesWarning)

    def hold(self, found, tensors, desc):
        """The results are within the bounds of the definition. Returns the root mean square of out's error."""
        q, k, v, dout = tensors
        out, lse, m_out, m_lse = reference(q, k, v, desc)
        wanted, sizes = gradients(q, k, v, dout, None, desc)
        there = torch.isfinite(lse)
        lse_found = found[1].transpose(1, 2)
        self.assertTrue(torch.equal(torch.isfinite(lse_found), there))
        self.assertLessEqual((found[0].double() - out).abs().max().item(), OUT_BOUND[q.dtype] * m_out)
        self.assertLessEqual((lse_found.double() - lse)[there].abs().max().item(), LSE_BOUND[q.dtype] * m_lse)
        for name, got, want, size in zip(("dq", "dk", "dv"), found[2:], wanted, sizes):
            self.assertLessEqual((got.double() - want).abs().max().item(), OUT_BOUND[q.dtype] * size, name)
        return (found[0].double() - out).square().mean().sqrt().item()

    def test_results_and_gradients_of_2_4_and_8_ranks_meet_the_bounds_of_one(self):
        for dtype in (F32, BF16, F16):
            for options in (DENSE, HEADS, BOTH):
                tensors, desc = inputs(dtype), desc_of(**options)
                one = self.hold(passes(*tensors, **options), tensors, desc)
                for ranks, layout in ((2, "contiguous"), (4, "striped"), (8, "zigzag")):
                    with self.subTest(dtype=dtype, ranks=ranks, layout=layout, **options):
                        found = passes(*tensors, **options, group=ranks, layout=layout)
                        self.assertTrue(all(x.device == PLACE for x in found))
                        self.assertLessEqual(self.hold(found, tensors, desc), 1.25 * one)

    def test_every_way_to_meet_gives_the_results_of_one_rank(self):
        tensors = inputs(F32)
        alone = passes(*tensors, **DENSE)
        for options in (
            {"schedule": "ring", "bucket": 32},
            {"schedule": "gather"},
            {"query_placement": "replicated"},
            {"query_placement": "replicated", "layout": "zigzag", "schedule": "merge"},
        ):
            with self.subTest(**options):
                for a, b in zip(passes(*tensors, **DENSE, group=3, **options), alone):
                    self.assertLessEqual((a - b).abs().max().item(), 1e-5 * max(1.0, b.abs().max().item()))

    def test_the_same_pairs_are_dropped_and_the_same_bits_come_every_time(self):
        tensors = inputs(BF16)
        options = {"dropout_p": 0.3, "seed": 2**40 + 5, "group": 4, "layout": "zigzag"}
        first = passes(*tensors, **options)
        self.hold(first, tensors, desc_of(dropout=0.3, seed=2**40 + 5))
        for a, b in zip(passes(*tensors, **options), first):
            self.assertTrue(torch.equal(a, b))

    def test_modules_agree_with_one_rank_weights_included(self):
        torch.manual_seed(0)
        module = ringattn.RingMultiheadDilatedAttention(64, 4, segment_lengths=[32, 0], dilation_rates=[1, 4], offset="residue",
                                                        group=4, layout="zigzag", device=PLACE)  # fmt: skip
        report = ringattn.check(module, torch.randn(2, ROWS, 64).to(PLACE), is_causal=True)
        self.assertTrue(report.ok and report.ranks == 4, str(report))
        q, k, v, _ = inputs(F32)
        whole = ringattn.RingDilatedAttentionHybrid([32, 0], [1, 2], ring_size=2)(q, k, v, is_causal=True)
        alone = ringattn.RingDilatedAttentionHybrid([32, 0], [1, 2], ring_size=1)(q, k, v, is_causal=True)
        self.assertLessEqual((whole - alone).abs().max().item(), 1e-5)

    def test_a_compiled_call_is_the_call(self):
        q, k, v, dout = inputs(F32)
        compiled = torch.compile(lambda *x: ringattn.attention(*x, **DENSE, group=2), backend="aot_eager", fullgraph=True)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(compiled(*leaves), leaves, dout)
        for a, b in zip(found, passes(q, k, v, dout, **DENSE, group=2)[2:]):
            self.assertTrue(torch.equal(a, b))

    # ------------------------------------------------------------------------------------------------------- streams

    def test_ranks_read_what_the_current_stream_writes_before_and_write_before_what_it_reads_later(self):
        q, k, v, _ = inputs(F32)
        expected = ringattn.attention(q, k, v, **DENSE, group=4)
        synchronize()
        for _ in range(3):
            with late(q) as (slow, enqueued):
                out = ringattn.attention(slow, k, v, **DENSE, group=4)
                copy = enqueued(out)
            self.assertTrue(torch.equal(copy, expected))

    def test_a_call_returns_while_the_device_is_busy_and_allocates_nothing_after_the_first(self):
        q, k, v, dout = inputs(F32)
        for _ in range(2):
            ringattn.attention(q, k, v, **DENSE, group=4)
        misses = ringattn.stats()["pool_misses"]
        synchronize()
        begin = time.monotonic()
        with late(q, seconds=2.0) as (slow, enqueued):
            out = ringattn.attention(slow, k, v, **DENSE, group=4)
            took = time.monotonic() - begin
            enqueued(out)
        self.assertLess(took, 1.5)
        self.assertEqual(ringattn.stats()["pool_misses"], misses)

    def test_forward_and_backward_use_the_same_ranks(self):
        """Backward comes from a thread of torch's, which would otherwise hold workspaces of its own."""
        from ringattn import _devices, _inprocess

        passes(*inputs(F32), **DENSE, group=5)
        kept = _inprocess._kept_on[_devices.device_of(PLACE)][5]
        passes(*inputs(F32), **DENSE, group=5)
        self.assertIs(_inprocess._kept_on[_devices.device_of(PLACE)][5], kept)
        self.assertNotIn(5, _inprocess._kept.sets)

    def test_threads_that_call_at_once_do_not_disturb_each_other(self):
        tensors = inputs(F32)
        expected, wrong = ringattn.attention(*tensors[:3], **DENSE, group=2), []
        synchronize()

        def calls():
            for _ in range(4):
                stream = torch.cuda.stream(torch.cuda.Stream()) if GPU else warnings.catch_warnings()
                with stream:
                    out = ringattn.attention(*tensors[:3], **DENSE, group=2)
                    synchronize()
                wrong.append(not torch.equal(out, expected))

        threads = [threading.Thread(target=calls) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [False] * 12)

    def test_a_forked_child_leaves_the_streams_of_its_parent_alone(self):
        """What they are given is still going on, and nothing of it does in the child."""
        q, k, v, _ = inputs(F32)
        expected = ringattn.attention(q, k, v, group=2)
        with late(q) as (slow, read):
            out = ringattn.attention(slow, k, v, group=2)
            with warnings.catch_warnings():  # python's own, about threads
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                os._exit(0)
            deadline, ended = time.monotonic() + 20, 0
            while not ended and time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.01)
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            self.assertTrue(ended)
            self.assertEqual(os.waitstatus_to_exitcode(status), 0)
            self.assertTrue(torch.equal(read(out), expected))

    @unittest.skipUnless(GPU, "needs a GPU")
    def test_memory_that_is_used_again_at_once_disturbs_nothing(self):
        """Torch's allocator gives the memory of a tensor that is gone to the next one of the same stream."""
        q, k, v, dout = inputs(BF16)
        options = {**DENSE, "group": 8, "layout": "zigzag", "query_placement": "replicated"}
        expected = passes(q, k, v, dout, **options)
        for _ in range(20):
            found = passes(*(x.clone() for x in (q, k, v, dout)), **options)
            for x in (q, k, v, dout):
                torch.full_like(x, torch.nan)
            for a, b in zip(found, expected):
                self.assertTrue(torch.equal(a, b))

    # -------------------------------------------------------------------------------------------------------- errors

    def test_a_capture_into_a_graph_is_refused_with_the_reason(self):
        q, k, v, _ = inputs(F32)
        expected = ringattn.attention(q, k, v, group=2)
        synchronize()
        with self.assertRaisesRegex(ringattn.RingattnError, "cannot be captured into a CUDA graph"):
            with capture():
                ringattn.attention(q, k, v, group=2)
        self.assertTrue(torch.equal(ringattn.attention(q, k, v, group=2), expected))

    def test_an_error_is_that_of_the_cpu_and_the_next_call_works(self):
        q, k, v, dout = inputs(F32)
        alone = ringattn.attention(q, k, v)
        with self.assertRaisesRegex(ringattn.RingattnError, "abacus"):
            ringattn.attention(q, k, v, group=4, kernel="abacus")
        with self.assertRaisesRegex(ringattn.RingattnError, "f32, bf16 and f16 only"):
            ringattn.attention(q.double(), k.double(), v.double(), group=2)
        with self.assertRaisesRegex(ValueError, "from 1 to 512"):
            ringattn.attention(q, k, v, group=513)
        self.assertLessEqual((ringattn.attention(q, k, v, group=4) - alone).abs().max().item(), 1e-5)


class late:
    """Inside of ``with``, a tensor that the current stream has still to write, and a function that reads a result in the order
    of that stream. Outside, all is done."""

    def __init__(self, x, seconds=0.2):
        self.x, self.seconds = x, seconds

    def __enter__(self):
        if GPU:
            self.guard = torch.cuda.stream(torch.cuda.Stream())
            self.guard.__enter__()
            slow = torch.full_like(self.x, torch.nan)
            ready = [torch.empty_like(self.x) for _ in range(3)]  # memory for results, of which torch's allocator keeps some
            del ready
            torch.cuda._sleep(int(self.seconds * 2e9))  # clocks of the device
            slow.copy_(self.x)
            return slow, torch.clone
        stand_in.waits = False
        self.memory = [device_memory(self.x) for _ in range(2)]
        slow, source = (memory[1] for memory in self.memory)
        slow.fill_(torch.nan)
        source.copy_(self.x)
        self._copy(slow, source, self.seconds)
        return slow, self._read

    def _copy(self, to, source, seconds=0.0):
        os.environ["RINGATTN_STAND_IN_COPY_MS"] = str(int(1000 * seconds))
        library.ra_cuda_copy(*map(ctypes.c_void_p, (to.data_ptr(), source.data_ptr())), ctypes.c_int64(to.nbytes),
                             ctypes.c_void_p(stand_in.stream()))  # fmt: skip

    def _read(self, out):
        stand_in.synchronize()  # of the caller's stream alone
        return out.clone()

    def __exit__(self, *_):
        if GPU:
            torch.cuda.synchronize()
            self.guard.__exit__(None, None, None)
            return
        stand_in.synchronize()
        stand_in.waits = True
        del os.environ["RINGATTN_STAND_IN_COPY_MS"]
        for memory, _ in self.memory:
            library.ra_cuda_free(memory)


def device_memory(x):
    """Memory of the stand-in, between which copies are enqueued, and a tensor like x over it."""
    memory = ctypes.c_void_p()
    library.ra_cuda_alloc(ctypes.c_int64(x.nbytes), ctypes.byref(memory))
    view = (ctypes.c_char * x.nbytes).from_address(memory.value)
    return memory, torch.frombuffer(view, dtype=x.dtype).view(x.shape)


class capture:
    """Inside of ``with`` the current stream is being captured."""

    def __enter__(self):
        if GPU:
            self.guard = torch.cuda.graph(torch.cuda.CUDAGraph())
            self.guard.__enter__()
        else:
            stand_in.records = True

    def __exit__(self, *raised):
        if GPU:
            self.guard.__exit__(*raised)
        else:
            stand_in.records = False


class GroupsOfProcesses(unittest.TestCase):
    """Each check of groups_worker.py, in one start of torchrun for each number of ranks and backend."""

    def hold(self, ranks, backend, **variables):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "results.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(HERE / "groups_worker.py")]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
            done = subprocess.run([*command, path, backend], capture_output=True, text=True, timeout=600, env=environment)
            found = json.loads(path.read_text()) if path.exists() else {}
        for name, told in found.items():
            with self.subTest(name, ranks=ranks, backend=backend):
                self.assertEqual(told, "ok")
        print("".join(line for line in done.stdout.splitlines(True) if "one process" in line), end="", flush=True)
        self.assertEqual(done.returncode, 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        self.assertEqual(len(found), 11)

    def test_2_processes_over_gloo(self):
        self.hold(2, "gloo")

    @unittest.skipUnless(GPU or os.environ.get("RINGATTN_LONG"), "2 processes are enough on the stand-in")
    def test_4_processes_over_gloo(self):
        self.hold(4, "gloo")

    @unittest.skipUnless(GPU, "needs a GPU")
    def test_2_processes_over_nccl(self):
        self.hold(2, "nccl")

    @unittest.skipUnless(GPU or os.environ.get("RINGATTN_LONG"), "tests/mpi has this lane on the stand-in")
    def test_2_processes_whose_lane_is_nccl(self):
        """On a GPU by the NCCL that torch has loaded."""
        library = {} if GPU else {"RINGATTN_NCCL": os.environ["RINGATTN_CUDA_LIBRARY"]}
        self.hold(2, "gloo", RINGATTN_LANE="nccl", **library)
        if GPU:
            self.hold(2, "nccl", RINGATTN_LANE="nccl")


if __name__ == "__main__":
    unittest.main()
