"""Trains a small character model with LongNet's attention pattern, on one rank or on a ring of them.

    python train_characters.py
    torchrun --nproc-per-node 4 train_characters.py

Every rank holds all weights and its own rows of the sequence. The losses are the same on any number of ranks, up to rounding.
"""

import argparse
import os
import pathlib
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringattn

LAYOUT = "zigzag"  # balances causal work


def parse():
    parser = argparse.ArgumentParser(description="Train a small character model on one rank, or on many under torchrun.")
    parser.add_argument("--text", type=pathlib.Path, help="a file to learn from (default: sentences made up here)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq", type=int, default=1024, help="characters of a sequence, over all ranks (default: 1024)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--segment-lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--dilation-rates", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=pathlib.Path, help="a file for the loss of every step, one a line")
    return parser.parse_args()


def made_up_text(sentences=4000):
    """Sentences in which every day belongs to one place, so that there is something to learn beyond spelling."""
    draw = random.Random(0)
    people = ["anna", "boris", "chen", "divya", "emil", "fatima"]
    verbs = ["met", "saw", "called", "missed", "followed"]
    places = {"monday": "river", "tuesday": "market", "wednesday": "station", "thursday": "library", "friday": "harbour"}
    lines = []
    for _ in range(sentences):
        one, other = draw.sample(people, 2)
        day = draw.choice(list(places))
        lines.append(f"on {day} {one} {draw.choice(verbs)} {other} at the {places[day]}.")
    return "\n".join(lines)


class Block(nn.Module):
    def __init__(self, options, group):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(options.dim) for _ in range(2))
        self.attention = ringattn.RingMultiheadDilatedAttention(
            options.dim,
            options.heads,
            segment_lengths=options.segment_lengths,
            dilation_rates=options.dilation_rates,
            layer_norm=True,
            group=group,
            layout=LAYOUT,
            **ringattn.like("longnet"),
        )
        self.mlp = nn.Sequential(nn.Linear(options.dim, 4 * options.dim), nn.GELU(), nn.Linear(4 * options.dim, options.dim))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x), is_causal=True)[0]
        return x + self.mlp(self.norms[1](x))


class CharacterModel(nn.Module):
    def __init__(self, options, characters, group):
        super().__init__()
        self.characters = nn.Embedding(characters, options.dim)
        self.places = nn.Embedding(options.seq, options.dim)
        self.blocks = nn.Sequential(*(Block(options, group) for _ in range(options.layers)))
        self.head = nn.Sequential(nn.LayerNorm(options.dim), nn.Linear(options.dim, characters))

    def forward(self, ids, positions):
        return self.head(self.blocks(self.characters(ids) + self.places(positions)))


def main():
    options = parse()
    group = None  # one rank
    if "RANK" in os.environ:  # torchrun says which one this is
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    first = group is None or dist.get_rank() == 0

    text = options.text.read_text() if options.text else made_up_text()
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])
    if len(tokens) <= options.seq:
        raise SystemExit(f"--seq is {options.seq}; the text has {len(tokens)} characters, and must have more")

    torch.manual_seed(options.seed)  # the same weights and the same sequences on every rank
    model = CharacterModel(options, len(alphabet), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    positions = ringattn.positions(options.seq, group, LAYOUT)  # of this rank's rows

    losses = []
    for step in range(options.steps):
        begin = int(torch.randint(len(tokens) - options.seq, ()))
        window = tokens[None, begin : begin + options.seq + 1]
        ids, labels = (ringattn.shard(x, group, LAYOUT) for x in (window[:, :-1], window[:, 1:]))

        scores = model(ids, positions)
        # The sum over this rank's rows, divided by the characters of all ranks: the parts add up to the loss of one rank.
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / options.seq
        optimizer.zero_grad()
        loss.backward()
        ringattn.sync_gradients(model, group)  # adds up what the ranks have
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        total = loss.detach()
        if group is not None:
            dist.all_reduce(total)
        losses.append(total.item())
        if first and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:3}: loss {losses[-1]:.4f}", flush=True)

    # The last window, whole again on every rank.
    right = ringattn.unshard(scores.argmax(-1) == labels, group, LAYOUT)
    if first:
        print(f"{int(right.sum())} of {options.seq} characters right")
        if options.losses:
            options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
