#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`estimate --machines` beside runs over 1, 2 and 4 ranks of this machine, and what it says on paper of 1M to 1G tokens.

    tests/long/cluster_costs.py build/release/lodestone [--tokens 16384] [--share 131072]

Ranks have one thread each. Where there are more of them than cores they take turns: the estimate is then multiplied by ranks / cores.
Prints one JSON object.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import cluster_trials

ROOT = cluster_trials.ROOT
MODEL = str(ROOT / "models/pocket")
QUESTION = "What is the profession of Clara Whitaker?"


def run(count: int, *command: str) -> dict:
    return json.loads(cluster_trials.run(cluster_trials.on_one_machine(count, [*command, "--json", "--quiet", "--threads", "1"])))


def estimate(program: str, tokens: int, machines: int, ranks: int, *link: str) -> dict:
    return run(ranks, program, "estimate", "-m", MODEL, "--tokens", str(tokens), "--machines", str(machines), "-a", "topk", *link)


def text_of(tokens: int, folder: str) -> str:
    """The demo's text as often as it takes; about 3.4 bytes a token."""
    text = (ROOT / "demo/document.txt").read_text(encoding="utf-8")
    path = f"{folder}/text.txt"
    pathlib.Path(path).write_text((text * (int(tokens * 3.4) // len(text) + 1))[:int(tokens * 3.4)], encoding="utf-8")
    return path


def beside_runs(program: str, tokens: int, folder: str) -> list[dict]:
    cores = len(os.sched_getaffinity(0))
    text, rows = text_of(tokens, folder), []
    for count in (1, 2, 4):
        file = f"{folder}/{count}.lode"
        indexed = run(count, program, "index", "-m", MODEL, "-f", text, "-o", file, "-a", "topk")
        asked = run(count, program, "ask", file, QUESTION, "-a", "full", "-a", "topk", "-n", "24")["answers"]
        said = estimate(program, indexed["tokens"], count, max(count, 1))
        turns = max(1.0, count / cores)
        row = {"ranks": count, "tokens": indexed["tokens"], "prefill_seconds": indexed["prefill_seconds"],
               "estimated_prefill_seconds": said["prefill_seconds"] * turns}
        for answer, method in zip(asked, said["methods"], strict=True):
            name = answer["attention"].split(":")[0]
            row[f"{name}_ms_token"] = 1e3 * answer["decode_seconds"] / max(1, answer["tokens_generated"] - 1)
            row[f"{name}_estimated_ms_token"] = method["ms_token"] * turns
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    return rows


def on_paper(program: str, share: int, latency: float, bandwidth: float) -> list[dict]:
    rows = []
    for machines in (1, 8, 16, 128, 1024, 8192):
        link = () if machines == 1 else ("--latency", str(latency), "--bandwidth", str(bandwidth))
        said = estimate(program, share * machines - (256 if machines == 1 else 0), machines, 1, *link)
        one = rows[0] if rows else None
        row = {"machines": machines, "tokens": share * machines, "gib_each": said["host_bytes"] / 2**30,
               "prefill_hours": said["prefill_seconds"] / 3600, "prefill_efficiency": said.get("machines", {}).get("prefill_efficiency", 1.0)}
        for method in said["methods"]:
            name = method["attention"].split(":")[0]
            row[f"{name}_ms_token"] = method["ms_token"]
            row[f"{name}_weak_scaling"] = 1 - method.get("ms_communication", 0.0) / method["ms_token"] if one else 1.0
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--share", type=int, default=131072)
    parser.add_argument("--latency", type=float, default=20)
    parser.add_argument("--bandwidth", type=float, default=10)
    parser.add_argument("--part", choices=("runs", "paper", "both"), default="both")
    flags = parser.parse_args()
    program = str(pathlib.Path(flags.program).resolve())
    figures: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        if flags.part != "paper":
            figures["runs"] = beside_runs(program, flags.tokens, folder)
    if flags.part != "runs":
        figures["paper"] = on_paper(program, flags.share, flags.latency, flags.bandwidth)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
