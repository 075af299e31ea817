#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_calls.py

The host's microseconds of one call of the Python package with tensors of PyTorch on a GPU: the least of ten rounds of 28 calls (a
step of as many layers), each round from an idle GPU. Selectors hold 64 keys, so that the GPU keeps up. Needs torch with CUDA, and
`lodestone` built with CUDA in PYTHONPATH."""

import time

import numpy as np
import torch

import lodestone

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 28, 16, 8, 128


def host_microseconds(call):
    """call(i) is of layer i."""
    best = float("inf")
    for _ in range(11):  # the first makes what is made once
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(LAYERS):
            call(i)
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / LAYERS * 1e6


def main():
    torch.manual_seed(0)
    on_gpu = {"device": "cuda"}
    q = torch.randn(QUERY_HEADS, HEAD_DIM, **on_gpu)
    k = torch.randn(KV_HEADS, 128, HEAD_DIM, **on_gpu).bfloat16()
    v, batch = k.clone(), q[None].clone()
    state = torch.empty_like(q), torch.empty(QUERY_HEADS, **on_gpu)
    one, scores, rows = torch.empty_like(batch), torch.randn(5000, **on_gpu), torch.empty(9, dtype=torch.int32, **on_gpu)
    plan = lodestone.plan(np.array([0, 64], np.int32), np.arange(64, dtype=np.int32), QUERY_HEADS, KV_HEADS)
    first, second = lodestone.attend(q, k, v), lodestone.attend(q, k, v)
    calls = {
        "attend(out=)": lambda i: lodestone.attend(q, k, v, out=state),
        "attend": lambda i: lodestone.attend(q, k, v),
        "plan.run(out=)": lambda i: plan.run(batch, k, v, out=one),
        "merge(out=)": lambda i: lodestone.merge(first, second, out=state),
        "top_k(out=)": lambda i: lodestone.top_k(scores, 9, out=rows),
        "torch: scaled_dot_product_attention": lambda i: torch.nn.functional.scaled_dot_product_attention(
            one_query, k[None], v[None], enable_gqa=True
        ),
    }
    one_query = q[None, :, None].bfloat16()
    for spec in ("kmeans:probes=4", "hyperplanes:budget=8", "topk:k=8"):
        layers = [lodestone.Selector(f"{spec},sink=1,window=8", QUERY_HEADS, KV_HEADS, HEAD_DIM, layer=i) for i in range(LAYERS)]
        for layer in layers:
            layer.build(k[:, :64], v[:, :64])
        calls[f"Selector.attend(out=), {spec}"] = lambda i, layers=layers: layers[i].attend(batch, 70, k, v, out=one)
    print(f"{torch.cuda.get_device_name()}; us a call", flush=True)
    for name, call in calls.items():
        print(f"{name:42} {host_microseconds(call):7.1f}", flush=True)


if __name__ == "__main__":
    main()
