# SPDX-License-Identifier: Apache-2.0
"""Chat templates through `index`, `ask` and `chat`, and what a first hour stumbles over."""

import json
import time
import unittest

import tiny_model
from program import ProgramTest, run

TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|begin|>assistant:{% endif %}")
BEGIN, END = tiny_model.BOS, tiny_model.EOS


class Chat(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.talker = tiny_model.write(cls.folder / "talker")
        (cls.talker / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")

    def indexed(self, name, *arguments, model=None):
        path = self.folder / name
        result = self.assert_done(run("index", "-m", model or self.talker, "-f", self.text, "-o", path, "--json", *arguments))
        return path, result.json()

    def test_template_is_stored_and_used(self):
        path, said = self.indexed("chat.lode", "--system", "Be\\nbrief.")
        self.assertTrue(said["chat"])
        plain, said_plain = self.indexed("plain.lode", "--chat", "off")
        self.assertFalse(said_plain["chat"])
        self.assertGreater(said["tokens"], said_plain["tokens"])
        answer = self.assert_done(run("ask", path, "Who?", "-n", "4", "--json")).json()["answers"][0]
        without = self.assert_done(run("ask", plain, "Who?", "-n", "4", "--json", "--template", "\\n\\n{question}")).json()["answers"][0]
        # "\n\nWho?<|end|>\n<|begin|>assistant:" against "\n\nWho?"
        self.assertGreater(answer["tokens_prefilled"], without["tokens_prefilled"] + 3)
        self.assert_refused(run("ask", path, "Who?", "--template", "{question}"), "--template", "--chat off")
        self.assert_refused(run("ask", plain, "Who?", "--chat", "on"), "--chat on")
        remark = self.assert_done(run("ask", plain, "Who?", "-n", "2")).err
        self.assertIn("without the model's chat template", remark)
        for words, why in ((("nothing.lode", "Who?"), "which is not there"), (("Who?", path), "behind a question")):
            self.assert_refused(run("ask", plain, *words, "-n", "1"), "expected .lode files in front of the questions", why)
        self.assert_done(run("ask", path, "Who?", "-n", "2", "--chat", "off"))

    def test_report_in_the_template(self):
        """Its answers are those of eval, and lie in no folder with others."""
        suite, samples, answers = (self.folder / name for name in ("asks.toml", "asked.jsonl", "asked-answers.jsonl"))
        suite.write_text('title = "Asks"\n[[run]]\nkind = "eval"\ntasks = ["needle"]\nlengths = ["1k"]\nmethods = ["streaming:window=16"]\n'
                         'protocols = ["context-dense"]\nsamples = 2\nshow = ["table"]\n', encoding="utf-8")
        samples.write_text(json.dumps({"id": "a", "task": "t", "tokens": 9, "context": "Ann lit it.", "question": "Who?",
                                       "answers": ["x"], "match": "contains", "max_new": 4}) + "\n", encoding="utf-8")
        self.assert_done(run("eval", "-m", self.talker, "--samples", samples, "-a", "streaming:window=16", "--chat", "-o", answers))
        folder = self.folder / "asks"
        command = ("report", suite, "-m", self.talker, "--samples", samples, "-o", folder, "--quiet")
        self.assert_done(run(*command, "--chat"))

        def outputs(path):
            return [line["output_ids"] for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()) if "output_ids" in line]
        raw = folder / "raw" / "answers-context-dense.jsonl"
        self.assertEqual(len(outputs(raw)), 2)
        self.assertEqual(outputs(raw)[0], outputs(answers)[0])
        self.assertRegex((folder / "report.md").read_text(encoding="utf-8"), r"(?m)^    lodestone report .* --chat$")
        self.assert_refused(run(*command), "answers-context-dense.jsonl", "more of them")
        self.assert_refused(run("report", suite, "-m", self.model, "-o", self.folder / "none", "--chat"), "chat template")

    def test_eval_in_the_template_gives_the_answers_of_ask(self):
        path, _ = self.indexed("evaluated.lode")
        asked = self.assert_done(run("ask", path, "Who lit it?", "-a", "full", "--json")).json()["answers"][0]
        samples, answers = self.folder / "chat.jsonl", self.folder / "chat-answers.jsonl"
        samples.write_text(json.dumps({"id": "a", "task": "t", "tokens": 9, "context": self.text.read_text(encoding="utf-8"),
                                       "question": "Who lit it?", "answers": ["x"], "match": "contains"}) + "\n", encoding="utf-8")
        command = ("eval", "-m", self.talker, "--samples", samples, "-a", "full", "--json")
        self.assertTrue(self.assert_done(run(*command, "-o", answers, "--chat")).json()["chat"])
        self.assertEqual(json.loads(answers.read_text(encoding="utf-8").splitlines()[1])["output"].strip(), asked["answer"].strip())
        self.assertNotIn("chat", self.assert_done(run(*command)).json())
        self.assert_refused(run(*command, "-o", answers, "--chat", "off"), "more of them")
        self.assertNotIn("chat", self.assert_done(run("eval", "-m", self.model, *command[3:], "--chat", "auto")).json())
        self.assert_refused(run("eval", "-m", self.model, *command[3:], "--chat", "on"), "chat template")
        self.assert_refused(run(*command, "--chat", "perhaps"), "--chat: expected one of auto, on, off, found 'perhaps'")

    def test_an_evaluation_that_goes_on_keeps_its_day(self):
        dated = tiny_model.write(self.folder / "dated")
        (dated / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ strftime_now('%Y') }}" + TEMPLATE}), encoding="utf-8")
        samples, answers = self.folder / "dated.jsonl", self.folder / "dated-answers.jsonl"
        one = {"task": "t", "tokens": 9, "context": self.text.read_text(encoding="utf-8"), "question": "Who?", "answers": ["x"], "match": "contains"}
        samples.write_text("".join(json.dumps({"id": i, **one}) + "\n" for i in "ab"), encoding="utf-8")
        command = ("eval", "-m", dated, "--samples", samples, "-a", "full", "--chat", "-o", answers, "--json")
        before = int(time.time())
        self.assert_done(run(*command, "--limit", "1"))
        first, *rest = answers.read_text(encoding="utf-8").splitlines()
        settings = json.loads(first)
        self.assertTrue(before <= settings["begun_at"] <= time.time(), settings)
        settings["begun_at"] = 10**9  # a day of the year 2001
        answers.write_text("\n".join((json.dumps(settings), *rest)) + "\n", encoding="utf-8")
        self.assert_done(run(*command))
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        self.assertEqual((lines[0]["begun_at"], [line["id"] for line in lines[1:]]), (10**9, ["a", "b"]))
        del settings["begun_at"]  # as versions wrote it that mixed days
        answers.write_text("\n".join((json.dumps(settings), *rest)) + "\n", encoding="utf-8")
        self.assert_refused(run(*command), "on which day they were begun")

    def test_templates_that_are_wrong(self):
        for name, template, mention in (("broken", "{% if %}", "line 1"), ("raises", "{{ raise_exception('no such role') }}", "no such role"),
                                        ("endless", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "at most")):
            model = tiny_model.write(self.folder / name)
            (model / "chat_template.jinja").write_text(template, encoding="utf-8")
            self.assert_refused(run("index", "-m", model, "-f", self.text, "-o", self.folder / "x.lode", "--quiet"), "chat template", mention)
            self.assert_done(run("index", "-m", model, "-f", self.text, "-o", self.folder / f"{name}.lode", "--quiet", "--chat", "off"))
        self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", self.folder / "x.lode", "--chat", "on"), "--chat on")
        self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", self.folder / "x.lode", "--system", "x"), "--system")

    def test_conversation(self):
        path, _ = self.indexed("talk.lode", "-a", "kmeans:clusters=4,window=64")
        save = self.folder / "talk.txt"
        lines = f"Who lit it?\n/sources\nWhen?\n/method\n/method full\nAnd then?\n/back\n/save {save}\n/help\n/quit\nnever asked\n"
        result = self.assert_done(run("chat", path, "-n", "6", stdin=lines))
        self.assertIn('("And then?" and its answer are forgotten)', result.err)
        self.assertEqual(save.stat().st_mode & 0o777, 0o600, "what is said of a text is its owner's")
        self.assertIn("(there is no question to forget)", self.assert_done(run("chat", path, stdin="/back\n")).err)
        self.assertIn("(the conversation is forgotten)", self.assert_done(run("chat", path, "-n", "1", stdin="Who?\nWhen?\n/new\n")).err)
        self.assertIn("cut off behind token 6, by --predict", result.err)
        for words in ("> Who lit it?", "> When?", "> And then?", "kmeans:", "/method SPEC"):
            self.assertIn(words, result.out)
        self.assertNotIn("never asked", result.out)
        saved = save.read_text(encoding="utf-8")
        self.assertIn("> When?", saved)
        self.assertNotIn("And then?", saved)
        self.assert_refused_in_chat(path, f"/save {save}\n", "a new file")
        self.assert_refused_in_chat(path, "/nonsense\n", "/sources")
        self.assert_refused_in_chat(path, "/sources\n", "a question before it")
        self.assert_refused_in_chat(path, "/method nonsense\n", "and auto where")
        self.assertIn("> When?\n", self.assert_done(run("chat", path, "-n", "2", stdin="/method full\n/method auto\nWhen?\n")).out)
        stopped = run("chat", path, "-n", "2", "--json", stdin="Who?\n/nonsense\nnever asked\n")
        self.assertEqual((stopped.code, [turn["question"] for turn in stopped.json()["turns"]]), (2, ["Who?"]))

    def assert_refused_in_chat(self, path, lines, mention):
        result = run("chat", path, "-n", "2", stdin=lines)
        self.assertEqual(result.code, 2, result.err)
        self.assertIn(mention, result.err)

    def test_turns_are_what_a_fresh_reading_gives(self):
        """What is kept of a conversation changes no answer."""
        path, _ = self.indexed("turns.lode", "--kv-type", "f32")
        talk = self.assert_done(run("chat", path, "-n", "8", "--json", stdin="Who?\nWhen?\nWhere?\n")).json()
        self.assertTrue(talk["chat"])
        self.assertIn(talk["turns"][0]["ended_by"], ("stop", "predict"))
        redone = self.assert_done(run("chat", path, "-n", "8", "--json", stdin="Who?\n/method full\nWhen?\n/method full\nWhere?\n")).json()
        self.assertEqual([t["answer"] for t in talk["turns"]], [t["answer"] for t in redone["turns"]])
        first = self.assert_done(run("ask", path, "Who?", "-n", "8", "--json")).json()["answers"][0]["answer"]
        self.assertEqual(talk["turns"][0]["answer"], first)


class FirstHour(ProgramTest):
    def test_flags_take_one_value(self):
        context = self.index("flags.lode")
        for stop in (("--stop", "X"), ("--stop=X",), ("--stop", "\\n", "--stop", "X")):
            answers = self.assert_done(run("ask", context, *stop, "In which city?", "-n", "2", "--json")).json()["answers"]
            self.assertEqual([a["question"] for a in answers], ["In which city?"])
        result = self.assert_done(run("ask", context, "-a", "full", "kmeans", "-n", "2"))
        self.assertIn("-a kmeans", result.err)

    def test_escapes_and_special_tokens(self):
        context = self.index("escapes.lode")
        tokens = {name: self.assert_done(run("ask", context, "Who?", "-n", "1", "--json", "--template", template)).json()["answers"][0]["tokens_prefilled"]
                  for name, template in (("escaped", "\\n{question}"), ("plain", "\n{question}"), ("special", "<|end|>{question}"), ("bare", "{question}"))}
        self.assertEqual(tokens["escaped"], tokens["plain"])
        self.assertEqual(tokens["special"], tokens["bare"] + 1)
        spelled = self.assert_done(run("ask", context, "<|end|>", "-n", "1", "--json", "--template", "{question}")).json()["answers"][0]
        self.assertGreater(spelled["tokens_prefilled"], 1)

    def test_hints_and_reasons(self):
        context = self.index("hints.lode")
        self.assertIn('"What is the lamp"', self.assert_done(run("ask", context, "What", "is", "the", "lamp", "-n", "1")).err)
        several = self.assert_done(run("ask", context, "Who lit it?", "When was it?", "-n", "2")).out
        self.assertLess(several.index("> Who lit it?"), several.index("> When was it?"))

    def test_specs_that_search_otherwise_share_an_index(self):
        context = self.index("shared.lode", "-a", "kmeans:clusters=4,probes=1,window=64")
        usual = self.assert_done(run("ask", context, "Who?", "-n", "4", "--json", "-a", "kmeans:clusters=4,probes=2,window=64"))
        fresh = self.assert_done(run("ask", self.index("fresh.lode", "-a", "kmeans:clusters=4,probes=2,window=64"), "Who?", "-n", "4", "--json"))
        self.assertEqual(usual.json()["answers"][0]["answer"], fresh.json()["answers"][0]["answer"])


if __name__ == "__main__":
    unittest.main()
