#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the variants of SAAP's section 6.5 and appendix E.1 on the same texts and prints them as one Markdown table.

    scripts/saap_variants.py --program build/release/lodestone -m models/pocket --heads 3.1 5.0 --out OUT -f TEXT ...

All variants are tested on the same queries of the last prompts with the same targets (`--test-as-asked`), but for the two rows of the
fine-tuning: those are of the last 1,024 tokens of the last text alone, before it and after. Loss: nats, of one partition comparable only
with itself; gain: nats by which attention per key is lifted, comparable with all. Captured: share of the attention on far keys in the
buckets ranked first by probability / sqrt(keys), until 2, 5 and 10 % of the far keys are read. Mass and keys: of the 16 most probable
buckets, as the paper ranks them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

COMMON = {"lessons": "off", "tokens": "16k", "held-out": 0.15, "window": 511, "distance": 256, "clusters": 512, "samples": 1500, "late": 0.5,
          "late-tokens": 1024, "batch": 1000, "probes": 16, "seed": 1, "weight-decay": 0}


def flags(*more: str, hidden: int = 192, steps: int = 3000, variant: str = "mlp", filtered: str = "both", causal: bool = False) -> list[str]:
    return ["--hidden", str(hidden), "--steps", str(steps), "--variant", variant, "--filter", filtered,
            "--causal" if causal else "--no-causal", *more]


# name: flags
VARIANTS = {
    "two layers, both filters (the paper's)": flags(),
    "its 40,000 steps at a constant 1e-5": flags("--rate", "1e-5", "--constant-rate", steps=40000),
    "wider: 768 hidden units": flags(hidden=768),
    "residual": flags(variant="residual"),
    "queries unfiltered": flags(filtered="pairs"),
    "unfiltered": flags(filtered="none"),
    "causal mask": flags(causal=True),
    "trained key classifier": flags("--keys", "trained"),
    "residual, queries unfiltered, causal (the default)": flags(variant="residual", filtered="pairs", causal=True),
    "the same with a trained key classifier": flags("--keys", "trained", variant="residual", filtered="pairs", causal=True),
}


def train(arguments: argparse.Namespace, name: str, texts: list[str], chosen: list[str]) -> dict:
    """The heads' reports, by "layer.head"."""
    # To adapt, the end of its one text is what is held out.
    common = [word for key, value in COMMON.items() if key != "held-out" or "--adapt" not in chosen for word in (f"--{key}", str(value))]
    command = [arguments.program, "train", "saap", "-m", arguments.model, "-o", str(arguments.out / f"{name}.safetensors"), "--device",
               arguments.device, "--dense-layers", str(min(int(h.split(".")[0]) for h in arguments.heads)), "--test-as-asked", "--json",
               "--quiet", *common, *chosen]
    for text in texts:
        command += ["-f", text]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr.strip()}")
    return {f"{h['layer']}.{h['head']}": h for h in json.loads(done.stdout)["heads"]}


def row(name: str, h: dict, loss: float, captured: list[float], whole: bool = True) -> str:
    shares = " | ".join(f"{100 * share:.1f}" for share in captured)
    rest = f"{h['gain']:.3f} | {shares} | {100 * h['mass']:.1f} | {100 * h['selectivity']:.1f}" if whole else f"| {shares} | |"
    return f"| {h['layer']}.{h['head']} | {name} | {loss:.3f} | {rest} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/release/lodestone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-f", "--file", action="append", required=True, help="a text; the last ones are tested on")
    parser.add_argument("--heads", nargs="+", default=["3.1", "5.0"], help="layer.head to show")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="folder for the artefacts")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {head: [] for head in arguments.heads}
    for index, (name, chosen) in enumerate(VARIANTS.items()):
        reports = train(arguments, f"variant-{index}", arguments.file, chosen)
        for head in arguments.heads:
            h = reports[head]
            if index == 0:
                rows[head].append(row("q . centroid", {**h, "gain": 0, "mass": h["kmeans_mass"], "selectivity": h["kmeans_selectivity"]},
                                      float("nan"), h["kmeans_captured"]))
                rows[head].append(row("at most, by the target", h, float("nan"), h["best_captured"], False))
            rows[head].append(row(name, h, h["loss"], h["captured"]))
    tuned = train(arguments, "tuned", arguments.file[-1:], ["--adapt", "--from", str(arguments.out / "variant-0.safetensors"), "--steps", "300",
                                                            "--rate", "1e-4"])
    for head in arguments.heads:
        h = tuned[head]
        rows[head].append(row("the first, on the last text's end", h, h["start_loss"], h["start_captured"], False))
        rows[head].append(row("fine-tuned to the text before it", h, h["loss"], h["captured"]))
    print("| head | variant | loss | gain | 2 % | 5 % | 10 % | mass in 16 | keys in 16 |\n" + "|---" * 9 + "|")
    for head in arguments.heads:
        print("\n".join(rows[head]).replace("nan", "").replace("| 0.000 |", "| |"))


if __name__ == "__main__":
    main()
