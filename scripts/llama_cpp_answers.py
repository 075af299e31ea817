#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: llama_cpp_answers.py MODEL.gguf --llama-source FOLDER --llama-build FOLDER [--reference MODEL.gguf] [--lodestone PROGRAM]
                            [-n 64] [--kv-type f16] [--json FILE]

Greedy answers of lodestone and llama.cpp to the same twenty prompts, each a short text and a question in the model's chat template.
Answers that are not alike must first differ where llama.cpp's two largest logits lie close together: the table shows the token at
which, and how close. With --reference llama.cpp runs another file, such as the same weights widened to f32: of quantised ones it rounds
activations to 8 bits, lodestone to 16. Exit code 1 when fewer than 15 are alike or a difference is wider than 0.15. FOLDER of --llama-build is what
bench_llama_cpp.py has built (target llama), --llama-source its sources. Needs jinja2."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import jinja2

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENOUGH_ALIKE, WIDEST = 15, 0.15
PROMPTS = [
    ("Anna is a widow. She lives in the town of Harwick and lights the lamp of its harbour.", "In which town does Anna live?"),
    ("The library opens at nine and closes at five, except on Sundays, when it is closed all day.", "When does the library close?"),
    ("Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.", "What does photosynthesis make?"),
    ("def add(a, b):\n    return a + b", "What does this function do?"),
    ("Water boils at 100 degrees Celsius at sea level, and at about 93 degrees in Denver.", "Why is the number lower in Denver?"),
    ("The recipe needs two eggs, a cup of flour, half a cup of milk and a pinch of salt.", "List the ingredients."),
    ("Our meeting moved from Monday to Wednesday because the room was not free.", "Why did the meeting move?"),
    ("The Nile flows north through eleven countries and ends in the Mediterranean Sea.", "Where does the Nile end?"),
    ("Marie Curie won Nobel prizes in physics in 1903 and in chemistry in 1911.", "In which fields did she win?"),
    ("The train from Leeds was forty minutes late, so Tom missed the concert.", "Write one sentence that sums this up."),
    ("A triangle has three sides. A square has four. A pentagon has five.", "How many sides does a pentagon have?"),
    ("Bees visit flowers for nectar and carry pollen from one to the next.", "How do bees help plants?"),
    ("The contract ends on 30 June 2027 unless both parties agree in writing to extend it.", "When does the contract end?"),
    ("Gold is heavy, soft and does not rust. Iron is lighter, harder and rusts in damp air.", "Which metal rusts?"),
    ("My dog Bruno is afraid of thunder and hides under the kitchen table.", "What is Bruno afraid of?"),
    ("The museum shows paintings by Vermeer, Rembrandt and Frans Hals.", "Name one of the painters."),
    ("Rain fell for six days and the river rose by two metres.", "What happened to the river?"),
    ("The phone has a camera with three lenses and a battery that lasts two days.", "How long does the battery last?"),
    ("In chess each player starts with sixteen pieces: eight pawns and eight others.", "How many pawns has each player?"),
    ("Plants need light, water and air. Without light their leaves turn yellow.", "Why do leaves turn yellow?"),
]


def prompt_of(template: str, text: str, question: str) -> str:
    """As lodestone puts it: text, a blank line and the question are the first user message."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=[{"role": "user", "content": f"{text}\n\n{question}"}],
                                                    add_generation_prompt=True, bos_token="", eos_token="")


def reference(args: argparse.Namespace, prompts: list) -> list:
    """Of each prompt a list of (gap, bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        program, libraries = pathlib.Path(folder) / "answers", args.llama_build / "bin"
        includes = [f"-I{args.llama_source / part / 'include'}" for part in (".", "ggml")]
        subprocess.run(["c++", "-std=c++20", "-O1", *includes, ROOT / "scripts/llama_cpp_answers.cc", "-o", program, f"-L{libraries}",
                        "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"], check=True)
        done = subprocess.run([program, args.reference or args.model, str(args.n)], input="".join(p + "\0" for p in prompts).encode(), check=True,
                              stdout=subprocess.PIPE)
    answers = []
    for block in done.stdout.decode().split("\n\n")[: len(prompts)]:
        lines = [line.partition(" ") for line in block.splitlines() if line]
        answers.append([(float(gap), bytes.fromhex(piece)) for gap, _, piece in lines])
    return answers


def ask(args: argparse.Namespace, text: str, question: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, context = pathlib.Path(folder) / "text.txt", pathlib.Path(folder) / "text.lode"
        source.write_text(text, encoding="utf-8")
        common = ["--quiet", "--device", "cpu"]
        subprocess.run([args.lodestone, "index", "-m", args.model, "-f", source, "-o", context, "--chat", "on", "--kv-type",
                        args.kv_type, *common], check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run([args.lodestone, "ask", context, "-a", "full", "-n", str(args.n), "--json", *common, question],
                              check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)["answers"][0]["answer"].encode()


def compare(own: bytes, theirs: list) -> tuple:
    """(None, 0), or the first token of the reference that the answer does not go on with, and its gap."""
    whole = b"".join(piece for _, piece in theirs)
    if own.strip() == whole.strip():
        return None, 0.0
    # Blanks that one of both cuts off at the ends are no difference.
    own, begin = own.lstrip(), len(whole) - len(whole.lstrip())
    at = -begin
    for step, (gap, piece) in enumerate(theirs):
        at += len(piece)
        if at > 0 and (own[:at] != whole[begin:begin + at] or (not piece and len(own) > at)):
            return step, gap
    return len(theirs), 0.0


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("model")
    parser.add_argument("--llama-source", type=pathlib.Path, required=True)
    parser.add_argument("--llama-build", type=pathlib.Path, required=True)
    parser.add_argument("--reference", help="what llama.cpp runs instead, e.g. the same weights widened to f32")
    parser.add_argument("--lodestone", type=pathlib.Path, default=ROOT / "build/release/lodestone")
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    inspected = subprocess.run([args.lodestone, "inspect", "-m", args.model, "--json"], check=True, stdout=subprocess.PIPE)
    template = json.loads(inspected.stdout)["chat_template"]
    rows = []
    for (text, question), theirs in zip(PROMPTS, reference(args, [prompt_of(template, *p) for p in PROMPTS])):
        own = ask(args, text, question)
        step, gap = compare(own, theirs)
        rows.append({"question": question, "differs_at": step, "gap": gap, "tokens": len(theirs), "lodestone": own.decode(errors="replace"),
                     "llama_cpp": b"".join(piece for _, piece in theirs).decode(errors="replace")})
        print(f"{question[:44]:44} " + ("alike" if step is None else f"differs at token {step} of {len(theirs)}, gap {gap:.3f}"), flush=True)
    alike = sum(row["differs_at"] is None for row in rows)
    wide = [row for row in rows if row["gap"] > WIDEST]
    print(f"{alike} of {len(rows)} alike; {len(wide)} differ where the reference's two largest logits are more than {WIDEST} apart")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(alike < ENOUGH_ALIKE or bool(wide))


if __name__ == "__main__":
    main()
