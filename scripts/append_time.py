#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What appending costs: a text grows by equal parts, each appended to what is indexed; seconds of each, beside reading all at once
and beside appending one, two and four parts to the whole.

  scripts/append_time.py build/release/lodestone -m models/pocket --tokens 2048 --parts 10
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time


def run(*command):
    began = time.monotonic()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of a part")
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("-a", "--attention", default="full")
    flags = parser.parse_args()
    print("| tokens | read | prefill, s | whole command, s | us a token read |")
    print("|---" * 5 + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        for n in range(flags.parts):
            prose, _ = run(flags.lodestone, "tasks", "prose", "-m", flags.model, "--tokens", flags.tokens, "--seed", n, "--quiet")
            (place / f"{n}.txt").write_text(prose, encoding="utf-8")
        parts = [word for n in range(flags.parts) for word in ("-f", place / f"{n}.txt")]
        common = ("--json", "--quiet", "--device", "cpu")
        begin = ("index", "-m", flags.model, "-a", flags.attention, *common)
        for n in range(flags.parts):
            words = (*begin, "-f", place / "0.txt", "-o", place / "grown.lode") if n == 0 else (
                "index", "--append", place / "grown.lode", "-f", place / f"{n}.txt", *common)
            show(*run(flags.lodestone, *words))
        print("all at once:")
        show(*run(flags.lodestone, *begin, *parts, "-o", place / "one.lode"))
        print("one, two and four parts more:")
        for more in (1, 2, 4):
            shutil.copy(place / "one.lode", place / "more.lode")
            show(*run(flags.lodestone, "index", "--append", place / "more.lode", *parts[: 2 * more], *common))


def show(out, seconds):
    said = json.loads(out)
    micros = 1e6 * said["prefill_seconds"] / max(1, said["tokens_read"])
    print(f"| {said['tokens']} | {said['tokens_read']} | {said['prefill_seconds']:.2f} | {seconds:.2f} | {micros:.0f} |", flush=True)


if __name__ == "__main__":
    main()
