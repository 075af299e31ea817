# SPDX-License-Identifier: Apache-2.0
"""Models, documents and questions, on the shipped model."""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
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


def test_without_a_method_a_question_attends_as_the_program_does(model, text, document):
    assert document.ask(QUESTION, max_new_tokens=1).attention == lodestone.Sequence(document).attention == document.methods[0]
    # `ask -a auto`: nothing was measured on this document.
    assert document.ask(QUESTION, "auto", 1).attention == lodestone.Sequence(document, "auto").attention == "full"
    assert lodestone.Document.read(model, text[:500]).ask(QUESTION, max_new_tokens=1).attention == "full"
    measured = lodestone.Document.read(model, text, specs=["kmeans:probes=16,window=255", "auto"])  # too short for any to pay
    assert measured.ask(QUESTION, max_new_tokens=1).attention == "full"


def test_streaming_gives_the_same_text(document):
    whole = document.ask(QUESTION).text
    assert "".join(document.ask(QUESTION, stream=True)) == whole == whole.strip()  # as `lodestone ask` prints it


def test_saved_and_loaded(document, model, tmp_path):
    path = tmp_path / "x.lode"
    document.save(path)
    before = path.read_bytes()
    with pytest.raises(lodestone.InputError, match=r"x.lode: this file exists already; overwrite=True replaces it"):
        document.save(path)
    assert path.read_bytes() == before
    document.save(path, overwrite=True)
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
    with pytest.raises(lodestone.InputError, match="max_tokens"):
        lodestone.Document.read(model, "a text", max_tokens=-3)
    for empty in ("", " \n\t"):
        with pytest.raises(lodestone.InputError, match="read: expected a text"):
            lodestone.Document.read(model, empty)
        with pytest.raises(lodestone.InputError, match="ask: expected a question"):
            document.ask(empty)
    assert issubclass(lodestone.InputError, ValueError) and issubclass(lodestone.RunError, RuntimeError)


def test_a_lone_text_is_not_a_list_of_letters(model, text, document):
    alone = lodestone.Document.read(model, text[:3000], specs="kmeans:probes=16,window=255")
    assert alone.methods == document.methods
    assert document.ask(QUESTION, stop="\n").tokens == document.ask(QUESTION).tokens
    assert len(lodestone.pipeline(model)(text[:1500], questions=QUESTION)["answers"]) == 1


def test_pipeline(model, text):
    answers = lodestone.pipeline(model, attention="kmeans:probes=16,window=255")(text, questions=[QUESTION, QUESTION])["answers"]
    assert answers[0] == answers[1] != ""


def test_a_sequence_is_fed_by_hand_and_goes_back(model, document):
    prompt = model.encode("\n\nNow answer the questions about the text above.\n\nQuestion: " + QUESTION + "\nAnswer:")
    want = document.ask(QUESTION).tokens
    sequence = lodestone.Sequence(document, max_tokens=100)
    logits = sequence.forward(prompt)
    assert logits.shape == (len(prompt), model.shape["vocab"]) and logits.dtype == np.float32
    assert int(logits[-1].argmax()) == want[0]
    assert sequence.tokens == document.tokens + len(prompt) and sequence.own_tokens == prompt
    sequence.roll_back(document.tokens)
    assert list(sequence.generate(prompt, max_new_tokens=len(want)))[: len(want) - 1] == want[:-1]
    with pytest.raises(lodestone.InputError, match="at most 100"):
        sequence.forward([1] * 101)
    with pytest.raises(lodestone.InputError, match="token ids"):
        sequence.forward([-1])
    with pytest.raises(lodestone.InputError, match="roll_back"):
        sequence.roll_back(document.tokens - 1)
    with pytest.raises(lodestone.InputError, match="indexed for"):
        lodestone.Sequence(document, "topk:k=7")


def test_exact_answers_are_those_of_full_attention(document):
    exact, full = document.ask(QUESTION, exact=True), document.ask(QUESTION, attention="full")
    assert exact.tokens == full.tokens and 0 <= exact.accepted <= 1


def test_sources(document):
    answer = document.ask(QUESTION, sources=True)
    assert any("Clara Whitaker" in source.cited_text for source in answer.sources)
    assert all(0 < source.weight <= 1 and source.cited_text in document.text for source in answer.sources)


def test_sources_of_an_answer_that_came_without_them(document):
    for asked in ({"attention": "full"}, {"temperature": 1.0, "seed": 5}, {"exact": True}, {"max_new_tokens": 1}):
        wanted, later = document.ask(QUESTION, sources=True, **asked), document.ask(QUESTION, **asked)
        assert [(s.cited_text, s.weight) for s in later.sources] == [(s.cited_text, s.weight) for s in wanted.sources]
    assert later.sources and later.text == wanted.text


def test_a_file_names_its_model(document, tmp_path):
    document.save(tmp_path / "x.lode")
    again = lodestone.Document.load(tmp_path / "x.lode")
    assert again.ask(QUESTION).tokens == document.ask(QUESTION).tokens
    with pytest.raises(lodestone.InputError, match="nothing.lode"):
        lodestone.Document.load(tmp_path / "nothing.lode")
    (tmp_path / "text.lode").write_text("no document")
    with pytest.raises(lodestone.InputError, match="expected a .lode file"):
        lodestone.Document.load(tmp_path / "text.lode")


def test_keys_go_out_without_a_copy_and_come_back_as_a_document(model, document):
    layers = [document.kv(layer) for layer in range(model.shape["layers"])]
    first = layers[0][0][0]
    assert first.shape == (document.tokens, model.shape["head_dim"]) and first.dtype == np.float16 and not first.flags.writeable
    assert document.kv(0)[0][0].ctypes.data == first.ctypes.data
    keys = [np.stack([k for k, _ in heads]) for heads in layers]
    values = [np.stack([v for _, v in heads]) for heads in layers]
    again = lodestone.Document.from_keys(model, document.token_ids, keys, values, specs=["kmeans:probes=16,window=255"])
    assert again.ask(QUESTION).tokens == document.ask(QUESTION).tokens and again.fingerprint == document.fingerprint
    with pytest.raises(lodestone.InputError, match="layers"):
        lodestone.Document.from_keys(model, document.token_ids, keys[:1], values[:1])
    with pytest.raises(lodestone.InputError, match="in layer 0"):
        lodestone.Document.from_keys(model, document.token_ids[:-1], keys, values)
    vocab = max(document.token_ids) + 1_000_000
    for token in (-1, vocab):
        with pytest.raises(lodestone.InputError, match=rf"expected ids from 0 to \d+ .*, found {token} at 1"):
            lodestone.Document.from_keys(
                model, [document.token_ids[0], token, *document.token_ids[2:]], keys, values)
    with pytest.raises(lodestone.InputError, match="layer below"):
        document.kv(99)


def test_keys_outlive_their_document(model, text):
    document = lodestone.Document.read(model, text[:2000])
    key = document.kv(1)[0][0]
    want = key.copy()
    del document
    np.testing.assert_array_equal(key, want)


def test_an_estimate(model):
    estimate = model.estimate(2000, ["kmeans"])
    assert estimate.fits and estimate.why and estimate.prefill_seconds > 0
    assert [m.attention for m in estimate.methods][0] == "full" and len(estimate.methods) == 2
    with pytest.raises(lodestone.InputError):
        model.estimate(10**9)
    for wrong in ({"tokens": 0}, {"tokens": -5}, {"tokens": 9, "question": -1}):
        with pytest.raises(lodestone.InputError, match="at least one token each, found"):
            model.estimate(**wrong)
    for wrong in ({"tokens": 2**63 - 1}, {"tokens": 9, "question": 2**63 - 1}):
        with pytest.raises(lodestone.InputError, match="the model's context, found"):
            model.estimate(**wrong)
    with pytest.raises(lodestone.InputError, match="expected a folder that is there, found '/nope'"):
        model.estimate(9, folder="/nope")


def test_draws_are_from_the_likeliest_tokens_that_the_caller_names(document):
    greedy = document.ask(QUESTION).text
    assert document.ask(QUESTION, temperature=2.0, top_k=1).text == greedy
    assert document.ask(QUESTION, temperature=2.0, top_p=1e-6).text == greedy
    drawn = {document.ask(QUESTION, temperature=2.0, seed=seed).text for seed in range(3)}
    assert len(drawn | {greedy}) > 2
    for wrong in ({"top_k": -1}, {"top_k": 2**31}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": 1.5}, {"seed": "a"}):
        with pytest.raises(lodestone.InputError, match="expected"):
            document.ask(QUESTION, temperature=1.0, **wrong)
    with pytest.raises(lodestone.InputError, match="ask: expected a seed from 0 to 18446744073709551615, found -1"):
        document.ask(QUESTION, seed=-1)


class Asks:
    """Asks its own model while the model waits for it."""

    document = None

    def __init__(self, **_):
        pass

    def build(self, keys):
        pass

    def select(self, head, queries, begin, end):
        self.document.ask(QUESTION)
        return np.arange(begin, end)


def test_a_model_is_not_asked_by_what_it_waits_for(model, text, document):
    lodestone.register_method("asks", Asks)
    Asks.document = document
    asking = lodestone.Document.read(model, text[:3000], specs=["asks:window=16"])
    with pytest.raises(lodestone.RunError, match="within a method"):
        asking.ask(QUESTION)
    with pytest.raises(lodestone.RunError, match="progress"):
        lodestone.Document.read(model, text[:3000], progress=lambda *_: document.ask(QUESTION))
    assert document.ask(QUESTION).text
    Asks.document = None  # methods outlive the interpreter, and what they hold


class EveryNth:
    """Attends to every n-th far key."""

    def __init__(self, layer, query_heads, kv_heads, head_dim, every="4"):
        self.every, self.group, self.d = int(every), query_heads // kv_heads, head_dim

    def build(self, keys):
        if self.every == 13:
            raise KeyError("build fails")
        assert all(k.dtype == np.float32 and k.shape[1] == self.d for k in keys)

    def select(self, head, queries, begin, end):
        assert queries.shape == (self.group, self.d)
        if self.every == 17:
            raise KeyError("select fails")
        if self.every == 19:
            return np.array([end])
        if self.every == 23:
            return "no rows"
        return np.arange(begin, end, self.every)


def test_a_method_in_python(model, text):
    if "every-nth" not in lodestone.methods():
        lodestone.register_method("every-nth", EveryNth, {"every": "attends to far keys whose position this divides"})
    document = lodestone.Document.read(model, text, specs=["every-nth:every=1,window=64", "every-nth:every=4,window=64"])
    full = document.ask(QUESTION, attention="full")
    assert document.ask(QUESTION, attention="every-nth:every=1,window=64").tokens == full.tokens
    assert 0.2 < document.ask(QUESTION, attention="every-nth:every=4,window=64").work.selectivity < 0.3
    selector = lodestone.Selector("every-nth:every=2,window=8", 4, 2, 32)
    k = np.random.default_rng(0).standard_normal((2, 50, 32), dtype=np.float32)
    selector.build(k, k)
    sets = selector.select(np.ones((1, 4, 32), np.float32), 49, k, k)
    assert [list(s[4]) for s in sets] == [list(range(1, 42, 2))] * 2
    with pytest.raises(lodestone.InputError, match="every"):
        lodestone.Document.read(model, text, specs=["every-nth:other=1"])
    with pytest.raises(lodestone.InputError, match="taken|registered|every-nth"):
        lodestone.register_method("every-nth", EveryNth)


def test_a_method_in_python_without_its_parts_is_refused(model, text):
    class NoBuild:
        def select(self, head, queries, begin, end):
            return np.arange(begin, end)

        def __init__(self, **_):
            pass

    lodestone.register_method("no-build", NoBuild)
    with pytest.raises(lodestone.InputError, match=r"no-build: .* found NoBuild without build\(\); add it"):
        lodestone.Document.read(model, text[:3000], specs=["no-build:window=16"])

    class Raises(NoBuild):
        @property
        def build(self):
            raise KeyError("its own")

    lodestone.register_method("raises", Raises)
    with pytest.raises(KeyError, match="its own"):
        lodestone.Document.read(model, text[:3000], specs=["raises:window=16"])


def test_exceptions_of_a_method_in_python_come_through(model, text):
    with pytest.raises(KeyError, match="build fails"):
        lodestone.Document.read(model, text, specs=["every-nth:every=13,window=64"])
    for every, error in ((17, "select fails"), (19, "from select"), (23, "array")):
        document = lodestone.Document.read(model, text[:3000], specs=[f"every-nth:every={every},window=64"])
        with pytest.raises((KeyError, lodestone.InputError), match=error):
            document.ask(QUESTION)
        assert document.ask(QUESTION, attention="full").text


def in_a_fork(body):
    """The exit status of a child that runs `body`, and does not hang."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_told_to_load_its_own(model, document, text):
    selector = lodestone.Selector("topk:k=4", 2, 1, 64)
    answer = document.ask(QUESTION)

    def refused():
        k = np.ones((1, 9, 64), np.float32)
        for use in (
            lambda: document.ask(QUESTION),
            lambda: lodestone.Document.read(model, text[:500]),
            lambda: lodestone.Sequence(document),
            lambda: document.save("nowhere.lode"),
            lambda: list(answer),
            lambda: selector.build(k, k),
        ):
            with pytest.raises((lodestone.RunError), match="fork"):
                use()
        again = lodestone.Model(ROOT / "models" / "pocket")
        assert lodestone.Document.read(again, text[:3000]).ask(QUESTION, max_new_tokens=2).tokens

    assert in_a_fork(refused) == 0


def test_a_model_ends_while_an_answer_is_under_way(text):
    model = lodestone.Model(ROOT / "models" / "pocket")
    document = lodestone.Document.read(model, text[:3000], specs=["every-nth:every=3,window=64"])
    answer = document.ask(QUESTION, stream=True, max_new_tokens=500, stop=["@@@@"])
    next(iter(answer))
    del answer, document, model


STREAMING = """
import lodestone, numpy
class All:
    def __init__(self, **_): pass
    def build(self, keys): pass
    def select(self, head, queries, begin, end): return numpy.arange(begin, end)
lodestone.register_method("all-of-them", All)
model = lodestone.Model("models/pocket")
document = lodestone.Document.read(model, "The cat sat on the mat. " * 60, specs=["all-of-them:sink=1,window=16"])
def ask(**how):
    return document.ask("Who sat?", stop=["@@@@"], **how)
"""
KEPT = "answer = ask(stream=True, max_new_tokens=300)\nprint(next(iter(answer)))"
ITERATED = "pieces = iter(ask(stream=True, max_new_tokens=300))\nprint(next(pieces))"
SOURCES = "print(ask(max_new_tokens=1, sources=True).text)"


@pytest.mark.parametrize("ends", [KEPT, ITERATED, SOURCES], ids=["kept", "iterated", "sources"])
def test_a_program_may_end_while_a_method_in_python_answers(ends):
    done = subprocess.run([sys.executable, "-c", STREAMING + ends], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_attention_after_a_fork():
    q, k = np.ones((2, 64), np.float32), np.ones((1, 9, 64), np.float32)
    lodestone.attend(q, k, k)
    child = os.fork()
    if child == 0:
        lodestone.attend(q, k, k)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
