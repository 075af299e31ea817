#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks: 200 questions over 1, 2, 3, 4 and 7 of them, and failures at random moments on hosts of their own (network namespaces).

    tests/long/cluster_trials.py build/release/lodestone [--questions 200] [--failures 40] [--seed 1] [--tokens 3500]

A rank is killed or stopped, or its host's link is cut or delayed, while ranks answer or index. Where there are no network
namespaces all ranks are on one machine, and only killed and stopped. Prints one JSON object; exits 1 when an answer differs, a
message is too long, a failure ends without a reason, or something is left behind.
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

import cluster_hosts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WORDS = ("profession", "animal", "town", "instrument", "birthday", "habit", "house", "garden")
METHODS = ("topk:window=64", "kmeans:clusters=64,probes=8,window=64", "hyperplanes:window=64,budget=5%")
REASONS = ("no sign of life", "exited on signal", "interrupted", "MPI:", "lost communication", "ORTE", "PMIX")
LIMIT = 30.0  # seconds from a failure to its reason


def questions_about(text: str, count: int, rng: random.Random) -> list[str]:
    names = sorted(set(re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text)))
    return [f"What is the {rng.choice(WORDS)} of {rng.choice(names)}?" for _ in range(count)]


def on_one_machine(count: int, command: list[str]) -> list[str]:
    return command if count == 1 else ["mpirun", "--oversubscribe", "-n", str(count), *command]


def ask(program: str, context: str, questions: list[str], methods: tuple[str, ...]) -> list[str]:
    return [program, "ask", context, *questions, *(flag for method in methods for flag in ("-a", method)), "--json", "-n", "8", "--threads", "1",
            "--quiet"]


def index(program: str, folder: str, output: str) -> list[str]:
    methods = [flag for method in METHODS for flag in ("-a", method)]
    return [program, "index", "-m", str(ROOT / "models/pocket"), "-f", f"{folder}/text.txt", "-o", output, *methods, "--threads", "1", "--quiet",
            "--force"]


def run(command: list[str]) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:6])}: exit code {done.returncode}: {done.stderr[:2000]}")
    return done.stdout


def answers(program: str, count: int, context: str, questions: list[str], methods: tuple[str, ...]) -> list[dict]:
    return json.loads(run(on_one_machine(count, ask(program, context, questions, methods))))["answers"]


def messages(shared: list[dict], count: int) -> dict:
    """What a rank has sent, by what it was for; the pocket model has 6 layers and 8 query heads of 64."""
    tokens = sum(a["tokens_prefilled"] + a["tokens_generated"] - 1 for a in shared)
    choosing = sum(a["ranks"]["selection_bytes"] for a in shared)
    states = sum(a["ranks"]["bytes"] for a in shared) - choosing
    return {"state_bytes_a_token_layer_and_rank": states / tokens / 6 / count, "most": 2 * 8 * 65 * 4,
            "selection_bytes_a_token_layer_and_rank": choosing / tokens / 6 / count}


def compare(program: str, context: str, questions: list[str]) -> dict:
    methods = ("full", *METHODS)
    alone = answers(program, 1, context, questions, methods)
    figures = {}
    for count in (2, 3, 4, 7):
        shared = answers(program, count, context, questions, methods)
        different = [(a["question"], a["attention"], a["answer"], b["answer"]) for a, b in zip(alone, shared, strict=True)
                     if (a["answer"], a["tokens_generated"]) != (b["answer"], b["tokens_generated"])]
        chosen = sum(a["selectivity"] != b["selectivity"] for a, b in zip(alone, shared, strict=True))
        figures[count] = {"answers": len(shared), "different": different, "other_selectivity": chosen, **messages(shared, count)}
        print(f"{pathlib.Path(context).name} over {count} ranks: {len(different)} of {len(shared)} answers differ", file=sys.stderr)
    return figures


def ranks_of(context: str) -> dict[int, int]:
    """Process of each rank that works in the folder of this trial."""
    found = {}
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        rank = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", environment)
        if rank and context.encode() in command and b"lodestone" in command.split(b"\0")[0]:
            found[int(rank[1])] = int(process.name)
    return found


def fail(how: str, folder: str, hosts: cluster_hosts.Hosts | None, rng: random.Random) -> int:
    if how in ("cut", "delay"):
        hosts.say("drop" if how == "cut" else f"delay {rng.choice((0.05, 0.3))}")
        return cluster_hosts.RELAYED
    ranks = ranks_of(folder)
    victim = rng.choice(sorted(ranks)) if ranks else -1
    if victim >= 0:
        os.kill(ranks[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return victim


def finish(process: subprocess.Popen, log: pathlib.Path, began: float) -> tuple[float, float]:
    """Seconds until a reason was given, and until all had ended."""
    said = 0.0
    while time.monotonic() - began < LIMIT + 30:
        if said == 0 and any(reason in log.read_text(errors="replace") for reason in REASONS):
            said = time.monotonic() - began
        if process.poll() is not None:
            break
        time.sleep(0.05)
    return said, time.monotonic() - began


def sweep(folder: str) -> None:
    for process in ranks_of(folder).values():
        os.kill(process, signal.SIGKILL)


def fail_once(command: list[str], how: str, folder: str, hosts: cluster_hosts.Hosts | None, rng: random.Random) -> dict:
    log = pathlib.Path(folder).with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors)
    while len(ranks_of(folder)) < 3 and process.poll() is None:
        time.sleep(0.02)
    moment = rng.uniform(0.0, 4.0)
    time.sleep(moment)
    if process.poll() is not None:
        return {"missed": True}
    began = time.monotonic()
    victim = fail(how, folder, hosts, rng)
    said, ended = finish(process, log, began)
    alive = process.poll() is None
    if alive:
        process.kill()
        process.wait()
    if hosts is not None:
        hosts.say("pass")
    sweep(folder)
    result = {"how": how, "what": command[-1] and ("index" if "index" in command else "ask"), "rank": victim, "moment": round(moment, 2),
              "reason_after": round(said, 2), "ended_after": round(ended, 2), "launcher_hung": alive, "code": process.returncode}
    # Late messages are no failure: then all is answered.
    result["good"] = process.returncode == 0 if how == "delay" and said == 0 else 0 < said < LIMIT and process.returncode != 0
    if not result["good"]:
        result["stderr"] = log.read_text(errors="replace")[:600]
    print(json.dumps(result), file=sys.stderr)
    return result


def failures(program: str, folder: str, context: str, many: list[str], count: int, rng: random.Random) -> dict:
    why_not = cluster_hosts.available()
    results = []

    def trial(hosts: cluster_hosts.Hosts | None, launch) -> None:
        kinds = ("kill", "stop", "cut", "delay") if hosts else ("kill", "stop")
        before = sorted(p.name for p in pathlib.Path(folder).iterdir())
        work = ask(program, context, many, ("full", METHODS[0])) if len(results) % 3 else index(program, folder, context)
        results.append(fail_once(launch(work), kinds[len(results) % len(kinds)], folder, hosts, rng))
        results[-1]["left"] = sorted({p.name for p in pathlib.Path(folder).iterdir()} - set(before))

    if why_not:
        print(f"all ranks on one machine: {why_not}", file=sys.stderr)
        for _ in range(count):
            trial(None, lambda work: on_one_machine(3, work))
    else:
        with cluster_hosts.Hosts(3) as hosts:
            for _ in range(count):
                trial(hosts, lambda work: hosts.launch(3, *work))
    results = [r for r in results if "missed" not in r]
    slowest = {how: max((r["reason_after"] for r in results if r["how"] == how), default=0) for how in ("kill", "stop", "cut", "delay")}
    return {"trials": len(results), "hosts": not why_not, "slowest_reason": slowest, "launcher_hung": sum(r["launcher_hung"] for r in results),
            "bad": [r for r in results if not r["good"]], "left": [r["left"] for r in results if r["left"]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--characters", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    program = str(pathlib.Path(flags.program).resolve())
    rng = random.Random(flags.seed)
    text = (ROOT / "demo/document.txt").read_text(encoding="utf-8")[:flags.characters]
    figures: dict = {}
    with tempfile.TemporaryDirectory(prefix="lode-ranks-") as folder:
        (pathlib.Path(folder) / "text.txt").write_text(text, encoding="utf-8")
        one, shards = f"{folder}/one.lode", f"{folder}/shards.lode"
        run(index(program, folder, one))
        run(on_one_machine(3, index(program, folder, shards)))
        if flags.questions:
            questions = questions_about(text, flags.questions, rng)
            figures["answers"] = {"one file": compare(program, one, questions), "shards": compare(program, shards, questions)}
        if flags.failures:
            many = questions_about(text, 400, rng)
            figures["failures"] = failures(program, folder, shards, many, flags.failures, rng)
            figures["asked_again"] = [len(answers(program, count, shards, many[:1], ("full", *METHODS))) for count in (1, 2, 3)]
            run([program, "verify", shards])
    print(json.dumps(figures, indent=1))
    compared = [f for kind in figures.get("answers", {}).values() for f in kind.values()]
    wrong = any(f["different"] or f["state_bytes_a_token_layer_and_rank"] > f["most"] for f in compared)
    return 1 if wrong or figures.get("failures", {}).get("bad") else 0


if __name__ == "__main__":
    sys.exit(main())
