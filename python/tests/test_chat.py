# SPDX-License-Identifier: Apache-2.0
"""Documents in a chat template: put there and asked as `lodestone index` and `ask` do."""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import pytest

import lodestone

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))
import tiny_model  # noqa: E402

PROGRAM = pathlib.Path(os.environ.get("LODESTONE_PROGRAM", pathlib.Path(lodestone._core.__file__).parents[2] / "lodestone"))
QUESTION = "What is the profession of Clara Whitaker?"
# Asks as the shipped model was trained, in its own turns.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'system' %}<|reserved_2|>{% elif m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\nAnswer:{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|begin|>{{ m.role }}> {{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|begin|>assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def text_of_demo():
    whole = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")
    at = whole.index("Clara Whitaker")
    return whole[max(0, at - 3000) : at + 2000]


@pytest.fixture(scope="module")
def text():
    return text_of_demo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shipped model with a chat template."""
    made = tmp_path_factory.mktemp("chat") / "pocket"
    made.mkdir()
    for file in (ROOT / "models" / "pocket").iterdir():
        if file.name != "tokenizer_config.json":
            (made / file.name).symlink_to(file)
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def model(folder):
    return lodestone.Model(folder)


@pytest.fixture(scope="module")
def document(model, text):
    return lodestone.Document.read(model, text, system="Be brief.")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model that thinks "Hm." and answers "7", whatever is asked."""
    made = tiny_model.write_talker(
        tmp_path_factory.mktemp("chat") / "thinker", ["<think>", "</think>"], [":", "<think>", "H", "m", ".", "</think>", "7", "<|end|>"]
    )
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": THINKS}), encoding="utf-8")
    return lodestone.Model(made)


def run(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def test_a_text_goes_into_the_template_where_there_is_one(model, text, document):
    plain = lodestone.Document.read(model, text, chat=False)
    assert document.chat and lodestone.Document.read(model, text, chat=True).chat and not plain.chat
    head = model.decode(document.token_ids[: document.tokens - plain.tokens + 1])
    assert head.startswith("Be brief.") and document.text == plain.text == text
    shipped = lodestone.Model(ROOT / "models" / "pocket")
    assert not lodestone.Document.read(shipped, text).chat


def test_questions_go_on_in_the_template_also_of_a_file(model, document, tmp_path):
    document.save(tmp_path / "x.lode")
    again = lodestone.Document.load(tmp_path / "x.lode", model)
    first, second = document.ask(QUESTION, max_new_tokens=12), again.ask(QUESTION, max_new_tokens=12)
    assert again.chat and first.tokens == second.tokens
    # Blanks around a question are nobody's, and the template's own prompt is what follows the text.
    assert document.ask(f"  {QUESTION}\n", max_new_tokens=12).tokens == first.tokens
    sequence = lodestone.Sequence(document)
    assert list(sequence.generate(model.encode(f"\n\n{QUESTION}\nAnswer:"), 6)) == first.tokens[:6]


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built beside the package")
@pytest.mark.parametrize("chat", ["auto", "off"])
def test_the_program_answers_alike(folder, model, text, tmp_path, chat):
    path, source = tmp_path / "program.lode", tmp_path / "text.txt"
    source.write_text(text, encoding="utf-8")
    told = ["--system", "Be brief."] if chat == "auto" else []
    run("index", "-m", folder, "-f", source, "-o", path, "-a", "full", "--quiet", "--chat", chat, *told)
    answer = json.loads(run("ask", path, QUESTION, "--json", "--quiet", "-n", "12"))["answers"][0]
    # The template may write the day: another one makes another file, never another answer here.
    mine = lodestone.Document.read(model, text, chat=None if chat == "auto" else False, system="Be brief." if told else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = [of.ask(QUESTION, max_new_tokens=12) for of in (mine, lodestone.Document.load(path, model))]
    assert mine.token_ids == lodestone.Document.load(path).token_ids
    assert {one.text for one in asked} == {answer["answer"]} and answer["answer"]
    assert {len(one.tokens) for one in asked} == {answer["tokens_generated"]}
    mine.save(tmp_path / "python.lode")
    again = json.loads(run("ask", tmp_path / "python.lode", QUESTION, "--json", "--quiet", "-n", "12"))["answers"][0]
    assert again["answer"] == answer["answer"]


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built beside the package")
@pytest.mark.parametrize("chat", ["auto", "off"])
def test_a_conversation_goes_on_as_in_the_program(folder, model, text, tmp_path, chat):
    path, source, questions = tmp_path / "talk.lode", tmp_path / "text.txt", [QUESTION, "And who is older?", "Where?"]
    source.write_text(text, encoding="utf-8")
    run("index", "-m", folder, "-f", source, "-o", path, "-a", "full", "--quiet", "--chat", chat, "--kv-type", "f32")
    command = [PROGRAM, "chat", path, "--json", "--quiet", "-n", "8"]
    said = json.loads(subprocess.run(command, input="\n".join(questions), check=True, capture_output=True, text=True).stdout)
    document, answers = lodestone.Document.load(path, model), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for question in questions:
            answers.append(document.ask(question, max_new_tokens=8, stream=True, after=answers[-1] if answers else None))
        alone = document.ask(questions[1], max_new_tokens=8)
    assert [answer.text for answer in answers] == [turn["answer"] for turn in said["turns"]]
    assert alone.tokens != answers[1].tokens


def test_an_answer_ends_with_its_turn_and_thoughts_are_apart(thinker):
    document = lodestone.Document.read(thinker, "It was a quiet day. " * 20)
    answer = document.ask("Who?")
    assert (answer.text, answer.thoughts, answer.ending) == ("7", "Hm.", "stop")
    assert document.ask("Who?", think="off").thoughts == ""
    assert document.ask("Who?", max_thought_tokens=1).text == "7"


def test_what_the_program_remarks_is_a_warning(model, text, document, thinker):
    plain = lodestone.Document.read(model, text, chat=False)
    with pytest.warns(UserWarning, match="without the model's chat template: questions are put by template"):
        plain.ask(QUESTION, max_new_tokens=1)
    with pytest.warns(UserWarning, match="chat=False puts the question there without closing its turn"):
        document.ask(QUESTION, max_new_tokens=1, chat=False)
    with pytest.warns(UserWarning, match="think: "):
        lodestone.Document.read(model, text, think="high")
    with pytest.warns(UserWarning, match="think: "):
        document.ask(QUESTION, max_new_tokens=1, think="off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.ask(QUESTION, max_new_tokens=1, template="{question}")
        document.ask(QUESTION, max_new_tokens=1)
        thinker_text = lodestone.Document.read(thinker, text, think="on")
        thinker_text.ask("Who?", think="on", max_new_tokens=1)


def test_a_template_that_does_not_take_the_text_says_how_to_do_without(folder, text, tmp_path):
    odd = tmp_path / "odd"
    odd.mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer_config.json":
            (odd / file.name).symlink_to(file)
    (odd / "chat_template.jinja").write_text("{{ messages[0].content | upper }}", encoding="utf-8")
    model = lodestone.Model(odd)
    with pytest.raises(lodestone.InputError, match="gives a message's text once, as it is; .*; chat=False indexes the text outside of it"):
        lodestone.Document.read(model, text)
    assert not lodestone.Document.read(model, text, chat=False).chat


def test_settings_that_do_not_fit_are_refused(model, text, document):
    shipped = lodestone.Model(ROOT / "models" / "pocket")
    plain = lodestone.Document.read(model, text, chat=False)
    for refused, why in (
        (lambda: lodestone.Document.read(shipped, text, chat=True), "expected one for chat=True, found none"),
        (lambda: lodestone.Document.read(shipped, text, system="Be brief."), "system, .*: expected a model with a chat template"),
        (lambda: lodestone.Document.read(model, text, chat=False, think="on"), "think: .* and not chat=False"),
        (lambda: lodestone.Document.read(model, text, document_role="assistant"), "document_role 'user' or 'system'"),
        (lambda: lodestone.Document.read(model, text, think="much"), "think: expected on, off"),
        (lambda: document.ask(QUESTION, template="{question}"), "expected no template, .* chat=False asks outside it"),
        (lambda: plain.ask(QUESTION, chat=True), "for chat=True, found one without"),
        (lambda: plain.ask(QUESTION, think="on"), "asked in a chat template, for think"),
        (lambda: document.ask(QUESTION, think="much"), "think: expected on, off"),
    ):
        with pytest.raises(lodestone.InputError, match=why):
            refused()
    assert lodestone.Document.read(model, text, system="Be brief.", document_role="system").chat


def test_a_question_goes_on_only_from_an_answer_about_its_own_document(model, text):
    one, other = lodestone.Document.read(model, text), lodestone.Document.read(model, text[:2000])
    answer = one.ask(QUESTION, max_new_tokens=4)
    with pytest.raises(lodestone.InputError, match="found one about another"):
        other.ask(QUESTION, max_new_tokens=4, after=answer)
    for question, after, found in [(None, None, "found NoneType"), (b"Who?", None, "found bytes"), ("a\ud800", None, "surrogate pair at character 1"),
                                   ("Who?", "x", "as after=, found str")]:  # fmt: skip
        with pytest.raises(lodestone.InputError, match=found):
            one.ask(question, after=after)
    with pytest.raises(lodestone.InputError, match="found bytes"):
        lodestone.Document.read(model, b"text")
