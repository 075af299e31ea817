# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with a spec, on a tiny random model and a task of our own; skipped without the harness."""

import json

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # which the harness's own models need
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import lm_eval  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from word_model import WORDS, word_model, word_tokenizer  # noqa: E402

import lodestone  # noqa: E402
from lodestone.lm_eval import LodestoneLM  # noqa: E402

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}} question"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    with open(folder / "data.jsonl", "w") as file:
        for i in range(6):
            text = " ".join(WORDS[(7 * i + 3 * j) % 150] for j in range(120 + 5 * i))
            file.write(json.dumps({"text": text, "choices": [WORDS[i], WORDS[i + 9] + " " + WORDS[i + 1]], "label": i % 2}) + "\n")
    (folder / "tiny_choice.yaml").write_text(TASK % (folder / "data.jsonl"))
    return folder


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    return lambda: word_model(4096), word_tokenizer()


def likelihoods(model, folder):
    result = lm_eval.simple_evaluate(
        model=model, tasks=["tiny_choice"], task_manager=TaskManager(include_path=str(folder)), log_samples=True, bootstrap_iters=0
    )
    return [r[0] for sample in result["samples"]["tiny_choice"] for r in sample["filtered_resps"]]


def test_a_task_under_specs(parts, task_folder):
    make, tokenizer = parts
    torch.manual_seed(1)
    model = make()
    stock = likelihoods(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu"), task_folder)
    everything = likelihoods(LodestoneLM(model, attn="topk:k=100%;window=16", sparse_tokens=8, tokenizer=tokenizer), task_folder)
    sparse = likelihoods(LodestoneLM(model, attn="streaming:window=16", sparse_tokens=8, tokenizer=tokenizer), task_folder)
    assert everything == pytest.approx(stock, abs=1e-3)
    assert sparse != pytest.approx(stock, abs=1e-3)


def test_generation_and_refusals(parts):
    make, tokenizer = parts
    model = LodestoneLM(make(), attn="topk:k=100%;window=16", sparse_tokens=8, tokenizer=tokenizer)
    context = torch.randint(5, 150, (1, 60))
    out = model._model_generate(context, 66, ["never"])
    assert out.shape[1] <= 66 and torch.equal(out[:, :60], context)
    with pytest.raises(lodestone.InputError, match="batch_size"):
        LodestoneLM(make(), batch_size=4, tokenizer=tokenizer)
