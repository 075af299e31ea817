#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks: 200 questions over 1, 2, 3, 4 and 7 of them, and failures at random moments on hosts of their own (network namespaces).

    tests/long/cluster_trials.py build/release/lodestone [--questions 200] [--failures 40] [--seed 1] [--characters 12000]
    tests/long/cluster_trials.py build/release/lodestone --context LONG.lode --text LONG.txt [--questions 200] [--counts 2,4]
    tests/long/cluster_trials.py build/release/lodestone --text LONG.txt -a topk -a hash [--whole squeezed] [--questions 50] [--counts 2,4]

A rank is killed, stopped or left without memory, or its host's link is cut or delayed for a while, as ranks start, answer or index.
Where there are no network namespaces all ranks are on one machine, and links stay as they are. With --context only answers of `full`
about a text that is indexed already are compared. With -a, each number of ranks indexes the text, and as many, others and one process
answer from its shards. Prints one JSON object; exits 1 when
an answer differs, a message is too long, a failure ends without a reason, or something is left behind.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import resource
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
REASONS = ("no sign of life", "expected all ranks to join", "exited on signal", "out of memory", "Cannot allocate memory", "cannot start a thread",
           "interrupted", "MPI:", "lost communication", "ORTE", "PMIX")
NUMBER_AND_CHECKSUMS = 256  # bytes
LIMIT = 30.0  # seconds from a failure to its reason
HARMLESS = ("delay", "memory")  # late messages are no failure; a limit of memory is none if nobody reaches it


def questions_about(text: str, count: int, rng: random.Random) -> list[str]:
    names = sorted(set(re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text)))
    return [f"What is the {rng.choice(WORDS)} of {rng.choice(names)}?" for _ in range(count)]


def on_one_machine(count: int, command: list[str]) -> list[str]:
    return command if count == 1 else ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(count), *command]


def flags_of(methods: tuple[str, ...]) -> list[str]:
    return [flag for method in methods for flag in ("-a", method)]


def ask(program: str, context: str, questions: list[str], methods: tuple[str, ...], threads: int = 1) -> list[str]:
    return [program, "ask", context, *questions, *flags_of(methods), "--json", "-n", "8", "--threads", str(threads), "--quiet"]


def index(program: str, text: str, output: str, methods: tuple[str, ...] = METHODS, threads: int = 1) -> list[str]:
    return [program, "index", "-m", str(ROOT / "models/pocket"), "-f", text, "-o", output, *flags_of(methods), "--threads", str(threads), "--quiet",
            "--force"]


def run(command: list[str]) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:6])}: exit code {done.returncode}: {done.stderr[:2000]}")
    return done.stdout


def answers(program: str, count: int, context: str, questions: list[str], methods: tuple[str, ...], threads: int = 1,
            hosts: cluster_hosts.Hosts | None = None) -> list[dict]:
    command = ask(program, context, questions, methods, threads)
    return json.loads(run(hosts.launch(count, *command) if hosts else on_one_machine(count, command)))["answers"]


def messages(shared: list[dict], count: int) -> dict:
    """What a rank has sent, by what it was for; the pocket model has 6 layers and 8 query heads of 64."""
    tokens = sum(a["tokens_prefilled"] + a["tokens_generated"] - 1 for a in shared)
    choosing = sum(a["ranks"]["selection_bytes"] for a in shared)
    states = sum(a["ranks"]["bytes"] for a in shared) - choosing
    return {"state_bytes_a_token_layer_and_rank": states / tokens / 6 / count, "most": 2 * 8 * 65 * 4,
            "selection_bytes_a_token_layer_and_rank": choosing / tokens / 6 / count}


def without_times(answer: dict) -> dict:
    return {name: value for name, value in answer.items() if not name.endswith("_seconds")}


def ask_all(program: str, count: int, context: str, questions: list[str], few: list[str], methods: tuple[str, ...], threads: int = 1,
            hosts: cluster_hosts.Hosts | None = None) -> list[dict]:
    """`questions` to `full`, the `few` to each of the methods."""
    of_full = answers(program, count, context, questions, ("full",), threads, hosts)
    return of_full + (answers(program, count, context, few, methods, threads, hosts) if few else [])


def differences(some: list[dict], others: list[dict]) -> list[tuple]:
    return [(a["question"], a["attention"], a["answer"], b["answer"]) for a, b in zip(some, others, strict=True)
            if (a["answer"], a["tokens_generated"]) != (b["answer"], b["tokens_generated"])]


def compare_count(program: str, context: str, questions: list[str], few: list[str], count: int, alone: list[dict],
                  methods: tuple[str, ...] = METHODS, threads: int = 1, hosts: cluster_hosts.Hosts | None = None) -> dict:
    shared = ask_all(program, count, context, questions, few, methods, threads, hosts)
    different = differences(alone, shared)
    chosen = sum(a["selectivity"] != b["selectivity"] for a, b in zip(alone, shared, strict=True))
    first = {(a["question"], a["attention"]): without_times(a) for a in shared}
    repeated = ask_all(program, count, context, questions[:10], few[:2], methods, threads, hosts)
    changed = sum(first[a["question"], a["attention"]] != without_times(a) for a in repeated)
    kinds = {"full": shared[:len(questions)]}
    if few:
        kinds |= {m: [a for a in shared[len(questions):] if a["attention"].split(":")[0] == m] for m in (m.split(":")[0] for m in methods)}
    print(f"{pathlib.Path(context).name} over {count} ranks: {len(different)} of {len(shared)} answers differ", file=sys.stderr)
    figures = {"answers": len(shared), "different": different, "other_selectivity": chosen, "changed_when_repeated": changed,
               "messages": {name: messages(of, count) for name, of in kinds.items()}}
    print(json.dumps(figures), file=sys.stderr)
    return figures


def compare_long(program: str, context: str, questions: list[str], counts: list[int]) -> dict:
    """`full` alone, about a text so long that one number of ranks at a time is all that a machine takes."""
    alone = answers(program, 1, context, questions, ("full",))
    return {count: compare_count(program, context, questions, [], count, alone) for count in counts}


def compare_on_hosts(program: str, context: str, questions: list[str]) -> dict:
    """`full` alone, over ranks on three hosts of their own."""
    alone = answers(program, 1, context, questions, ("full",))
    with cluster_hosts.Hosts(3) as hosts:
        return {count: compare_count(program, context, questions, [], count, alone, hosts=hosts) for count in (2, 3, 4, 7)}


def compare(program: str, context: str, questions: list[str], others: int) -> dict:
    """Answers of several ranks beside one process's: all questions to `full`, the first `others` to each method.

    All numbers of ranks at once: they wait for messages longer than they compute.
    """
    few = questions[:others]
    alone = ask_all(program, 1, context, questions, few, METHODS)
    counts = (2, 3, 4, 7)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(counts, pool.map(lambda count: compare_count(program, context, questions, few, count, alone), counts), strict=True))


def compare_readings(program: str, folder: str, text: str, questions: list[str], flags: argparse.Namespace) -> dict:
    """A long text as one process and as each number of ranks has read it.

    Shards are asked by as many ranks as wrote them, by the next of the numbers, and by one process, which has the same rows. One process's
    file is asked by methods of which every rank makes the whole choice. Rows of two readings differ by rounding: answers to those are listed,
    and nothing is expected of them.
    """
    cores, counts = len(os.sched_getaffinity(0)), flags.counts
    one, methods, every = f"{folder}/one.lode", tuple(flags.methods), (*flags.methods, *flags.whole)
    whole = {method.split(":")[0] for method in flags.whole}
    figures: dict = {"answers": {}, "readings": {}}
    began = time.monotonic()

    def progress(what: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {what}", file=sys.stderr)

    run(index(program, text, one, every, cores))
    progress("one process has read the text")
    alone = ask_all(program, 1, one, questions, questions, every, cores)
    progress("and answered")
    readers = counts[:flags.readers]
    for count in readers:
        run(on_one_machine(count, index(program, text, f"{folder}/{count}.lode", methods, max(1, cores // count))))
        progress(f"{count} ranks have read the text")

    def compared(count: int, other: int) -> None:
        shards, own_cores = f"{folder}/{count}.lode", max(1, cores // len(readers))
        same_rows = ask_all(program, 1, shards, questions, questions, methods, own_cores)
        progress(f"one process has answered from {count} shards")
        of_both = [a for a in alone if a["attention"].split(":")[0] not in whole]
        figures["readings"][count] = {"answers": len(same_rows), "different": differences(of_both, same_rows)}
        figures["answers"][f"{count} shards"] = {
            ranks: compare_count(program, shards, questions, questions, ranks, same_rows, methods, max(1, own_cores // ranks))
            for ranks in (count, other)}
        if whole:
            of_whole = [a for a in alone if a["attention"].split(":")[0] in (*whole, "full")]
            figures["answers"][f"one file, {count} ranks"] = {
                count: compare_count(program, one, questions, questions, count, of_whole, tuple(flags.whole), max(1, own_cores // count))}
        progress(f"done with {count}")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(compared, readers, counts[1:] + counts[:1]))
    return figures


def bytes_that_differ(program: str, folder: str, count: int) -> list[int]:
    """Of each shard, written twice: what is left is the writing's own number and checksums of it."""
    shards = []
    for name in ("first", "second"):
        run(on_one_machine(count, index(program, f"{folder}/text.txt", f"{folder}/{name}.lode")))
        shards.append([path.read_bytes() for path in sorted(pathlib.Path(folder).glob(f"{name}.lode.*"))])
        for path in pathlib.Path(folder).glob(f"{name}.lode*"):
            path.unlink()
    return [len(one) if len(one) != len(other) else sum(a != b for a, b in zip(one, other, strict=True)) for one, other in zip(*shards, strict=True)]


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
        if rank and context.encode() in command:
            found[int(rank[1])] = int(process.name)
    return found


def fail(how: str, folder: str, hosts: cluster_hosts.Hosts | None, rng: random.Random) -> int:
    if how in ("cut", "delay"):
        hosts.say("drop" if how == "cut" else f"delay {rng.choice((0.05, 0.3))}")
        return cluster_hosts.RELAYED
    ranks = ranks_of(folder)
    victim = rng.choice(sorted(ranks)) if ranks else -1
    if victim < 0:
        return victim
    if how == "memory":  # all that it has, and nothing more
        pages = int(pathlib.Path(f"/proc/{ranks[victim]}/statm").read_text(encoding="ascii").split()[0])
        resource.prlimit(ranks[victim], resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
    else:
        os.kill(ranks[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return victim


def finish(process: subprocess.Popen, log: pathlib.Path, began: float, relief: tuple[float, cluster_hosts.Hosts] | None) -> tuple[float, float]:
    """Seconds until a reason was given, and until all had ended. `relief`: when a link is as good as before."""
    said = 0.0
    while time.monotonic() - began < LIMIT + 30:
        if relief and time.monotonic() - began > relief[0]:
            relief[1].say("pass")
            relief = None
        if said == 0 and any(reason in log.read_text(errors="replace") for reason in REASONS):
            said = time.monotonic() - began
        if process.poll() is not None:
            break
        time.sleep(0.05)
    return said, time.monotonic() - began


def ranks_left(folder: str) -> list[int]:
    """Ranks that still run a moment after their launcher has ended; then they run no more."""
    deadline = time.monotonic() + 5
    while (left := ranks_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left.values():
        os.kill(process, signal.SIGKILL)
    return sorted(left)


def fail_once(command: list[str], how: str, folder: str, hosts: cluster_hosts.Hosts | None, rng: random.Random) -> dict:
    log, output = pathlib.Path(folder).with_suffix(".log"), pathlib.Path(folder).with_suffix(".out")
    with log.open("w") as errors, output.open("w") as answered:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=answered, stderr=errors)
    while len(ranks_of(folder)) < 3 and process.poll() is None:
        time.sleep(0.02)
    moment = rng.uniform(0.0, 4.0)
    time.sleep(moment)
    if process.poll() is not None:
        return {"missed": True}
    began = time.monotonic()
    victim = fail(how, folder, hosts, rng)
    said, ended = finish(process, log, began, (rng.uniform(1.0, 5.0), hosts) if how == "delay" else None)
    alive = process.poll() is None
    if alive:
        process.kill()
        process.wait()
    if hosts is not None:
        hosts.say("pass")
    result = {"how": how, "what": "index" if "index" in command else "ask", "rank": victim, "moment": round(moment, 2),
              "reason_after": round(said, 2), "ended_after": round(ended, 2), "launcher_hung": alive, "code": process.returncode,
              "ranks_left": ranks_left(folder)}
    ended_well = process.returncode == 0 and said == 0 and how in HARMLESS
    if ended_well and "ask" in command:
        result["answers"] = [a["answer"] for a in json.loads(output.read_text(encoding="utf-8"))["answers"]]
    reasoned = how != "delay" and 0 < said < LIMIT and process.returncode != 0
    result["good"] = (ended_well or reasoned) and not alive and not result["ranks_left"]
    result["stderr"] = log.read_text(errors="replace")[:600]
    return result


class Failures:
    """One failure after the other; the text is asked again after each."""

    def __init__(self, program: str, folder: str, context: str, questions: list[str], rng: random.Random) -> None:
        self.program, self.folder, self.context, self.questions, self.rng = program, folder, context, questions, rng
        self.results: list[dict] = []
        self.tried = 0
        self.wanted = [a["answer"] for a in answers(program, 3, context, questions, ("full", METHODS[0]))]

    def trial(self, hosts: cluster_hosts.Hosts | None) -> None:
        kinds = ("kill", "stop", "memory", "cut", "delay") if hosts else ("kill", "stop", "memory")
        how = kinds[self.tried % len(kinds)]
        before = {p.name for p in pathlib.Path(self.folder).iterdir()}
        # Those that may end well have few questions, the others more than they get through.
        questions = self.questions if how in HARMLESS else self.questions * 60
        work = ask(self.program, self.context, questions, ("full", METHODS[0])) if self.tried % 3 else index(self.program, f"{self.folder}/text.txt", self.context)
        self.tried += 1
        result = fail_once(hosts.launch(3, *work) if hosts else on_one_machine(3, work), how, self.folder, hosts, self.rng)
        if "missed" in result:
            return
        if "answers" in result:
            result["good"] &= result.pop("answers") == self.wanted
        # What a killed index leaves are shards that no list names; the next one removes them.
        left = {p.name for p in pathlib.Path(self.folder).iterdir()} - before
        result["left"] = sorted(name for name in left if not re.search(r"\.lode\.[0-9a-f]+-\dof3$", name))
        again = answers(self.program, 2, self.context, self.questions[:1], ("full",))[0]["answer"]
        result["good"] &= not result["left"] and again == self.wanted[0]
        self.results.append(result)
        print(json.dumps({name: value for name, value in result.items() if name != "stderr" or not result["good"]}), file=sys.stderr)


def failures(program: str, folder: str, context: str, questions: list[str], count: int, rng: random.Random) -> dict:
    trials = Failures(program, folder, context, questions, rng)
    why_not = cluster_hosts.available()
    if why_not:
        print(f"all ranks on one machine: {why_not}", file=sys.stderr)
    with contextlib.nullcontext() if why_not else cluster_hosts.Hosts(3) as hosts:
        while len(trials.results) < count and trials.tried < 2 * count:
            trials.trial(hosts)
    results = trials.results
    by_kind = {how: [r for r in results if r["how"] == how] for how in sorted({r["how"] for r in results})}
    return {"trials": len(results), "hosts": not why_not,
            "kinds": {how: {"trials": len(of), "ended_well": sum(r["code"] == 0 for r in of),
                            "slowest_reason": max(r["reason_after"] for r in of),
                            "slowest_end": max(r["ended_after"] for r in of),
                            "launcher_hung": sum(r["launcher_hung"] for r in of)} for how, of in by_kind.items()},
            "bad": [r for r in results if not r["good"]]}


def trials(program: str, flags: argparse.Namespace, rng: random.Random) -> dict:
    text = (ROOT / "demo/document.txt").read_text(encoding="utf-8")[:flags.characters]
    figures: dict = {}
    with tempfile.TemporaryDirectory(prefix="lode-ranks-") as folder:
        (pathlib.Path(folder) / "text.txt").write_text(text, encoding="utf-8")
        one, shards = f"{folder}/one.lode", f"{folder}/shards.lode"
        run(index(program, f"{folder}/text.txt", one))
        run(on_one_machine(3, index(program, f"{folder}/text.txt", shards)))
        if flags.questions:
            questions = questions_about(text, flags.questions, rng)
            figures["answers"] = {"shards": compare(program, shards, questions, flags.others),
                                  "one file": compare(program, one, questions[:flags.others], flags.others)}
            if flags.hosts:
                figures["answers"]["shards, on hosts"] = compare_on_hosts(program, shards, questions)
            figures["bytes_that_differ"] = {count: bytes_that_differ(program, folder, count) for count in (2, 3, 4, 7)}
        if flags.failures:
            some = questions_about(text, 4, rng)
            figures["failures"] = failures(program, folder, shards, some, flags.failures, rng)
            figures["asked_again"] = [len(answers(program, count, shards, some[:1], ("full", *METHODS))) for count in (1, 2, 3)]
            run([program, "verify", shards])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--others", type=int, default=20, help="questions to each sparse method")
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--characters", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", action="store_true", help="ask over network namespaces as hosts, too")
    parser.add_argument("--context", help="a .lode file of one process")
    parser.add_argument("--text", help="the text that it is of")
    parser.add_argument("--counts", type=lambda text: [int(count) for count in text.split(",")], default=[2, 4], help="of ranks, about a long text")
    parser.add_argument("--readers", type=int, default=99, help="as many of these, the first, index the text")
    parser.add_argument("-a", dest="methods", action="append", default=[], help="of a long text that ranks index")
    parser.add_argument("--whole", action="append", default=[], help="the same, of which every rank makes the whole choice: of one file alone")
    flags = parser.parse_args()
    program = str(pathlib.Path(flags.program).resolve())
    rng = random.Random(flags.seed)
    figures: dict = {}
    if flags.text:
        questions = questions_about(pathlib.Path(flags.text).read_text(encoding="utf-8"), flags.questions, rng)
    if flags.context:
        figures["answers"] = {"one file": compare_long(program, flags.context, questions, flags.counts)}
    elif flags.text:
        with tempfile.TemporaryDirectory(prefix="lode-ranks-") as folder:
            figures = compare_readings(program, folder, flags.text, questions, flags)
    else:
        figures = trials(program, flags, rng)
    print(json.dumps(figures, indent=1))
    compared = [f for kind in figures.get("answers", {}).values() for f in kind.values()]
    wrong = any(f["different"] or f["changed_when_repeated"] or any(m["state_bytes_a_token_layer_and_rank"] > m["most"] for m in f["messages"].values())
                for f in compared)
    changed = max((most for shards in figures.get("bytes_that_differ", {}).values() for most in shards), default=0) > NUMBER_AND_CHECKSUMS
    return 1 if wrong or changed or figures.get("failures", {}).get("bad") else 0


if __name__ == "__main__":
    sys.exit(main())
