#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks documents of several kinds and lengths under `auto` and `full`: score, bytes, time a token, and what auto took.

  scripts/auto_quality.py build/release/lodestone -m models/pocket                                  # twelve documents, 2k to 128k
  scripts/auto_quality.py build/release/lodestone -m models/pocket --documents prose:8192 --questions 40 --device cpu
"""

import argparse
import json
import pathlib
import random
import subprocess
import statistics
import sys
import tempfile

from document_kinds import KINDS, Maker

TWELVE = ("prose:2048 prose:126000 code:8192 code:65536 table:4096 table:126000 list:16384 list:65536 log:32768 log:98304 "
          "mixture:24576 mixture:118000").split()
# Characters a token of the pocket model; the length that comes out is printed.
PER_TOKEN = {"prose": 3.45, "code": 1.8, "table": 1.92, "list": 2.19, "log": 1.71, "mixture": 2.5}


def run(command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def ask(args, context, specs, questions):
    command = [args.lodestone, "ask", context, "--json", "--quiet", "-n", "12", "--device", args.device]
    for spec in specs:
        command += ["-a", spec]
    answers = run(command, "\n".join(q for q, _ in questions))["answers"]
    return [answers[i :: len(specs)] for i in range(len(specs))]


def score(answers, questions):
    right = sum(number in a["answer"] for a, (_, number) in zip(answers, questions))
    return 100 * right / len(questions)


def ms_token(answers):
    """Of the steps that decode, the median over the answers: one that waits for another program does not count."""
    return 1000 * statistics.median(a["decode_seconds"] / max(1, a["tokens_generated"]) for a in answers)


def kind_and_tokens(text):
    kind, _, tokens = text.partition(":")
    if kind not in KINDS or not tokens.isdigit():
        raise argparse.ArgumentTypeError(f"expected KIND:TOKENS with a kind of {', '.join(KINDS)}, got '{text}'")
    return kind, int(tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--documents", type=kind_and_tokens, nargs="+", default=[kind_and_tokens(d) for d in TWELVE])
    parser.add_argument("--questions", type=int, default=200, help="of a document, where it has as many facts")
    parser.add_argument("-a", dest="specs", action="append", default=[], help="asked beside auto and full")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    heads = "text|tokens|questions|auto takes|error|agreement|auto|full|bytes of full|time a token, of full".split("|") + args.specs
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|", flush=True)
    rows = []
    for kind, tokens in args.documents:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(args, kind, tokens, pathlib.Path(folder)))
    gains = [1 / density for _, density, _ in rows]
    print(f"{len(rows)} documents: auto's score less full's is {min(lost for lost, _, _ in rows):+.1f} points at worst; "
          f"attention bytes: {statistics.median(gains):.1f} times fewer in the median; "
          f"time a token at worst {max(slow for _, _, slow in rows):.2f} of full's")


def measure(args, kind, tokens, folder):
    """Prints a document's row; (score of auto less full's, share of full's bytes, share of full's time a token)."""
    maker = Maker(f"{args.seed} {kind} {tokens}")
    text, questions = maker.document(kind, tokens, lambda piece: len(piece) / PER_TOKEN[kind])
    (folder / "text.txt").write_text(text)
    context = folder / "text.lode"
    indexed = run([args.lodestone, "index", "-m", args.model, "-f", folder / "text.txt", "-o", context, "--json", "--quiet",
                   "--device", args.device])
    asked = random.Random(args.seed).sample(questions, min(args.questions, len(questions)))
    auto, full, *others = ask(args, context, ["auto", "full", *args.specs], asked)
    taken = auto[0]["attention"]
    found = [m for m in indexed["auto"]["methods"] if m["attention"] == taken]
    figures = [f"{found[0]['error']:.3f}", f"{found[0]['agreement']:.3f}"] if found else ["", ""]
    density = statistics.mean(a["density"] for a in auto)
    slow = ms_token(auto) / ms_token(full)
    scores = [score(answers, asked) for answers in (auto, full, *others)]
    cells = [kind, indexed["tokens"], len(asked), taken, *figures, *(f"{s:.1f}" for s in scores[:2]), f"{100 * density:.1f} %",
             f"{slow:.2f}", *(f"{s:.1f}" for s in scores[2:])]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for m in indexed["auto"]["methods"]:
        print(f"    {m['attention']}: error {m['error']:.3f} agreement {m['agreement']:.3f} density {m['density']:.3f}",
              file=sys.stderr, flush=True)
    return scores[0] - scores[1], density, slow


if __name__ == "__main__":
    main()
