"""Cases of bench/gpu_peers.py that compute gradients: the kernels alone, and through autograd as in a layer of a model."""

import warnings

import dilated_ways
from dilated_ways import BRANCHES
from turns import REFUSALS, say_left_out

HEADS = 12  # of the dilated pattern


class Backward:
    """A part of Bench."""

    def gradients(self, forward, inputs, dout):
        """A function that runs the backward pass of `forward` on inputs that need gradients, or None if there is none."""
        try:
            out = forward(*inputs)
            out = out[0] if isinstance(out, tuple) else out
            self.torch.autograd.grad(out, inputs, dout, retain_graph=True)
        except REFUSALS as error:
            say_left_out("a backward pass", error)
            return None
        return lambda: self.torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def own_gradients(self, q, k, v, dout, desc):
        """A function that runs this library's backward pass, delta and all kernels, into its `results`."""
        torch = self.torch
        out, lse = torch.empty_like(q), torch.empty(1, q.shape[2], q.shape[1], device="cuda").transpose(1, 2)
        delta, results = torch.empty_like(lse.transpose(1, 2)).transpose(1, 2), [torch.zeros_like(t) for t in (q, k, v)]
        self.backend.run(self.backend.prepare(q, k, v, desc, out, lse))
        problem = self.backend.problem(q, k, desc)
        step = self.backend.prepare_backward(q, k, v, desc, lse, dout, delta, results)

        def run():
            self.backend.delta(problem, dout, out, None, delta)
            self.backend.run(step)

        run.results = results
        return run

    def backward_ways(self, q, k, v, dout, theirs, desc, causal):
        """q, k, v, dout: [1, N, H, D], perhaps every r-th row; theirs: the same four as SDPA takes them."""
        theirs = [t.detach().requires_grad_() for t in theirs]
        ways = {"ringattn": self.own_gradients(q, k, v, dout, desc)}
        for kind in self.kinds(fixed=True):
            ways[kind] = self.gradients(self.attend(kind, causal), theirs[:3], theirs[3].detach())
        ways["ringattn"]()
        if ways["cuDNN"]:
            self.check_gradients(ways["ringattn"].results, [t.transpose(1, 2) for t in ways["cuDNN"]()])
        return ways

    @staticmethod
    def check_gradients(found, right):
        for mine, theirs in zip(found, right):
            theirs = theirs.reshape(mine.shape).float()
            error = ((mine.float() - theirs).norm() / theirs.norm()).item()
            assert error < 0.02, f"gradients differ by {error}"

    def backward(self):
        """The backward pass of dense attention."""
        from definition import Desc

        for d, h in ((128, 16), (64, 32)):
            for n in (2048, 8192, 32768):
                for causal in (False, True):
                    mine = self.tensors(n, h, d, 4)
                    theirs = [t.transpose(1, 2).contiguous() for t in mine]
                    pairs = n * (n + 1) // 2 if causal else n * n
                    ways = self.backward_ways(*mine, theirs, Desc(causal=causal), causal)
                    self.add("backward", f"D={d} h={h} n={n}{' causal' if causal else ''}", 10 * d * h * pairs, ways)

    def backward_dims(self):
        """The same for head dimensions beside 64 and 128."""
        from definition import Desc

        n = 16384
        for d, h in ((96, 16), (192, 16), (256, 8)):
            for causal in (False, True):
                mine = self.tensors(n, h, d, 4)
                theirs = [t.transpose(1, 2).contiguous() for t in mine]
                pairs = n * (n + 1) // 2 if causal else n * n
                ways = self.backward_ways(*mine, theirs, Desc(causal=causal), causal)
                self.add("backward dims", f"D={d} h={h} n={n}{' causal' if causal else ''}", 10 * d * h * pairs, ways)

    def backward_views(self):
        """The backward pass on every r-th row, in segments."""
        from definition import Desc

        n, h = 131072, 12
        for d in (128, 64):
            for rows, r in ((2048, 1), (1024, 4), (512, 8)):
                for causal in (False, True):
                    mine = [t[:, ::r] for t in self.tensors(n, h, d, 4)]
                    theirs = [t.view(n // r // rows, rows, h, d).transpose(1, 2) for t in mine]
                    pairs = n // r // rows * (rows * (rows + 1) // 2 if causal else rows * rows)
                    ways = self.backward_ways(*mine, theirs, Desc(branches=((rows, 1),), causal=causal), causal)
                    case = f"D={d} rows={rows} r={r}{' causal' if causal else ''}"
                    self.add("backward views", case, 10 * d * h * pairs, ways)

    def dilated_ways(self, causal):
        """{name: function of q, k and v that autograd can differentiate}, ours first."""
        import ringattn

        warnings.simplefilter("ignore", ringattn.HolesWarning)
        segments, rates = zip(*BRANCHES)

        def ours(q, k, v):
            return ringattn.attention(q, k, v, segment_lengths=segments, dilation_rates=rates, is_causal=causal)

        ways = {"ringattn": ours}
        for kind in self.kinds():
            ways[kind] = dilated_ways.sliced(self.attend(kind, causal))
            ways[kind + " split"] = dilated_ways.split(self.attend(kind, causal))
        return ways

    def dilated_cases(self, dims):
        for d in dims:
            for n in (131072, 524288):
                for causal in (False, True):
                    q, k, v, dout = self.tensors(n, HEADS, d, 4)
                    inputs = [t.requires_grad_() for t in (q, k, v)]
                    yield f"D={d} h={HEADS} n={n}{' causal' if causal else ''}", n, d, causal, inputs, dout

    def add_through_autograd(self, group, case, flops, ways):
        """Ways return gradients, ours first. One whose gradients are others is left out, as long as another agrees with ours."""
        right, runs, others = None, {}, []
        for name, way in ways.items():
            try:
                found = way()
                if right is not None:
                    self.check_gradients(found, right)
            except REFUSALS as error:
                say_left_out(name, error)
                others += [name] if isinstance(error, AssertionError) else []
                continue
            right, runs[name] = right or found, way
        assert len(runs) > 1 or not others, f"{case}: nobody has ringattn's gradients, not {', '.join(others)}"
        del right, found
        self.add(group, case, flops, runs, head_start=5_000_000)

    def layer(self):
        """Forward and backward of dilated attention."""
        for case, n, d, causal, inputs, dout in self.dilated_cases((128,)):

            def both(way, inputs=inputs, dout=dout):
                return lambda: self.torch.autograd.grad(way(*inputs), inputs, dout)

            ways = {name: both(way) for name, way in self.dilated_ways(causal).items()}
            self.add_through_autograd("layer", case, dilated_ways.flops(n, HEADS, d, causal, 14), ways)

    def dilated_backward(self):
        """The backward pass of dilated attention alone."""
        for case, n, d, causal, inputs, dout in self.dilated_cases((128, 64)):
            ways = {name: self.gradients(way, inputs, dout) for name, way in self.dilated_ways(causal).items()}
            ways = {name: way for name, way in ways.items() if way}
            self.add_through_autograd("dilated backward", case, dilated_ways.flops(n, HEADS, d, causal, 10), ways)

    def own_backward(self):
        """The backward pass of dilated attention beside that of this library's own dense attention."""
        from definition import Desc

        for d in (128, 64):
            for n, dense in ((524288, 32768), (131072, 16384)):
                for causal in (False, True):
                    pairs = dense * (dense + 1) // 2 if causal else dense * dense
                    dilated = self.own_gradients(*self.tensors(n, HEADS, d, 4), Desc(branches=BRANCHES, causal=causal))
                    self.add(
                        "own backward",
                        f"D={d} h={HEADS} n={n} dilated, dense n={dense}{' causal' if causal else ''}",
                        {"ringattn": dilated_ways.flops(n, HEADS, d, causal, 10), "own dense": 10 * d * HEADS * pairs},
                        {
                            "ringattn": dilated,
                            "own dense": self.own_gradients(*self.tensors(dense, HEADS, d, 4), Desc(causal=causal)),
                        },
                    )
