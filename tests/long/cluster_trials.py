#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks on one machine: 200 questions over 1, 2, 3, 4 and 7 of them, and ranks that are killed or stopped at random moments.

    tests/long/cluster_trials.py build/release/lodestone [--questions 200] [--failures 40] [--seed 1]

Prints one JSON object; exits 1 when an answer differs or a failure is not reported.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WORDS = ("profession", "animal", "town", "instrument", "birthday", "habit", "house", "garden")


def questions_about(text: str, count: int, rng: random.Random) -> list[str]:
    names = sorted(set(re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text)))
    return [f"What is the {rng.choice(WORDS)} of {rng.choice(names)}?" for _ in range(count)]


def launch(program: str, count: int, *arguments: str) -> list[str]:
    own = [program, "ask", *arguments, "--threads", "1", "--quiet"]
    return own if count == 1 else ["mpirun", "--oversubscribe", "-n", str(count), *own]


def answers(program: str, count: int, context: str, questions: list[str]) -> list[dict]:
    run = subprocess.run(launch(program, count, context, *questions, "-a", "full", "-a", "topk:window=64", "--json", "-n", "8"),
                         env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"{count} ranks: exit code {run.returncode}: {run.stderr[:2000]}")
    return json.loads(run.stdout)["answers"]


def compare(program: str, context: str, questions: list[str]) -> dict:
    alone = answers(program, 1, context, questions)
    figures = {}
    for count in (2, 3, 4, 7):
        shared = answers(program, count, context, questions)
        different = [(a["question"], a["attention"], a["answer"], b["answer"]) for a, b in zip(alone, shared, strict=True)
                     if (a["answer"], a["tokens_generated"]) != (b["answer"], b["tokens_generated"])]
        chosen = sum(a["selectivity"] != b["selectivity"] for a, b in zip(alone, shared, strict=True))
        tokens = sum(a["tokens_prefilled"] + a["tokens_generated"] - 1 for a in shared)
        figures[count] = {"answers": len(shared), "different": different, "other_selectivity": chosen,
                          "bytes_a_token_and_rank": sum(a["ranks"]["bytes"] for a in shared) / tokens / count,
                          "messages_a_rank": sum(a["ranks"]["messages"] for a in shared) / count}
        print(f"{count} ranks: {len(different)} of {len(shared)} answers differ", file=sys.stderr)
    return figures


def ranks_of(launcher: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def fail_once(program: str, context: str, questions: list[str], number: int, rng: random.Random) -> dict:
    """Kills or stops one of three ranks at a random moment of a run over many questions."""
    how = signal.SIGKILL if number % 2 == 0 else signal.SIGSTOP
    run = subprocess.Popen(launch(program, 3, context, *questions, "-a", "full", "-n", "8"), env=ENVIRONMENT,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    moment = rng.uniform(0.3, 4.0)
    time.sleep(moment)
    ranks = ranks_of(run.pid)
    victim = rng.randrange(len(ranks)) if ranks else -1
    if run.poll() is not None or victim < 0:
        run.kill()
        run.communicate()
        return {"missed": True}
    began = time.monotonic()
    os.kill(ranks[victim], how)
    try:
        _, error = run.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        run.kill()
        error = "none: did not end"
    return {"signal": how.name, "rank": victim, "moment": round(moment, 2), "seconds": round(time.monotonic() - began, 2),
            "code": run.returncode, "reason": "no sign of life" in error or "exited on signal" in error or "interrupted" in error,
            "stderr": error[:300]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--characters", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    rng = random.Random(flags.seed)
    text = (ROOT / "demo/document.txt").read_text(encoding="utf-8")[:flags.characters]
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "text.txt").write_text(text, encoding="utf-8")
        context = f"{folder}/text.lode"
        subprocess.run([flags.program, "index", "-m", str(ROOT / "models/pocket"), "-f", f"{folder}/text.txt", "-o", context,
                        "-a", "topk:window=64", "--quiet"], check=True, capture_output=True)
        questions = questions_about(text, flags.questions, rng)
        figures = compare(flags.program, context, questions) if flags.questions else {}
        many = questions_about(text, 400, rng)
        failures = [fail_once(flags.program, context, many, n, rng) for n in range(flags.failures)]
        left = sorted(path.name for path in pathlib.Path(folder).iterdir())
        again = answers(flags.program, 2, context, many[:1])
    failures = [f for f in failures if "missed" not in f]
    bad = [f for f in failures if not f["reason"] or f["code"] == 0]
    print(json.dumps({"ranks": figures, "failures": len(failures), "unreported": bad,
                      "slowest_seconds": {s: max((f["seconds"] for f in failures if f["signal"] == s), default=0)
                                          for s in ("SIGKILL", "SIGSTOP")},
                      "files_left": left, "asked_again": len(again)}, indent=1))
    return 1 if bad or any(f["different"] for f in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
