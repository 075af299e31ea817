#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench_faiss.py: the time that faiss (Flat and IVF, f32) takes for the searches of one decode step.

One layer of 8 KV heads with 4 query heads each: 32 searches for the 100 best keys, each a call of its own with
one query, spread over threads. Keys and queries are made up by the rules of src/lab/bench/ood_vectors.cc (another
draw). Beside it, from the same run, what `lodestone bench attention` says with --program.

    pip install faiss-cpu numpy
    scripts/bench_faiss.py --program build/release/lodestone --threads 16
"""
import argparse
import concurrent.futures
import subprocess
import time

import faiss
import numpy as np

TOPICS, GROUP, TOP = 1024, 4, 100
KEY_STRAY, ASKED_STRAY, QUERY_STRAY, ASKED_LENGTH, TOLD_WEIGHT, NOISE = 0.2, 0.6, 0.6, 0.6, 0.2, 0.2


class Head:
    """Keys and queries of one KV head, as OodVectors makes them."""

    def __init__(self, rng, d):
        self.rng, self.d = rng, d
        self.told = max(2, d * 3 // 16)
        self.asked = max(1, self.told // 2)
        seen = self.told + self.asked
        self.basis = self.normal(seen, d) / np.sqrt(d)
        self.key_topics = self.normal(TOPICS, self.told)
        self.asked_topics = self.normal(TOPICS, self.asked)
        self.query_topics = self.normal(GROUP, TOPICS, seen)
        self.key_origin = self.normal(d) / np.sqrt(d)
        self.query_origin = self.normal(GROUP, d) / np.sqrt(d)
        weight = 1.0 / np.arange(1, TOPICS + 1)
        self.weight = weight / weight.sum()

    def normal(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32)

    def stray(self, topics, far, n):
        chosen = topics[self.rng.choice(TOPICS, n, p=self.weight)]
        return np.sqrt(1 - far * far) * chosen + far * self.normal(*chosen.shape)

    def spread(self, seen, origin):
        noise = NOISE * np.sqrt(seen.shape[1] / self.d)
        return (origin + seen @ self.basis + noise * self.normal(len(seen), self.d)).astype(np.float32)

    def keys(self, n):
        asked = ASKED_LENGTH * self.stray(self.asked_topics, ASKED_STRAY, n)
        return self.spread(np.hstack([self.stray(self.key_topics, KEY_STRAY, n), asked]), self.key_origin)

    def queries(self, head, n):
        seen = self.stray(self.query_topics[head], QUERY_STRAY, n)
        seen[:, : self.told] *= TOLD_WEIGHT
        return self.spread(seen, self.query_origin[head])


def step_time(indexes, queries, threads, seconds):
    """Median seconds of all searches of one step, and what they found [steps, searches, TOP]."""

    def search(job):
        head, q = job
        faiss.omp_set_num_threads(1)  # of this thread
        return indexes[head // GROUP].search(q, TOP)[1][0]

    times, found = [], []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds or len(times) < 3:
            step = queries[len(times) % len(queries)]
            start = time.perf_counter()
            result = list(pool.map(search, [(head, q[None]) for head, q in enumerate(step)]))
            times.append(time.perf_counter() - start)
            if len(found) < len(queries):
                found.append(result)
    return float(np.median(times)), np.array(found)


def recall(found, exact):
    n = min(len(found), len(exact))
    pairs = zip(found[:n].reshape(-1, TOP), exact[:n].reshape(-1, TOP))
    return float(np.mean([len(np.intersect1d(a, b)) / TOP for a, b in pairs]))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--context", type=int, default=131072)
    arguments.add_argument("--kv-heads", type=int, default=8)
    arguments.add_argument("--dim", type=int, default=128)
    arguments.add_argument("--lists", type=int, default=1024)
    arguments.add_argument("--probes", type=int, default=16, help="of IVF, at first")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=3.0)
    arguments.add_argument("--program", help="lodestone, to be measured beside faiss")
    options = arguments.parse_args()
    rng = np.random.default_rng(1)
    heads = [Head(rng, options.dim) for _ in range(options.kv_heads)]
    keys = [head.keys(options.context) for head in heads]
    steps = 16
    asked = [heads[h // GROUP].queries(h % GROUP, steps) for h in range(GROUP * options.kv_heads)]
    queries = np.stack(asked, axis=1)  # [steps, Hq, d]

    flat = [faiss.IndexFlatIP(options.dim) for _ in heads]
    for index, own in zip(flat, keys):
        index.add(own)
    seconds, exact = step_time(flat, queries, options.threads, options.seconds)
    print(f"faiss {faiss.__version__} Flat: {seconds * 1e6:,.0f} us a step of {queries.shape[1]} searches", flush=True)

    inverted = []
    begin = time.perf_counter()
    for own in keys:
        index = faiss.index_factory(options.dim, f"IVF{options.lists},Flat", faiss.METRIC_INNER_PRODUCT)
        index.train(own[:: max(1, len(own) // (64 * options.lists))].copy())
        index.add(own)
        inverted.append(index)
    print(f"faiss IVF{options.lists}: built in {time.perf_counter() - begin:.1f} s", flush=True)
    probes = options.probes
    while True:
        for index in inverted:
            index.nprobe = probes
        seconds, found = step_time(inverted, queries, options.threads, options.seconds)
        share = recall(found, exact)
        print(f"faiss IVF{options.lists}, nprobe {probes}: {seconds * 1e6:,.0f} us a step, recall@{TOP} {share:.3f}", flush=True)
        if share >= 0.95 or probes >= options.lists:
            break
        probes = min(options.lists, probes * 3 // 2)

    if options.program:
        shape = f"L1q{GROUP * options.kv_heads}kv{options.kv_heads}d{options.dim}"
        command = [options.program, "bench", "attention", "--device", "cpu", "-t", str(options.threads), "--shape", shape,
                   "--context", str(options.context), "--kv", "ood", "--kv-type", "bf16", "--recall", str(TOP),
                   "--seconds", str(options.seconds), "-a", "topk:k=100,sink=128,window=512", "-a", "retrieval:k=100"]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
