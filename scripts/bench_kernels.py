#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_kernels.py [SPEC...]

The GPU's microseconds of `Selector.attend` with tensors of PyTorch, by PyTorch's profiler: from the first kernel of a call that
chooses to the last that attends, and what a call of Python has besides (`arrive` brings its rows, `depart` rounds its answer).
128k keys in bfloat16, 8 KV heads of 128 numbers, one query of 16 heads, normal numbers; calls take turns over ten layers, so that none finds its
keys in the GPU's caches. Beside it stands `apart_us` of

    lodestone bench attention --device cuda --shape L1q16kv8d128 --context 128k --kv-type bf16 -a SPEC... --json

Needs torch with CUDA, and `lodestone` built with CUDA in PYTHONPATH."""

import sys
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

import lodestone

KEYS, QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS, ROUNDS = 131072, 16, 8, 128, 10, 8
BESIDES = ("arrive_kernel", "depart_kernel")
SPECS = ["kmeans", "hyperplanes:budget=1024", "streaming:window=131000"]


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def kernels_of(call):
    """[calls][kernels] of (name, begin, end) in us; every call from an idle GPU."""
    for layer in range(LAYERS):
        call(layer)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in range(ROUNDS * LAYERS):
            call(i % LAYERS)
            torch.cuda.synchronize()
    found = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.lower().startswith("mem")]
    found = sorted(((e.name, e.time_range.start, e.time_range.end) for e in found), key=lambda kernel: kernel[1])
    each, rest = divmod(len(found), ROUNDS * LAYERS)
    if rest != 0:
        sys.exit(f"bench_kernels.py: expected as many kernels in every call, found {len(found)} in {ROUNDS * LAYERS}")
    calls = [found[i : i + each] for i in range(0, len(found), each)]
    if any([kernel[0] for kernel in call] != [kernel[0] for kernel in calls[0]] for call in calls):
        sys.exit("bench_kernels.py: expected the same kernels in every call, found others")
    return calls


def main():
    torch.manual_seed(0)
    keys, values = [[normal(KV_HEADS, KEYS, HEAD_DIM) for _ in range(LAYERS)] for _ in range(2)]
    queries = [normal(1, QUERY_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    out = torch.empty_like(queries[0])
    print(f"{torch.cuda.get_device_name()}; us of a call: choice and attention, arrive, depart", flush=True)
    for spec in sys.argv[1:] or SPECS:
        layers = [lodestone.Selector(spec, QUERY_HEADS, KV_HEADS, HEAD_DIM, layer=i) for i in range(LAYERS)]
        for i, layer in enumerate(layers):
            layer.build(keys[i][:, :-1], values[i][:, :-1])
        calls = kernels_of(lambda i, layers=layers: layers[i].attend(queries[i], KEYS - 1, keys[i], values[i], out=out))
        own = [[kernel for kernel in call if not any(word in kernel[0] for word in BESIDES)] for call in calls]
        span = median(max(end for _, _, end in call) - call[0][1] for call in own)
        besides = [median(sum(e - b for name, b, e in call if word in name) for call in calls) for word in BESIDES]
        print(f"{spec:32} {span:8.2f} {besides[0]:6.2f} {besides[1]:6.2f}", flush=True)
        for at in range(len(calls[0])):
            name = calls[0][at][0].replace("(anonymous namespace)::", "").split("(")[0].removeprefix("void ").removeprefix("lode::cuda::")
            print(f"    {median(call[at][2] - call[at][1] for call in calls):8.2f}  {name}", flush=True)


if __name__ == "__main__":
    main()
