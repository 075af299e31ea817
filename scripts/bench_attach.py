#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_attach.py [--tokens N] [--attention SPEC ...] [--rounds N] [--steps N] [--layers N] [--kernels]

Decode of a random transformers model of Qwen3-1.7B's shape (bf16) on a GPU, behind a document of N tokens (131,072), one token a
step: under SDPA, and as `lodestone.hf.attach` computes it under each spec. They take turns, and none copies its cache. Of each the
median milliseconds of a step by the clock, the GPU's milliseconds by PyTorch's profiler, all of them and those of attention, and how
much of the GPU's memory the document takes with its index. Needs torch with CUDA, transformers, and `lodestone` built with CUDA in
PYTHONPATH."""

import argparse
import statistics
import time

import torch
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

from lodestone import hf

SHAPE = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, max_position_embeddings=1 << 20, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip


PROFILED = 5  # steps
CHOICE, FLASH = "SDPA, PyTorch's choice", "SDPA, flash"


def marked(attention):
    """The attention function, named in the profile."""

    def run(*args, **kwargs):
        with record_function("attention"):
            return attention(*args, **kwargs)

    return run


def gpu_work(events):
    """What the GPU did, and of it what belongs to `marked` code: [(name, begin, end)] each, in microseconds."""
    of_gpu = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    ranges = [e[1:] for e in of_gpu if e[0] == "attention"]
    work = [e for e in of_gpu if e[0] != "attention"]
    named = [e for e in work if any(begin <= e[1] and e[2] <= end for begin, end in ranges)]
    if not named:
        raise SystemExit("expected a profile that names attention's kernels, found none: this profiler does not see the GPU")
    return work, named


def busy_milliseconds(work):
    """In which the GPU did any of it: kernels overlap where one starts early and waits for the one in front."""
    busy, last = 0.0, 0.0
    for _, begin, end in sorted(work, key=lambda e: e[1]):
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    return busy / 1e3


def print_kernels(work, steps, layers):
    """Microseconds a layer of each kernel, its waiting for the one in front included; the longest first."""
    of_name = {}
    for name, begin, end in work:
        of_name.setdefault(name, []).append(end - begin)
    for name, times in sorted(of_name.items(), key=lambda item: -sum(item[1])):
        print(f"    {sum(times) / (steps * layers):8.2f} us in {len(times) / (steps * layers):.2f} launches  {name[:110]}", flush=True)


class Steps:
    """Decoding steps of one token behind a document."""

    def __init__(self, name, document):
        self.name, self.document, self.times = name, document, []
        self.token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")

    def run(self, count):
        torch.backends.cuda.enable_cudnn_sdp(self.name != FLASH)
        cache = {self.document.attached.cache_argument: self.document.cache}
        attached = self.document.attached
        with torch.no_grad():
            for _ in range(count):
                attached.model(input_ids=self.token, use_cache=True, **cache)
        torch.cuda.synchronize()

    def take_turn(self, steps):
        """Their milliseconds by the clock, behind a few that are not counted."""
        self.run(2)
        for _ in range(steps):
            start = time.perf_counter()
            self.run(1)
            self.times.append((time.perf_counter() - start) * 1e3)
        self.document.roll_back()

    def profiled(self):
        """What the GPU did in PROFILED steps, all of it and in attention."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.run(PROFILED)
        self.document.roll_back()
        return gpu_work(seen.events())


def free_gib():
    """Of the GPU's memory, in GiB, without what PyTorch keeps for later."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1 << 17)
    parser.add_argument("--attention", nargs="+", default=["kmeans"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=9, help="of each round")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--kernels", action="store_true", help="also attention's kernels")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE | {"num_hidden_layers": options.layers})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, SHAPE["vocab_size"], (1, options.tokens))
    hf._attention = marked(hf._attention)
    print(f"{torch.cuda.get_device_name()}, {options.tokens} tokens; ms a step", flush=True)
    rows = []
    for spec in ["full", *options.attention]:
        free, start = free_gib(), time.perf_counter()
        document = hf.attach(model, spec).read(ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"{spec}: read in {seconds:.1f} s, takes {free - free_gib():.1f} GiB of the GPU's memory", flush=True)
        rows += [Steps(name, document) for name in ((CHOICE, FLASH) if spec == "full" else (spec,))]
    for _ in range(options.rounds):
        for row in rows:
            row.take_turn(options.steps)
    print(f"{'attention':28} {'clock':>8} {'GPU':>8} {'GPU in attention':>18}", flush=True)
    for row in rows:
        all_work, attention = row.profiled()
        gpu, own = (busy_milliseconds(work) / PROFILED for work in (all_work, attention))
        print(f"{row.name:28} {statistics.median(row.times):8.2f} {gpu:8.2f} {own:18.3f}", flush=True)
        if options.kernels:
            print_kernels(attention, PROFILED, options.layers)


if __name__ == "__main__":
    main()
