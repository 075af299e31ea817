# SPDX-License-Identifier: Apache-2.0
"""Samples of `lodestone eval` asked of models of transformers: tiny random ones, and the shipped one."""

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tokenizers  # noqa: E402

import lodestone  # noqa: E402
from lodestone import evaluate  # noqa: E402

POCKET = pathlib.Path(__file__).resolve().parents[2] / "models" / "pocket"
WORDS = [f"w{i}" for i in range(150)]


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
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", "question", *WORDS])}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return transformers.AutoModelForCausalLM.from_config(config).eval(), tokenizer


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
    with pytest.raises(lodestone.InputError, match="another sample named"):
        evaluate.evaluate(*tiny, evaluate.samples(made_up(tmp_path / "t.jsonl", tokens=90)), specs, records)
    records.write_text("{}\n")
    with pytest.raises(lodestone.InputError, match="found another file"):
        evaluate.evaluate(*tiny, samples, specs, records)


def test_what_does_not_fit_is_named(tiny, tmp_path):
    notes = []
    samples = evaluate.samples(made_up(tmp_path / "s.jsonl", tokens=300))
    rows = evaluate.evaluate(*tiny, samples, [], note=notes.append)
    assert [row.task for row in rows] == ["qa"] and sum("left out: " in note for note in notes) == 4
    with pytest.raises(lodestone.InputError, match="s.jsonl: line 1|line 1"):
        evaluate.samples(written(tmp_path / "bad.jsonl", [{"id": "a"}]))


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
    assert wrong.returncode == 1 and "lodestone.evaluate: " in wrong.stderr and "Traceback" not in wrong.stderr
