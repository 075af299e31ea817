# SPDX-License-Identifier: Apache-2.0
"""Models, documents and questions, on the shipped model."""

import os
import pathlib
import threading

import pytest

import lodestone

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUESTION = "What is the profession of Clara Whitaker?"


@pytest.fixture(scope="module")
def model():
    return lodestone.Model(ROOT / "models" / "pocket")


@pytest.fixture(scope="module")
def text():
    whole = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")
    at = whole.index("Clara Whitaker")
    return whole[max(0, at - 6000) : at + 4000]


@pytest.fixture(scope="module")
def document(model, text):
    return lodestone.Document.read(model, text, specs=["kmeans:probes=16,window=255"])


def test_an_answer_under_a_method_and_under_full(document):
    sparse, full = document.ask(QUESTION), document.ask(QUESTION, attention="full")
    assert sparse.text == full.text != ""
    assert 0 < sparse.work.density < 1 and sparse.work.sparse_tokens > 0
    assert sparse.attention.startswith("kmeans") and sparse.ending == "stop"


def test_streaming_gives_the_same_text(document):
    assert "".join(document.ask(QUESTION, stream=True)) == document.ask(QUESTION).text


def test_saved_and_loaded(document, model, tmp_path):
    path = tmp_path / "x.lode"
    document.save(path)
    again = lodestone.Document.load(path, model)
    assert again.tokens == document.tokens and again.text == document.text and again.methods == document.methods
    assert again.ask(QUESTION).tokens == document.ask(QUESTION).tokens


def test_progress_and_an_exception_inside_it(model, text):
    seen = []
    lodestone.Document.read(model, text[:3000], specs=["kmeans"], progress=lambda *state: seen.append(state))
    assert seen[-1][0] == seen[-1][1] and seen[-1][2] == seen[-1][3] > 0

    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        lodestone.Document.read(model, text[:3000], progress=fail)


def test_questions_from_several_threads(document):
    want = document.ask(QUESTION).text
    got = []
    threads = [threading.Thread(target=lambda: got.append(document.ask(QUESTION).text)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 4


def test_cancelled(document):
    answer = document.ask(QUESTION, stream=True, max_new_tokens=10000, stop=["@@@@"])
    next(iter(answer))
    answer.cancel()
    assert answer.ending in ("cancelled", "length", "room")


def test_errors_are_sentences(model, document, tmp_path):
    with pytest.raises(lodestone.InputError, match="indexed for"):
        document.ask(QUESTION, attention="topk:k=3")
    with pytest.raises(lodestone.InputError, match="config.json"):
        lodestone.Model(tmp_path)
    with pytest.raises(lodestone.InputError):
        lodestone.Document.load(tmp_path / "nothing.lode", model)
    with pytest.raises(lodestone.InputError, match="question"):
        document.ask("x", template="no place")
    assert issubclass(lodestone.InputError, ValueError) and issubclass(lodestone.RunError, RuntimeError)


def test_pipeline(model, text):
    answers = lodestone.pipeline(model, "kmeans:probes=16,window=255")(text, questions=[QUESTION, QUESTION])["answers"]
    assert answers[0] == answers[1] != ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_attention_after_a_fork():
    import numpy as np

    q, k = np.ones((2, 64), np.float32), np.ones((1, 9, 64), np.float32)
    lodestone.attend(q, k, k)
    child = os.fork()
    if child == 0:
        lodestone.attend(q, k, k)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
