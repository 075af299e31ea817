# SPDX-License-Identifier: Apache-2.0
"""The same questions by `lodestone ask`, by the Python package, and by a model of transformers under lodestone.hf.

usage: PYTHONPATH=build/release/python python tests/long/python_model.py MODEL.gguf [SPEC]...

The third needs torch, transformers, accelerate and gguf: `lodestone quantize` writes the model as float32 first, so that all three
compute with the same weights. Without torch the first two answer with the file as it is. The document is the beginning of
demo/document.txt. Exits 1 unless all answers to all questions agree under every spec.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import lodestone

try:
    import torch
    import transformers

    import lodestone.hf
except ImportError:
    torch = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "lodestone"
# A beginning that a model without its chat template goes on from: empty answers would agree about nothing.
TEMPLATE = "\n\nQuestion: {question}\nAnswer: The text says that"
QUESTIONS = ["Who was a glassblower?", "What did the town pay for?", "Where did the bell sink?", "What is the name of the river?"]
TOKENS = 24


def run(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def answers_of_program(context, spec):
    """(text, number of tokens) of each answer."""
    template = TEMPLATE.replace("\n", "\\n")
    out = run("ask", context, *QUESTIONS, "-a", spec, "--template", template, "-n", TOKENS, "--stop", "", "--json")
    return [(answer["answer"].strip(), answer["tokens_generated"]) for answer in json.loads(out)["answers"]]


def answers_of_package(document, spec):
    asked = [document.ask(q, spec, TOKENS, stop=["\0"], template=TEMPLATE) for q in QUESTIONS]
    return [(answer.text.strip(), len(answer.tokens)) for answer in asked]


class Theirs:
    """The model in transformers, with the same float32 weights."""

    def __init__(self, folder, model):
        self.model = model
        self.transformer = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()

    def show_difference(self, document):
        """Of logits under full attention."""
        prompt = self.model.encode(TEMPLATE.replace("{question}", QUESTIONS[0]))
        ours = torch.from_numpy(lodestone.Sequence(document, "full").forward(prompt))
        with torch.no_grad():
            theirs = self.transformer(input_ids=torch.tensor([document.token_ids + prompt])).logits[0, document.tokens :]
        print(f"full attention: largest difference of logits to transformers' {(ours - theirs).abs().max():.2g}")

    def answers(self, document, spec):
        attached = lodestone.hf.attach(self.transformer, spec).read(torch.tensor([document.token_ids]))
        prompts = [self.model.encode(TEMPLATE.replace("{question}", q)) for q in QUESTIONS]
        tokens = [attached.ask(torch.tensor([prompt]), TOKENS).tolist() for prompt in prompts]
        return [(self.model.decode(one).strip(), None) for one in tokens]


def differing(spec, answers):
    """How many questions are not answered alike."""
    differ = 0
    for i, question in enumerate(QUESTIONS):
        row = {who: given[i] for who, given in answers.items()}
        lengths = {tokens for _, tokens in row.values() if tokens is not None}
        alike = len({text for text, _ in row.values()}) == len(lengths) == 1 and row["ask"][0] != ""
        differ += not alike
        print(f"  {question} {json.dumps(row['ask'][0] if alike else row, ensure_ascii=False)}")
    print(f"{spec}: {len(QUESTIONS) - differ} of {len(QUESTIONS)} answers of {', '.join(answers)} agree")
    return differ


def main():
    source, specs = sys.argv[1], sys.argv[2:] or ["kmeans:probes=32,window=255"]
    differ = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        file = pathlib.Path(source)
        if torch is not None:
            file = folder / "model.gguf"
            run("quantize", "-m", source, "-o", file, "--type", "F32", "--quiet")
        text = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:8000]
        (folder / "text.txt").write_text(text, encoding="utf-8")
        indexed = [word for spec in specs for word in ("-a", spec)]
        run("index", "-m", file, "-f", folder / "text.txt", "-o", folder / "d.lode", *indexed, "--chat", "off", "--kv-type", "f32", "--quiet")
        model = lodestone.Model(file)
        document = lodestone.Document.read(model, text, specs=specs, kv_type="f32", chat=False)
        print(f"{file.name}, {document.tokens} tokens")
        theirs = Theirs(folder, model) if torch is not None else None
        if theirs:
            theirs.show_difference(document)
        for spec in ["full", *specs]:
            answers = {"ask": answers_of_program(folder / "d.lode", spec), "package": answers_of_package(document, spec)}
            if theirs:
                answers["transformers"] = theirs.answers(document, spec)
            differ += differing(spec, answers)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
