#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks documents of several kinds and lengths under `auto` and `full`: score, bytes, and what auto took.

  scripts/auto_quality.py build/release/lodestone -m models/pocket --tokens 2048 8192 32768 --questions 40
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from document_kinds import KINDS, Maker


def run(command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def ask(lodestone, context, specs, questions):
    command = [lodestone, "ask", context, "--json", "--quiet", "-n", "12", "--device", "cpu"]
    for spec in specs:
        command += ["-a", spec]
    answers = run(command, "\n".join(q for q, _ in questions))["answers"]
    return [answers[i :: len(specs)] for i in range(len(specs))]


def score(answers, questions):
    right = sum(number in a["answer"] for a, (_, number) in zip(answers, questions))
    return 100 * right / len(questions)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384, 32768])
    parser.add_argument("--questions", type=int, default=40, help="of a document")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("-a", dest="specs", action="append", default=[], help="asked beside auto and full")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| text | tokens | auto takes | error | agreement | auto | full | bytes of full |" + " ".join(f" {s} |" for s in args.specs))
    print("|---" * (8 + len(args.specs)) + "|", flush=True)
    for kind in args.kinds:
        for tokens in args.tokens:
            with tempfile.TemporaryDirectory() as folder:
                measure(args, kind, tokens, pathlib.Path(folder))


def measure(args, kind, tokens, folder):
    maker = Maker(f"{args.seed} {kind} {tokens}")
    # Some 3 bytes a token of such texts: the length that comes out is printed.
    text, questions = maker.document(kind, tokens, lambda piece: len(piece) / 2.6)
    (folder / "text.txt").write_text(text)
    context = folder / "text.lode"
    indexed = run([args.lodestone, "index", "-m", args.model, "-f", folder / "text.txt", "-o", context, "--json", "--quiet",
                   "--device", "cpu"])
    asked = random.Random(args.seed).sample(questions, min(args.questions, len(questions)))
    asked_by = ask(args.lodestone, context, ["auto", "full", *args.specs], asked)
    auto = asked_by[0]
    taken = auto[0]["attention"]
    found = [m for m in indexed["auto"]["methods"] if m["attention"] == taken]
    figures = [f"{found[0]['error']:.3f}", f"{found[0]['agreement']:.3f}"] if found else ["", ""]
    density = sum(a["density"] for a in auto) / len(auto)
    cells = [kind, indexed["tokens"], taken, *figures, f"{score(auto, asked):.1f}", f"{score(asked_by[1], asked):.1f}",
             f"{100 * density:.1f} %", *(f"{score(a, asked):.1f}" for a in asked_by[2:])]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for m in indexed["auto"]["methods"]:
        print(f"    {m['attention']}: error {m['error']:.3f} agreement {m['agreement']:.3f} density {m['density']:.3f}",
              file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
