# SPDX-License-Identifier: Apache-2.0
"""Trains the pocket model on one GPU, stage by stage, each stage for so many seconds.

    python train.py --build BUILD --checkpoint CHECKPOINT.pt [--leg SECONDS]

A leg ends after --leg seconds and leaves the checkpoint; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import export
from documents import ANSWER, ECHO, SILENT, TEMPLATE, TEXT, Generator, micro_batches
from families import FAMILIES
from model import Pocket

KINDS = ANSWER + len(FAMILIES)
# Weight of an answer's tokens by family: short answers and the hard families more, long quotations less.
FAMILY_WEIGHTS = {"values": 1.5, "keys": 1.2, "person": 1.5, "kv": 0.7, "freq": 2.0, "cwe": 1.5, "fwe": 1.5, "recite": 0.3,
                  "count": 3.0, "denial": 2.0, "comparison": 4.0, "listing": 2.0}
ECHO_WEIGHT, TEMPLATE_WEIGHT = 0.25, 0.03
MUON_RATE, EMBEDDING_RATE, GAIN_RATE, DECAY, WARM_UP = 3e-3, 1.5e-3, 1e-3, 0.1, 60


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    lengths: dict[int, float]  # document length to share of the micro-batches
    micro_batches: int  # per step
    text_weight: float
    dropout: float
    stretch: float  # share of documents with stretched positions
    rate_from: float  # the learning rates' factor, linear over the stage
    rate_to: float


STAGES = (
    Stage("A", 90, {512: 0.25, 1024: 0.75}, 1, 1.0, 0.1, 0.5, 1.0, 1.0),
    Stage("B", 110, {1024: 0.3, 4096: 0.7}, 1, 1.0, 0.1, 0.5, 1.0, 1.0),
    Stage("C", 170, {2048: 0.2, 8192: 0.3, 16384: 0.5}, 2, 0.7, 0.1, 0.4, 1.0, 0.85),
    Stage("D", 270, {2048: 0.1, 8192: 0.2, 32768: 0.7}, 2, 0.5, 0.0, 0.3, 0.85, 0.5),
    Stage("E", 480, {4096: 0.08, 8192: 0.07, 16384: 0.08, 32768: 0.12, 65536: 0.3, 131072: 0.35},
          2, 0.5, 0.0, 0.2, 0.5, 0.01),
    Stage("F", 500, {1024: 0.25, 2048: 0.1, 4096: 0.15, 16384: 0.05, 32768: 0.08, 65536: 0.15, 131072: 0.22},
          2, 0.5, 0.0, 0.2, 0.45, 0.01),
    Stage("G", 420, {1024: 0.3, 2048: 0.25, 4096: 0.35, 8192: 0.1}, 1, 0.5, 0.0, 0.3, 0.8, 0.6),
    Stage("H", 600, {1024: 0.2, 2048: 0.1, 4096: 0.2, 8192: 0.05, 16384: 0.08, 32768: 0.1, 65536: 0.12, 131072: 0.15},
          2, 0.5, 0.0, 0.2, 0.6, 0.01),
    Stage("I", 500, {1024: 0.2, 2048: 0.15, 4096: 0.35, 8192: 0.1, 32768: 0.06, 65536: 0.06, 131072: 0.08},
          2, 0.5, 0.0, 0.2, 0.5, 0.01),
)


# Data

class Stream(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Endless micro-batches; the stage is shared with the workers, so that they need no restart."""

    def __init__(self, build: Path, tokens: int, stage: Any, seed: int) -> None:
        self.build, self.tokens, self.stage, self.seed = build, tokens, stage, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        worker = get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        generator = Generator(self.build / "corpus.npz", self.build / "tokenizer.json", "train", seed)
        while True:
            current = self.stage.value
            generator.stretch = STAGES[current].stretch
            for tokens, kinds, positions in micro_batches(generator, STAGES[current].lengths, self.tokens):
                yield torch.from_numpy(tokens.astype("int32")), torch.from_numpy(kinds), torch.from_numpy(positions)
                if self.stage.value != current:
                    break


def next_tokens(tokens: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and their kinds, both (B, T): the next token; the last has none."""
    targets, target_kinds = tokens.roll(-1, 1).long(), kinds.roll(-1, 1).long()
    target_kinds[:, -1] = SILENT
    return targets, target_kinds


def by_kind(kinds: Tensor, *values: Tensor) -> Tensor:
    """Sums of values (N,) over each kind: (KINDS, values). A product, since bincount would wait for the GPU."""
    member = (kinds == torch.arange(KINDS, device=kinds.device)[:, None]).float()  # (KINDS, N)
    return member @ torch.stack([v.float() for v in values], dim=1)


def loss_weights(kinds: Tensor, text_weight: float, family_weights: Tensor) -> Tensor:
    """Weight of every token's loss (N,): text, answers, quotations and templates each count by their own mean, so that
    a few answers in a long document are not drowned by its text."""
    counts = by_kind(kinds, torch.ones_like(kinds))[:, 0]  # (KINDS,)
    weights = family_weights / (family_weights * counts).sum().clamp(min=100)
    for kind, weight, least in ((TEXT, text_weight, 2048), (ECHO, ECHO_WEIGHT, 256), (TEMPLATE, TEMPLATE_WEIGHT, 256)):
        weights[kind] = weight / counts[kind].clamp(min=least)
    return weights[kinds]


def answer_weights(device: torch.device) -> Tensor:
    """FAMILY_WEIGHTS by kind, zero for whatever is no answer: (KINDS,)."""
    weights = [0.0] * ANSWER + [FAMILY_WEIGHTS.get(name, 1.0) for name in FAMILIES]
    weights[ECHO] = 0.0
    return torch.tensor(weights, device=device)


# Optimiser

def orthogonalise(g: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to g (n, rows, columns), roughly: five Newton-Schulz steps in bfloat16."""
    x = g.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon:
    """Momentum, orthogonalised matrix by matrix; matrices of one shape go together."""

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {shape: torch.zeros(len(group), *shape, device=group[0].device)
                        for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            gradients = torch.stack([p.grad for p in group])  # (n, rows, columns)
            buffer = self.buffers[shape]
            buffer.lerp_(gradients, 1 - self.momentum)
            update = orthogonalise(gradients.lerp(buffer, self.momentum))  # Nesterov
            scale = -rate * 0.2 * math.sqrt(max(shape))
            torch._foreach_mul_(group, 1 - rate * DECAY)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=scale)


class Optimiser:
    def __init__(self, model: Pocket) -> None:
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        gains = [p for p in model.parameters() if p.ndim == 1]
        self.muon = Muon(matrices)
        groups = [{"params": [model.embedding], "base": EMBEDDING_RATE}, {"params": gains, "base": GAIN_RATE}]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=model.embedding.is_cuda)

    def step(self, factor: float) -> None:
        self.muon.step(MUON_RATE * factor)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        for shape, buffer in state["muon"].items():
            self.muon.buffers[shape].copy_(buffer)
        self.adam.load_state_dict(state["adam"])


# The log

class Tally:
    """Token accuracy and loss by document length and kind, kept on the GPU until it is printed."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, length: int, kinds: Tensor, hits: Tensor, losses: Tensor) -> None:
        sums = by_kind(kinds, torch.ones_like(losses), hits, losses)  # (KINDS, 3)
        self.sums[length] = self.sums.get(length, 0) + sums.double()

    def lines(self) -> Iterator[str]:
        for length, sums in sorted(self.sums.items()):
            count, hits, losses = sums.T.tolist()
            names = [(ANSWER + i, name) for i, name in enumerate(FAMILIES)]
            shares = [f"{name} {100 * hits[k] / count[k]:.1f}" for k, name in names if count[k] >= 20]
            text = f"text {losses[TEXT] / count[TEXT]:.3f} " if count[TEXT] else ""
            echo = f"echo-loss {losses[ECHO] / count[ECHO]:.2f} " if count[ECHO] else ""
            yield f"    {length:6d}: {text}{echo}| {' '.join(shares)}"
        self.sums = {}


# The run

@dataclass
class Progress:
    stage: int = 0
    spent: float = 0.0  # seconds in this stage
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in all

    def rate(self) -> float:
        s = STAGES[self.stage]
        share = min(1.0, self.spent / s.seconds)
        return (s.rate_from + (s.rate_to - s.rate_from) * share) * min(1.0, (self.step + 1) / WARM_UP)


def save(path: Path, model: Pocket, optimiser: Optimiser, progress: Progress) -> None:
    state = {"model": model.state_dict(), "optimiser": optimiser.state(), "progress": vars(progress)}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def resume(arguments: argparse.Namespace, model: Pocket, optimiser: Optimiser) -> Progress:
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, map_location=model.embedding.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.restore(state["optimiser"])
        return Progress(**state["progress"])
    progress = Progress()
    if arguments.weights:
        export.load(model, arguments.weights)
        names = [s.name for s in STAGES]
        progress = Progress(names.index(arguments.stage), arguments.spent)  # warms up anew: the momenta are gone
    return progress


def train_step(model: Pocket, optimiser: Optimiser, batches: Iterator[Any], progress: Progress, tally: Tally,
               weights: Tensor) -> int:
    """One optimiser step; returns its tokens."""
    stage, device, tokens_seen = STAGES[progress.stage], model.embedding.device, 0
    for _ in range(stage.micro_batches):
        tokens, kinds, positions = (t.to(device, non_blocking=True) for t in next(batches))  # (B, T) each
        targets, target_kinds = next_tokens(tokens, kinds)
        losses, hits = model(tokens, positions, targets, stage.dropout)  # (N,) each
        flat = target_kinds.flatten()
        loss = (losses * loss_weights(flat, stage.text_weight, weights)).sum() / stage.micro_batches
        loss.backward()
        tally.add(tokens.shape[1], flat, hits, losses.detach())
        tokens_seen += tokens.numel()
    optimiser.step(progress.rate())
    model.zero_grad()
    return tokens_seen


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("high")
    model = Pocket().to(device)
    optimiser = Optimiser(model)
    progress = resume(arguments, model, optimiser)
    if device.type == "cuda":
        model.compile()
    shared = multiprocessing.Value("i", progress.stage)
    stream = Stream(arguments.build, arguments.micro_tokens, shared, arguments.seed + progress.step)
    loader = DataLoader(stream, batch_size=None, num_workers=arguments.workers, pin_memory=device.type == "cuda",
                        prefetch_factor=3 if arguments.workers else None)
    batches, tally, weights = iter(loader), Tally(), answer_weights(device)
    begin = before = time.monotonic()
    leg_steps, window_tokens, window_begin, last_save = 0, 0, begin, begin
    while progress.stage < len(STAGES) and time.monotonic() - begin < arguments.leg:
        window_tokens += (seen := train_step(model, optimiser, batches, progress, tally, weights))
        if leg_steps % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock follows the work
        now = time.monotonic()
        if leg_steps >= 3:  # the first steps compile
            progress.spent += (now - before) * arguments.haste
            progress.seconds += now - before
        before = now
        progress.tokens, progress.step, leg_steps = progress.tokens + seen, progress.step + 1, leg_steps + 1
        if leg_steps % arguments.log_every == 0:
            stage = STAGES[progress.stage].name
            print(f"{stage} step {progress.step} {progress.seconds:.0f}s rate {progress.rate():.3f} "
                  f"{progress.tokens / 1e6:.0f}M tokens, {window_tokens / (now - window_begin) / 1e6:.2f}M/s", flush=True)
            print("\n".join(tally.lines()), flush=True)
            window_tokens, window_begin = 0, now
        if progress.spent >= STAGES[progress.stage].seconds:
            print(f"stage {STAGES[progress.stage].name} done: step {progress.step}, {progress.tokens} tokens, "
                  f"{progress.seconds:.0f}s", flush=True)
            progress.stage, progress.spent = progress.stage + 1, 0.0
            shared.value = min(progress.stage, len(STAGES) - 1)
        if now - last_save > 60:
            save(arguments.checkpoint, model, optimiser, progress)
            last_save = now
    save(arguments.checkpoint, model, optimiser, progress)
    print(f"leg done: {progress}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="folder that tokenizer.py wrote")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--leg", type=float, default=math.inf, help="stop after so many seconds")
    parser.add_argument("--weights", type=Path, help="model.safetensors to begin from when there is no checkpoint")
    parser.add_argument("--stage", default="A", help="with --weights: the stage to begin in")
    parser.add_argument("--spent", type=float, default=0.0, help="with --weights: seconds of that stage already done")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--micro-tokens", type=int, default=131_072)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--haste", type=float, default=1.0, help="for tests: stages end so many times sooner")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
