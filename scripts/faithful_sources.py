#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether answers rest on the passages that they cite.

Texts of several kinds with facts in them are indexed and asked. Each right answer is given again without the three passages that
were cited, and without as many others: with faithful sources the first changes the answer and the second does not.

  scripts/faithful_sources.py build/release/lodestone -m models/pocket --tokens 4096 --questions 25
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
    return json.loads(done.stdout)


def measure(flags, kind, seed, folder):
    """Questions, right answers, and of these how many change without their sources and without others."""
    # Some 3 bytes a token of such texts: the length that comes out is printed.
    text, known = Maker(f"{seed} {kind}").document(kind, flags.tokens, lambda piece: len(piece) / 2.6)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    context = folder / "text.lode"
    indexed = run([flags.lodestone, "index", "-m", flags.model, "-f", folder / "text.txt", "-o", context, "-a", "full", "--json", "--quiet"])
    asked = random.Random(seed).sample(known, min(flags.questions, len(known)))
    answers = run([flags.lodestone, "ask", context, "-a", "full", "--check-sources", "--json", "--quiet", "-n", "16"],
                  "\n".join(question for question, _ in asked))["answers"]
    right = [a for a, (_, number) in zip(answers, asked) if number in a["answer"]]
    checked = [a["checked"] for a in right if a["checked"]]
    counts = [len(asked), len(right), sum(c["rests_on_sources"] for c in checked), sum(c.get("rests_on_others", False) for c in checked)]
    print(f"| {kind} | {indexed['tokens']} | " + " | ".join(map(str, counts)) + " |", flush=True)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=25, help="of a text")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    flags = parser.parse_args()
    print("| text | tokens | questions | right | of these changed without their sources | without as many others |")
    print("|---" * 6 + "|", flush=True)
    sums = [0, 0, 0, 0]
    for kind in flags.kinds:
        for seed in flags.seeds:
            with tempfile.TemporaryDirectory() as folder:
                sums = [a + b for a, b in zip(sums, measure(flags, kind, seed, pathlib.Path(folder)))]
    _, right, changed, disturbed = sums
    print("| all | | " + " | ".join(map(str, sums)) + " |")
    print(f"{100 * changed / max(1, right):.1f} % change without their sources, {100 * disturbed / max(1, right):.1f} % without others")


if __name__ == "__main__":
    main()
