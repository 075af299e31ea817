#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Texts that are joined when they are asked (`ask A.lode B.lode --union`) beside one reading of all.

Texts with facts in them are indexed each by itself and all together. Every question is asked of the union, of the one reading,
and of the text that holds the fact alone.

  scripts/joined_texts.py build/release/lodestone -m models/pocket --texts 2 --tokens 2048 --questions 20
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
    done = subprocess.run([str(word) for word in command], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr[-500:]}")
    return json.loads(done.stdout), done.stderr


def index(flags, files, output):
    named = [word for file in files for word in ("-f", file)]
    return run([flags.lodestone, "index", "-m", flags.model, *named, "-o", output, "-a", "full", "--headings", "off", "--json", "--quiet"])[0]


def ask(flags, contexts, questions, *more):
    answers, said = run([flags.lodestone, "ask", *contexts, *questions, "--json", "-n", "16", *more])
    return answers["answers"], said


def measure(flags, kind, folder):
    parts, questions = [], []
    for n in range(flags.texts):
        text, known = Maker(f"{flags.seed} {kind} {n}").document(kind, flags.tokens, lambda piece: len(piece) / 2.6)
        parts.append(folder / f"{n}.txt")
        parts[-1].write_text(text, encoding="utf-8")
        questions += [(n, *pair) for pair in random.Random(n).sample(known, min(flags.questions // flags.texts, len(known)))]
    contexts = [folder / f"{n}.lode" for n in range(flags.texts)]
    for part, context in zip(parts, contexts):
        index(flags, [part], context)
    tokens = index(flags, parts, folder / "all.lode")["tokens"]
    asked = [question for _, question, _ in questions]
    union, said = ask(flags, contexts, asked, "--union", "-a", flags.attention)
    one, _ = ask(flags, [folder / "all.lode"], asked, "-a", flags.attention)
    alone = []
    for n, context in enumerate(contexts):
        alone += ask(flags, [context], [question for where, question, _ in questions if where == n], "-a", "full", "--quiet")[0]
    counts = [sum(number in a["answer"] for a, (_, _, number) in zip(answers, questions)) for answers in (one, union, alone)]
    same = sum(a["answer"] == b["answer"] for a, b in zip(one, union))
    drift = [line.rsplit("are ", 1)[1].split(" %")[0] for line in said.splitlines() if "joined without" in line]
    print(f"| {kind} | {tokens} | {', '.join(drift)} | {len(asked)} | " + " | ".join(map(str, counts)) + f" | {same} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--questions", type=int, default=20, help="about all texts together")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("-a", "--attention", default="full")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    print("| text | tokens in all | drift, % | questions | right after one reading | joined | each alone | one reading and joined the same |")
    print("|---" * 8 + "|", flush=True)
    for kind in flags.kinds:
        with tempfile.TemporaryDirectory() as folder:
            measure(flags, kind, pathlib.Path(folder))


if __name__ == "__main__":
    main()
