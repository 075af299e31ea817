#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks the code on purpose, one mistake at a time (tests/mutations.toml), and checks that the test that is named beside it fails.

Everything happens in a copy of the tree under build/mutations, so that the tree itself never holds a mistake, however the
script ends. Mistakes that were caught are not tried again until their file or their entry changes: a run that was
interrupted goes on. The first run builds the copy, which takes as long as any first build."""

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/mutations.toml"
RESULTS = ROOT / "build/mutations.json"
# The build lies in the copy where a preset's build lies in the tree: a compiler cache sees the same relative paths.
COPY = ROOT / "build/mutations"
BUILD = COPY / "build/release"
SCENARIO = "scenario_"
CAUGHT = {"failed", "crashed", "hung"}


@dataclasses.dataclass
class Mutation:
    id: str
    file: str
    old: str
    new: str
    breaks: str  # what is broken, in one plain sentence
    test: str  # "FOLDER FILTER" of tests/FOLDER, or "scenario_NAME CLASS.TEST"
    seconds: int = 120  # the test's time limit
    needs: str = ""  # a feature of the CPU, as /proc/cpuinfo names it, without which the test does not run

    @property
    def suite(self) -> str:
        return self.test.split()[0]

    @property
    def filter(self) -> str:
        return self.test.split()[1]

    @property
    def target(self) -> str:
        return "lodestone-cli" if self.suite.startswith(SCENARIO) else f"test_{self.suite}"

    def key(self) -> str:
        told = [dataclasses.asdict(self), (ROOT / self.file).read_text(encoding="utf-8")]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def read_list() -> list[Mutation]:
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]]


# ---- Is the list true? ------------------------------------------------------------------------------------------------


def sources_of(suite: str) -> list[pathlib.Path]:
    if suite.startswith(SCENARIO):
        return [ROOT / f"tests/scenarios/{suite.removeprefix(SCENARIO)}_test.py"]
    folders = [suite, "gpu"] if suite == "gpu_fake" else [suite]
    return [file for folder in folders for file in sorted((ROOT / "tests" / folder).glob("*_test.cc"))]


def has_test(suite: str, name: str) -> bool:
    """Whether tests of this name stand in the source: "Suite.Name", or of one with parameters "*/Suite.Name/*"."""
    parts = [part for part in name.split("/") if "." in part]
    if len(parts) != 1 or parts[0].count(".") != 1 or "*" in parts[0]:
        return False
    group, test = parts[0].split(".")
    texts = [file.read_text(encoding="utf-8") for file in sources_of(suite) if file.is_file()]
    if suite.startswith(SCENARIO):
        return any(re.search(rf"^class {group}\(.*?^    def {test}\(", text, re.M | re.S) for text in texts)
    kind = "TEST_P" if "/" in name else "TEST(_F)?"
    return any(re.search(rf"\b{kind}\(\s*{group},\s*{test}\s*\)", text) for text in texts)


def faults_of(m: Mutation) -> list[str]:
    path = ROOT / m.file
    if not path.is_file():
        return [f"expected the file {m.file}, found none"]
    faults = []
    found = path.read_text(encoding="utf-8").count(m.old)
    if found != 1:
        faults.append(f"expected its old text once in {m.file}, found it {found} times")
    if m.old == m.new:
        faults.append("expected a new text that differs from the old one, found the same")
    if len(m.test.split()) != 2:
        return faults + [f"expected 'FOLDER FILTER' as test, found '{m.test}'"]
    missing = [name for name in m.filter.split(":") if not has_test(m.suite, name)]
    return faults + [f"expected the test {name} in {sources_of(m.suite)[0].parent}, found none" for name in missing]


def check(mutations: list[Mutation]) -> list[str]:
    counts = collections.Counter(m.id for m in mutations)
    faults = [f"{id}: stands {n} times" for id, n in counts.items() if n > 1]
    return faults + [f"{m.id}: {fault}" for m in mutations for fault in faults_of(m)]


# ---- The copy -----------------------------------------------------------------------------------------------------------


def copy_file(source: pathlib.Path, to: pathlib.Path) -> None:
    """Leaves a file that is the same already as it is: a new time would compile it anew."""
    content = source.read_bytes()
    if to.is_file() and not to.is_symlink() and to.read_bytes() == content:
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(content)
    shutil.copymode(source, to)


def copy_tree() -> None:
    """Makes the copy what the tree is, without what git ignores. It also takes back a mistake that a killed run left."""
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                             capture_output=True)
    names = {name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        copy_file(ROOT / name, COPY / name)
    for path in COPY.rglob("*"):
        name = path.relative_to(COPY).as_posix()
        if path.is_file() and not name.startswith("build/") and name not in names:
            path.unlink()


def run_quietly(command: list[str], seconds: float | None, **options) -> tuple[int | None, str]:
    """The exit code, None past the time limit, and what was printed. Children end with the command."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                          errors="replace", start_new_session=True, **options) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def configure() -> None:
    if (BUILD / "build.ninja").is_file():
        return
    print("configuring the copy", flush=True)
    launcher = shutil.which("ccache")
    cache = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"] if launcher else []
    code, printed = run_quietly(["cmake", "--preset", "release", "-Wno-dev", *cache], None, cwd=COPY)
    if code != 0:
        sys.exit(printed + "mutations: the copy cannot be configured")


def build(targets: set[str], jobs: int) -> tuple[bool, str]:
    code, printed = run_quietly(["cmake", "--build", str(BUILD), "-j", str(jobs), "--target", *sorted(targets)], None)
    return code == 0, printed


# ---- Running --------------------------------------------------------------------------------------------------------------


def can_run(m: Mutation) -> bool:
    """Whether this machine has what the test needs."""
    info = pathlib.Path("/proc/cpuinfo")
    return not m.needs or (info.is_file() and m.needs in info.read_text(encoding="utf-8").split())


def run_test(suite: str, names: str, seconds: float) -> tuple[str, str]:
    """"passed", "failed", "crashed", "hung" or "nothing ran", and which tests failed."""
    if suite.startswith(SCENARIO):
        script = sources_of(suite)[0].relative_to(ROOT)
        command = ["python3", str(script), *names.split(":")]
        env = {**os.environ, "LODESTONE_PROGRAM": str(BUILD / "lodestone"), "PYTHONDONTWRITEBYTECODE": "1"}
        code, printed = run_quietly(command, seconds, cwd=COPY, env=env)
        ran = re.search(r"^Ran ([1-9]\d*) test", printed, re.M) and "skipped=" not in printed
        failed = re.findall(r"^(?:FAIL|ERROR): (\w+)", printed, re.M)
    else:
        command = [str(BUILD / "tests" / f"test_{suite}"), f"--gtest_filter={names}"]
        code, printed = run_quietly(command, seconds, cwd=COPY)
        ran = re.search(r"Running [1-9]\d* tests?", printed) and "[  SKIPPED ]" not in printed
        failed = re.findall(r"^\[  FAILED  \] (\S+?)(?:,.*)?(?: \(\d+ ms\))?$", printed, re.M)
    # Of tests with parameters each one once.
    by = ", ".join(dict.fromkeys(re.sub(r"^[^/]*/|/[^/]*$", "", name) if name.count("/") == 2 else name for name in failed))
    if code is None:
        return "hung", by
    if code < 0:
        return "crashed", by
    if not ran:
        return "nothing ran", printed[-600:]
    return ("passed", "") if code == 0 else ("failed", by)


def check_unbroken(mutations: list[Mutation], jobs: int) -> list[str]:
    """The tests must pass, and be there, where nothing is broken."""
    print(f"building what {len(mutations)} mistakes need, unbroken", flush=True)
    done, printed = build({m.target for m in mutations}, jobs)
    if not done:
        return [printed[-3000:], "mutations: the unbroken copy does not build"]
    faults = []
    for suite, names in sorted({(m.suite, name) for m in mutations for name in m.filter.split(":")}):
        limit = max(m.seconds for m in mutations if m.suite == suite)
        outcome, by = run_test(suite, names, limit)
        if outcome != "passed":
            faults.append(f"{suite} {names}: expected that it passes where nothing is broken, found: {outcome} {by}")
    return faults


def try_mutation(m: Mutation, jobs: int) -> dict:
    """Breaks the copy, builds, runs the test and mends the copy."""
    path = COPY / m.file
    whole = path.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        path.write_text(whole.replace(m.old, m.new), encoding="utf-8")
        done, printed = build({m.target}, jobs)
        built = time.monotonic()
        outcome, by = run_test(m.suite, m.filter, m.seconds) if done else ("does not build", printed[-1500:])
    finally:
        path.write_text(whole, encoding="utf-8")
    return {"outcome": outcome, "by": by, "build_seconds": round(built - start, 1),
            "test_seconds": round(time.monotonic() - built, 1)}


def read_results() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def write_results(results: dict) -> None:
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    temporary.replace(RESULTS)


def caught(m: Mutation, results: dict) -> bool:
    result = results.get(m.id, {})
    return result.get("key") == m.key() and result.get("outcome") in CAUGHT


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def run_all(mutations: list[Mutation], jobs: int) -> int:
    """How many mistakes no test caught."""
    results, start = read_results(), time.monotonic()
    # One executable after the other: mending a file and breaking the next one is one build.
    order = sorted(mutations, key=lambda m: (m.target, m.file))
    for number, m in enumerate(order, 1):
        result = try_mutation(m, jobs)
        results[m.id] = {"key": m.key(), **result}
        write_results(results)
        left = (time.monotonic() - start) / number * (len(order) - number)
        word = result["outcome"] if result["outcome"] in CAUGHT else result["outcome"].upper()
        print(f"[{number}/{len(order)}] {m.id}: {word} {result['by']} (build {result['build_seconds']} s, test "
              f"{result['test_seconds']} s; about {minutes(left)} left)", flush=True)
    return sum(not caught(m, results) for m in mutations)


# ---- The table ------------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(mutations: list[Mutation]) -> str:
    results = read_results()
    found = sum(caught(m, results) for m in mutations)
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    head = [
        "# Mistakes that the tests catch",
        "",
        "Do the tests notice when the code is wrong? Each row is a mistake that an engineer could make. `scripts/mutations.py` puts",
        "it into a copy of the code ([tests/mutations.toml](../../tests/mutations.toml) has the exact text), builds the copy, and runs",
        "the test beside it, which must fail; without the mistake it passes. `scripts/mutations.py --table` writes this page.",
        "",
        f"{found} of {len(mutations)} mistakes were caught, with the code of commit {commit.stdout.strip() or 'unknown'}.",
        "",
        "| id | what is broken | test that fails |",
        "|---|---|---|",
    ]
    rows = [f"| {m.id} | {cell(m.breaks)} | {cell(m.test) if caught(m, results) else 'not shown on this code'} |"
            for m in mutations]
    return "\n".join(head + rows) + "\n"


def chosen(mutations: list[Mutation], wanted: list[str]) -> list[Mutation]:
    unknown = set(wanted) - {m.id for m in mutations} - {m.suite for m in mutations}
    if unknown:
        sys.exit(f"mutations: expected ids or folders of {LIST.relative_to(ROOT)}, found {', '.join(sorted(unknown))}")
    return [m for m in mutations if not wanted or m.id in wanted or m.suite in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ID|FOLDER", help="only these mistakes, or those that tests of a folder catch")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="compilers at once (default: the cores)")
    parser.add_argument("--again", action="store_true", help="also those that were caught already")
    parser.add_argument("--check", action="store_true", help="only look whether the list is true: no build, a second")
    parser.add_argument("--table", action="store_true", help="only write docs/results/mutations.md from the last results")
    arguments = parser.parse_args()
    mutations = read_list()
    faults = check(mutations)
    if faults or arguments.check:
        print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
        return 1 if faults else 0
    if arguments.table:
        (ROOT / "docs/results/mutations.md").write_text(table(mutations), encoding="utf-8")
        return 0
    results = read_results()
    asked = chosen(mutations, arguments.names)
    wanted = [m for m in asked if arguments.again or not caught(m, results)]
    todo = [m for m in wanted if can_run(m)]
    for m in wanted:
        if not can_run(m):
            print(f"left out, since this machine has no {m.needs}: {m.id}")
    if not todo:
        print(f"{len(asked) - len(wanted)} of {len(asked)} mistakes were caught before; --again tries them once more")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    copy_tree()
    configure()
    faults = check_unbroken(todo, arguments.jobs)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    missed = run_all(todo, arguments.jobs)
    print(f"{len(todo) - missed} of {len(todo)} mistakes were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("mutations: interrupted; the same command goes on where it stopped")
