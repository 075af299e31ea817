#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_sdpa.py [PART OF A NAME]

The same table as bench_attention (bench/cuda/attention.cu) for torch's scaled_dot_product_attention, flash and cuDNN: one
query token, bf16, d 128; medians of graph replays that hold enough calls for 3 ms, keys and values rotating over 1.2 GB or
more. Needs torch with CUDA."""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

REPLAYS, ROTATED, DIM = 9, 1200 << 20, 128
SHAPES = [  # name, KV heads, query heads, keys
    ("small-2k", 1, 4, 2 << 10),
    ("small-8k", 1, 4, 8 << 10),
    ("small8-2k", 8, 32, 2 << 10),
    ("small8-8k", 8, 32, 8 << 10),
    ("B1-171k", 1, 4, 171000),
    ("B2-32k", 8, 32, 32 << 10),
    ("B2-128k", 8, 32, 128 << 10),
    ("B2-512k", 8, 32, 512 << 10),
    ("B2-1M", 8, 32, 1 << 20),
    ("B3-128k", 32, 32, 128 << 10),
    ("B3-512k", 32, 32, 512 << 10),
]


def time_of(call):
    """Microseconds of one call; call(i) enqueues the i-th."""
    calls = 8
    stream = torch.cuda.Stream()
    while True:
        with torch.cuda.stream(stream):
            call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        times = []
        for _ in range(REPLAYS + 2):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        median = sorted(times[2:])[REPLAYS // 2]
        if median >= 3000 or calls >= 4096:
            return median / calls
        calls *= 2


def bench(name, kv_heads, query_heads, keys):
    size = keys * kv_heads * DIM * 4
    places = max(1, -(-ROTATED // size))
    k, v = (torch.empty(places, kv_heads, keys, DIM, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    q = torch.randn(1, query_heads, 1, DIM, dtype=torch.bfloat16, device="cuda")
    for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        def call(i):
            at = i % places
            F.scaled_dot_product_attention(q, k[at : at + 1], v[at : at + 1], enable_gqa=query_heads > kv_heads)

        try:
            with sdpa_kernel(backend):
                us = time_of(call)
        except RuntimeError as error:
            print(f"{name:<10} {label}: {str(error).splitlines()[0]}")
            continue
        print(
            f"{name:<10} {kv_heads:3d}/{query_heads:<3d} {keys:9d} {label:<5} {1:8.4f} {size / 1e6:9.1f} MB {us:9.2f} us  "
            f"{size / us / 1e6:5.2f} TB/s",
            flush=True,
        )


def main():
    if not torch.cuda.is_available():
        sys.exit("bench_sdpa.py: expected a GPU that torch can use, found none")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for shape in SHAPES:
        if len(sys.argv) < 2 or sys.argv[1] in shape[0]:
            bench(*shape)


if __name__ == "__main__":
    main()
