#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks many questions by `full` and exactly under sparse methods: whether every answer is the same, and how many
drafted tokens were accepted.

  scripts/exact_answers.py build/release/lodestone -m models/pocket --questions 500
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from document_kinds import Maker

KINDS = ("prose", "code", "table", "list", "log")


def run(command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def questions_of(text, known, count, seed):
    """Half of them about facts, half that quote the text and so lead to longer answers."""
    draw = random.Random(seed)
    lines = [line for line in text.split("\n") if len(line) > 20]
    quoted = [f"How does the text go on: {draw.choice(lines)[:60]}" for _ in range(count - count // 2)]
    return [q for q, _ in draw.sample(known, min(count // 2, len(known)))] + quoted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=10000, help="of a document")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--predict", type=int, default=32, help="tokens of an answer")
    parser.add_argument("-a", dest="specs", action="append", default=[])
    args = parser.parse_args()
    specs = args.specs or ["squeezed:sparsity=0.9", "kmeans", "streaming"]
    print("| text | drafted under | questions | same | drafted | accepted | tokens a dense step |")
    print("|---" * 7 + "|")
    different = 0
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            text, known = Maker(kind).document(kind, args.tokens, lambda piece: len(piece) / 2.6)
            file, context = pathlib.Path(folder) / "text.txt", pathlib.Path(folder) / "text.lode"
            file.write_text(text)
            index = [args.lodestone, "index", "-m", args.model, "-f", file, "-o", context, "--json", "--quiet"]
            run(index + [part for spec in specs for part in ("-a", spec)])
            asked = "\n".join(questions_of(text, known, args.questions // len(KINDS), kind))
            command = [args.lodestone, "ask", context, "--json", "--quiet", "-n", str(args.predict), "--device", "cpu"]
            full = run([*command, "-a", "full"], asked)["answers"]
            for spec in specs:
                exact = run([*command, "-a", spec, "--exact"], asked)["answers"]
                different += report(kind, spec, full, exact)
    sys.exit(1 if different else 0)


def report(kind, spec, full, exact):
    same = sum(
        a["answer"] == b["answer"] and a["tokens_generated"] == b["tokens_generated"] for a, b in zip(full, exact)
    )
    drafted = sum(a["exact"]["drafted"] for a in exact)
    accepted = sum(a["exact"]["accepted"] for a in exact)
    steps = sum(a["exact"]["dense_steps"] for a in exact)
    tokens = sum(a["tokens_generated"] for a in exact)
    share = f"{100 * accepted / max(1, drafted):.1f} %"
    print(f"| {kind} | {spec} | {len(full)} | {same} | {drafted} | {share} | {tokens / max(1, steps):.1f} |", flush=True)
    return len(full) - same


if __name__ == "__main__":
    main()
