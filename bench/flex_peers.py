"""Cases of bench/gpu_peers.py beside FlexAttention, compiled, with the pattern as its block mask. Compilation is not timed."""

import dilated_ways
from dilated_ways import BRANCHES

HEADS = 12  # of the dilated pattern


class Flex:
    """A part of Bench."""

    def lattice(self):
        """The pairs of the dilated pattern, as FlexAttention asks for them."""
        w, r, o = (self.torch.tensor(x, device="cuda") for x in zip(*((w, r, i % r) for i, (w, r) in enumerate(BRANCHES))))

        def pairs(b, head, x, y):
            i = head // 4
            return (x // w[i] == y // w[i]) & (x % w[i] % r[i] == o[i]) & (y % w[i] % r[i] == o[i])

        return pairs

    def flex_dilated(self, n, causal):
        """FlexAttention of the dilated pattern, [B, H, N, D]; rows without keys are zero, and their gradients."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled, lattice = self.torch.compile(flex_attention), self.lattice()
        pairs = (lambda b, h, x, y: lattice(b, h, x, y) & (x >= y)) if causal else lattice
        mask = create_block_mask(pairs, None, 12, n, n, device="cuda", _compile=True)
        return lambda q, k, v: self.torch.nan_to_num(compiled(q, k, v, block_mask=mask))

    def flex(self):
        """FlexAttention, compiled, with each pattern as a block mask."""
        from definition import Desc
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled, lattice = self.torch.compile(flex_attention), self.lattice()

        def before(b, head, x, y):
            return x >= y

        n, d, h = 32768, 128, 12
        q, k, v = self.tensors(n, h, d)
        theirs = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        for name, desc, pairs, flops in (
            ("dense", Desc(), None, 4 * d * h * n * n),
            ("dense causal", Desc(causal=True), before, 4 * d * h * (n * (n + 1) // 2)),
            ("dilated", Desc(branches=BRANCHES), lattice, dilated_ways.flops(n, 12, d, False, 4)),
        ):
            mask = create_block_mask(pairs, None, h, n, n, device="cuda", _compile=True) if pairs else None

            def run(mask=mask):
                with self.torch.no_grad():
                    return compiled(*theirs, block_mask=mask)

            mine = self.ours(q, k, v, desc)
            mine()
            error = (mine.out.float() - self.torch.nan_to_num(run().transpose(1, 2).float())).abs().max().item()
            assert error < 0.05, f"results differ by {error}"
            self.add("flex", f"{name} D={d} h={h} n={n}", flops, {"ringattn": mine, "Flex": run})

    def flex_layer(self):
        """FlexAttention's forward and backward of the same layer, as far as its block mask can be made."""
        for case, n, d, causal, inputs, dout in self.dilated_cases((128,)):
            if n > 131072:
                continue
            flex = self.flex_dilated(n, causal)
            ours = self.dilated_ways(causal)["ringattn"]
            ways = {"ringattn": lambda: self.torch.autograd.grad(ours(*inputs), inputs, dout)}
            theirs = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in inputs]
            back = dout.transpose(1, 2).contiguous()

            def peer():
                return [t.transpose(1, 2) for t in self.torch.autograd.grad(flex(*theirs), theirs, back)]

            self.add_through_autograd("flex layer", case, dilated_ways.flops(n, HEADS, d, causal, 14), {**ways, "Flex": peer})
