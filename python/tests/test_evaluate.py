# SPDX-License-Identifier: Apache-2.0
"""Samples of `lodestone eval` asked of models of transformers: tiny random ones, and the shipped one."""

import copy
import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from word_model import WORDS, word_model, word_tokenizer  # noqa: E402

import lodestone  # noqa: E402
from lodestone import evaluate  # noqa: E402

PROGRAM = pathlib.Path(os.environ.get("LODESTONE_PROGRAM", pathlib.Path(lodestone._core.__file__).parents[2] / "lodestone"))
POCKET = pathlib.Path(__file__).resolve().parents[2] / "models" / "pocket"


def written(path, samples):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def made_up(path, tokens=120):
    """Two contexts of two questions, and one sample of its own task."""
    lines = []
    for c in range(2):
        text = " ".join(WORDS[(7 * c + 3 * j) % 150] for j in range(tokens))
        for q in range(2):
            line = {"id": f"{c}-{q}", "task": "needle", "tokens": 128, "context_id": f"c{c}", "question": f" question w{q + 3}"}
            lines.append(line | {"answers": [WORDS[q]], "match": "contains"} | ({"context": text} if q == 0 else {}))
    lines.append({"id": "other", "task": "qa", "tokens": 64, "context": " ".join(WORDS[:40]), "question": " question", "answers": ["w1"],
                  "match": "any", "max_new": 4})  # fmt: skip
    return written(path, lines)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return word_model(256), word_tokenizer()


def test_rows_of_every_task_and_spec(tiny, tmp_path):
    samples = evaluate.samples(made_up(tmp_path / "s.jsonl"))
    rows = evaluate.evaluate(*tiny, samples, ["topk:k=100%,window=16", "streaming:window=8,sink=0"])
    assert [(row.attention.partition(":")[0], row.task, row.n) for row in rows] == [
        (name, task, n) for task, n in (("needle", 4), ("qa", 1)) for name in ("full", "topk", "streaming")
    ]
    everything = [row for row in rows if row.attention.startswith("topk")]
    assert all(row.agreement == 1 and row.difference == 0 for row in everything)
    assert next(row for row in rows if row.attention.startswith("streaming")).agreement < 1
    text = evaluate.table(rows)
    assert "needle, 128 tokens: 4 samples" in text and len(text.splitlines()) == 11


def test_a_run_goes_on_where_it_ended(tiny, tmp_path, monkeypatch):
    samples = evaluate.samples(made_up(tmp_path / "s.jsonl"))
    specs, records = ["topk:k=20,window=16"], tmp_path / "answers.jsonl"
    rows = evaluate.evaluate(*tiny, samples, specs, records)
    whole = records.read_text()
    records.write_text(whole[:-30])  # the last answer is cut short
    again = evaluate.evaluate(*tiny, samples, specs, records)
    assert [row[:-1] for row in again] == [row[:-1] for row in rows]
    monkeypatch.setattr(lodestone.hf.Attached, "read", lambda *_: pytest.fail("asked what was known"))
    assert evaluate.evaluate(*tiny, samples, specs, records) == again
    with pytest.raises(lodestone.InputError, match="another sample with the id"):
        evaluate.evaluate(*tiny, evaluate.samples(made_up(tmp_path / "t.jsonl", tokens=90)), specs, records)
    other = [json.loads(line) | {"match": "f1"} for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    with pytest.raises(lodestone.InputError, match="another sample with the id"):
        evaluate.evaluate(*tiny, evaluate.samples(written(tmp_path / "u.jsonl", other)), specs, records)
    model, tokenizer = tiny
    with pytest.raises(lodestone.InputError, match="expected answers with dtype"):
        evaluate.evaluate(copy.deepcopy(model).bfloat16(), tokenizer, samples, specs, records)
    records.write_text("{}\n")
    with pytest.raises(lodestone.InputError, match="found something else"):
        evaluate.evaluate(*tiny, samples, specs, records)


def test_a_bad_line_of_a_published_set_is_named(tmp_path):
    lines = [{"_id": name, "dataset": task, "context": "c", "input": "q", "answers": ["a"]} for name, task in (("x", "no-such"), ("y", "qasper"))]
    notes = []
    samples = evaluate.samples(written(tmp_path / "l.jsonl", lines), note=notes.append)
    assert [sample.task for sample in samples] == ["qasper"]
    assert len(notes) == 1 and "line 1, sample 'x': " in notes[0]


def test_what_does_not_fit_is_named(tiny, tmp_path):
    notes = []
    samples = evaluate.samples(made_up(tmp_path / "s.jsonl", tokens=300))
    rows = evaluate.evaluate(*tiny, samples, [], note=notes.append)
    assert [row.task for row in rows] == ["qa"] and sum("left out: " in note for note in notes) == 4
    # Room for a part of the answer is room enough.
    assert [row.n for row in evaluate.evaluate(*tiny, evaluate.samples(made_up(tmp_path / "s.jsonl", tokens=248)), [])] == [4, 1]
    with pytest.raises(lodestone.InputError, match=r"bad\.jsonl.*line 1"):
        evaluate.samples(written(tmp_path / "bad.jsonl", [{"id": "a"}]))


def test_questions_without_a_context_do_not_see_each_other(tiny, tmp_path):
    lines = [{"id": str(i), "task": "none", "tokens": 8, "context_id": "c", "question": f"w{i} w{i + 1} w{i + 2}", "answers": ["w5"],
              "match": "any"} | ({"context": ""} if i == 0 else {}) for i in range(3)]  # fmt: skip
    evaluate.evaluate(*tiny, evaluate.samples(written(tmp_path / "all.jsonl", lines)), [], tmp_path / "all.out")
    evaluate.evaluate(*tiny, evaluate.samples(written(tmp_path / "one.jsonl", [lines[2] | {"context": ""}])), [], tmp_path / "one.out")
    last = [json.loads((tmp_path / name).read_text().splitlines()[-1]) for name in ("all.out", "one.out")]
    assert last[0]["id"] == last[1]["id"] == "2" and last[0]["output_ids"] == last[1]["output_ids"]


def test_the_models_own_penalties_are_left_aside(tiny, tmp_path):
    samples = evaluate.samples(made_up(tmp_path / "s.jsonl"))
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    evaluate.evaluate(model, tokenizer, samples, [], tmp_path / "a.out")
    model.generation_config.repetition_penalty = 3.0
    evaluate.evaluate(model, tokenizer, samples, [], tmp_path / "b.out")
    texts = [[json.loads(line)["output_ids"] for line in (tmp_path / name).read_text().splitlines()[1:]] for name in ("a.out", "b.out")]
    assert texts[0] == texts[1]


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built beside the package")
def test_the_programs_own_answers(tmp_path):
    """lodestone eval and this module on one file: the same samples, the same answers, the same scores."""
    facts = " ".join(f"The number of house {i} is {(7919 * i) % 9000 + 1000}." for i in range(60))
    lines = [{"id": str(i), "task": "number", "tokens": 1024, "context_id": "c", "answers": [str((7919 * i) % 9000 + 1000)], "match": "contains",
              "question": f"\n\nQuestion: What is the number of house {i}?\nAnswer:"} | ({"context": facts} if i == 0 else {}) for i in range(6)]  # fmt: skip
    path = written(tmp_path / "s.jsonl", lines)
    subprocess.run([PROGRAM, "eval", "-m", POCKET, "--samples", path, "-a", "full", "--kv-type", "f32", "--device", "cpu", "-o", tmp_path / "program.out",
                    "--quiet"], check=True, capture_output=True)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    evaluate.evaluate(model, transformers.AutoTokenizer.from_pretrained(POCKET), evaluate.samples(path), [], tmp_path / "here.out")
    program, here = (
        {r["id"]: (r["output"], r["score"]) for r in map(json.loads, (tmp_path / name).read_text().splitlines()[1:])}
        for name in ("program.out", "here.out")
    )
    assert len(program) == 6 and program == here


@pytest.mark.skipif(not (POCKET / "model.safetensors").exists(), reason="no model")
def test_the_command(tmp_path):
    facts = " ".join(f"The number of house {i} is {(7919 * i) % 9000 + 1000}." for i in range(60))
    path = written(tmp_path / "s.jsonl", [{"id": "a", "task": "number", "tokens": 1024, "context": facts, "answers": ["1000"],
                                           "question": "\n\nQuestion: What is the number of house 0?\nAnswer:", "match": "contains"}])  # fmt: skip
    command = [sys.executable, "-m", "lodestone.evaluate", "-m", str(POCKET), "--samples", str(path), "-a", "kmeans:probes=1024"]
    done = subprocess.run([*command, "--json", "-o", str(tmp_path / "o.jsonl")], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["results"]
    assert [row["attention"] for row in rows] == ["full", "kmeans:probes=1024"] and rows[1]["agreement"] == 1
    assert "1 of 1 contexts" in done.stderr
    wrong = subprocess.run([*command[:-1], "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "lodestone.evaluate: " in wrong.stderr and "Traceback" not in wrong.stderr
    wrong = subprocess.run([*command[:4], str(tmp_path), *command[5:]], capture_output=True, text=True)
    assert wrong.returncode == 2 and "expected the folder or name of a model" in wrong.stderr and "Traceback" not in wrong.stderr
