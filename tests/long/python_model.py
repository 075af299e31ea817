# SPDX-License-Identifier: Apache-2.0
"""The same questions by `lodestone ask`, by the Python package, and by a model of transformers under lodestone.hf.

usage: PYTHONPATH=build/release/python python tests/long/python_model.py MODEL.gguf [SPEC]

Needs torch, transformers, accelerate and gguf. `lodestone quantize` writes the model as float32 first, so that all three compute with the
same weights; the document is the beginning of demo/document.txt. Exits 1 unless all answers agree.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

import lodestone
import lodestone.hf

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "lodestone"
TEMPLATE = "\n\nQuestion: {question}\nAnswer:"
QUESTIONS = ["Who was a glassblower?", "What did the town pay for?", "Where did the bell sink?", "What is the name of the river?"]
TOKENS = 24


def run(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def answers_of_program(model, text_file, spec, folder):
    run("index", "-m", model, "-f", text_file, "-o", folder / "d.lode", "-a", spec, "--chat", "off", "--kv-type", "f32", "--quiet")
    template = TEMPLATE.replace("\n", "\\n")
    out = run("ask", folder / "d.lode", *QUESTIONS, "-a", spec, "--template", template, "-n", TOKENS, "--stop", "", "--json")
    return [answer["answer"].strip() for answer in json.loads(out)["answers"]]


def main():
    source, spec = sys.argv[1], (sys.argv[2:] or ["kmeans:probes=32,window=255"])[0]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        gguf = folder / "model.gguf"
        run("quantize", "-m", source, "-o", gguf, "--type", "F32", "--quiet")
        text = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:8000]
        (folder / "text.txt").write_text(text, encoding="utf-8")
        model = lodestone.Model(gguf)
        document = lodestone.Document.read(model, text, specs=[spec], kv_type="f32")
        their = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
        prompts = [model.encode(TEMPLATE.replace("{question}", q)) for q in QUESTIONS]
        sequence = lodestone.Sequence(document, "full")
        ours = torch.from_numpy(sequence.forward(prompts[0]))
        ids = torch.tensor([document.token_ids])
        with torch.no_grad():
            theirs = their(input_ids=torch.cat([ids, torch.tensor([prompts[0]])], 1)).logits[0, ids.shape[1] :]
        print(f"{document.tokens} tokens; full attention: largest difference of logits {(ours - theirs).abs().max():.2g}")
        answers = {"ask": answers_of_program(gguf, folder / "text.txt", spec, folder)}
        asked = [document.ask(q, spec, TOKENS, stop=["\0"], template=TEMPLATE) for q in QUESTIONS]
        answers["package"] = [answer.text.strip() for answer in asked]
        attached = lodestone.hf.attach(their, spec).read(ids)
        answers["transformers"] = [model.decode(attached.ask(torch.tensor([p]), TOKENS).tolist()).strip() for p in prompts]
    differ = 0
    for i, question in enumerate(QUESTIONS):
        row = {who: given[i] for who, given in answers.items()}
        differ += len(set(row.values())) > 1
        print(question, json.dumps(row if len(set(row.values())) > 1 else row["ask"], ensure_ascii=False))
    print(f"{len(QUESTIONS) - differ} of {len(QUESTIONS)} answers agree under {spec}; density {asked[0].work.density:.3f}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
