# SPDX-License-Identifier: Apache-2.0
"""A model that thinks before it answers: thoughts are told from the answer by `ask`, `chat` and `serve`."""

import json
import shutil
import unittest

import tiny_model
from program import ProgramTest, run
from server import Server

TEMPLATE = ("{% for m in messages %}<|begin|>{{ m.role }}> {{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}"
            "<|begin|>assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}")
SCRIPT = [":", "<think>", "H", "m", ".", "</think>", "7", "<|end|>"]


# The name of Gemma 4's channel belongs to its mark, also where it comes in pieces.
CHANNEL = ["<|channel>", "thou", "ght\n", "<channel|>"]
IN_CHANNEL = [":", "<|channel>", "thou", "ght\n", "H", "m", ".", "<channel|>", "7", "<|end|>"]


class Thoughts(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.thinker = tiny_model.write_talker(cls.folder / "thinker", ["<think>", "</think>"], SCRIPT)
        (cls.thinker / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
        cls.contexts = cls.folder / "contexts"
        cls.contexts.mkdir()
        cls.context = cls.contexts / "book.lode"
        run("index", "-m", cls.thinker, "-f", cls.text, "-o", cls.context, "--quiet", "-a", "full")

    def ask(self, *arguments):
        return self.assert_done(run("ask", self.context, "Who?", *arguments))

    def test_the_answer_is_apart(self):
        asked = self.ask("--quiet")
        self.assertEqual((asked.out, asked.err), ("7\n", ""))
        self.assertNotIn("Hm.", self.ask().err)  # no terminal
        self.assertEqual(self.ask("--show-thoughts").out, "Hm.\n\n7\n")
        for exact in ((), ("--exact",)):
            answer = self.ask("--json", "--show-sources", *exact).json()["answers"][0]
            self.assertEqual((answer["answer"], answer["thoughts"], answer["tokens_thought"], answer["tokens_generated"], answer["ended_by"]),
                             ("7", "Hm.", 5, 7, "stop"))
        self.assertEqual(self.ask("--stop", "m", "--json").json()["answers"][0]["answer"], "7")

    def test_an_answer_that_ends_within_its_thoughts(self):
        cut = self.ask("-n", "3")
        self.assertEqual(cut.out.strip(), "")
        self.assertIn("still thinking when its 3 tokens were used up; -n", cut.err)
        answer = self.ask("-n", "3", "--json").json()["answers"][0]
        self.assertEqual((answer["answer"], answer["thoughts"], answer["ended_by"]), ("", "Hm", "predict"))

    def test_whether_to_think(self):
        without = self.ask("--think", "off", "--json").json()["answers"][0]
        self.assertEqual(without["answer"], "7")
        self.assertNotIn("thoughts", without)
        self.assertEqual(self.ask("--think", "on", "--json").json()["answers"][0]["thoughts"], "Hm.")
        plain = self.folder / "plain.lode"
        self.assert_done(run("index", "-m", self.thinker, "-f", self.text, "-o", plain, "--quiet", "-a", "full", "--chat", "off"))
        self.assert_refused(run("ask", plain, "Who?", "--think", "off"), "--think", "chat template")

    def test_how_much_to_think(self):
        asked = self.ask("--think", "low")
        self.assertEqual(asked.out, "7\n")
        self.assertIn("not how much", asked.err)
        self.assert_refused(run("ask", self.context, "Who?", "--think", "much"), "--think")

    def test_what_a_text_was_indexed_with(self):
        name = self.folder / "unthinking.lode"
        self.assert_done(run("index", "-m", self.thinker, "-f", self.text, "-o", name, "--quiet", "-a", "full", "--think", "off"))
        self.assertNotIn("thoughts", run("ask", name, "Who?", "--json").json()["answers"][0])
        self.assertEqual(run("ask", name, "Who?", "--json", "--think", "on").json()["answers"][0]["thoughts"], "Hm.")
        self.assert_refused(run("index", "-m", self.thinker, "-f", self.text, "-o", self.folder / "other.lode", "--chat", "off", "--think", "off"), "--think")
        self.assert_refused(run("index", "--append", name, "-f", self.text, "--think", "on"), "--think: expected none beside --append")

    def test_thoughts_are_ended(self):
        for exact in ((), ("--exact",)):
            for most, thoughts in ((0, None), (1, "H"), (2, "Hm"), (3, "Hm."), (4, "Hm.")):
                answer = self.ask("--think-tokens", str(most), "--json", *exact).json()["answers"][0]
                self.assertEqual((answer["answer"], answer.get("thoughts"), answer["ended_by"]), ("7", thoughts, "stop"))
                self.assertEqual(answer["tokens_thought"], 2 + min(most, 3))

    def test_a_conversation_goes_on_without_thoughts(self):
        talk = self.assert_done(run("chat", self.context, "--json", stdin="Who?\nWhen?\n")).json()
        self.assertEqual([(t["answer"], t["thoughts"]) for t in talk["turns"]], [("7", "Hm.")] * 2)
        self.assertEqual(run("chat", self.context, "--show-thoughts", "--quiet", stdin="Who?\n").out, "> Who?\nHm.\n\n7\n")

    def test_in_a_channel(self):
        gemma = tiny_model.write_talker(self.folder / "gemma", CHANNEL, IN_CHANNEL)
        (gemma / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": TEMPLATE.replace("<think></think>", "<|channel>thought\\n<channel|>")}), encoding="utf-8")
        contexts = self.folder / "channels"
        contexts.mkdir()
        context = contexts / "book.lode"
        self.assert_done(run("index", "-m", gemma, "-f", self.text, "-o", context, "--quiet", "-a", "full"))
        self.assertEqual(run("ask", context, "Who?", "--show-thoughts").out, "Hm.\n\n7\n")
        self.assertEqual(run("chat", context, "--show-thoughts", "--quiet", stdin="Who?\n").out, "> Who?\nHm.\n\n7\n")
        self.assertNotIn("thoughts", run("ask", context, "Who?", "--think", "off", "--json").json()["answers"][0])
        with Server(contexts, "-m", gemma, "-a", "full", "--quiet") as server:
            self.openai(server, {"context": "book"}, marks=4)
            self.anthropic(server, {"context": "book"})

    def test_serve(self):
        with Server(self.contexts, "-m", self.thinker, "-a", "full", "--quiet") as server:
            for fields in ({}, {"context": "book"}, {"context": "book", "exact": True}):
                self.openai(server, fields)
                self.anthropic(server, fields)

    def test_advice_fits_what_ended_the_answer(self):
        whole = self.ask("--json").json()["answers"][0]
        room = whole["tokens_reused"] + whole["tokens_prefilled"] + 3
        full = self.ask("-c", str(room))
        self.assertRegex(full.err, r"still thinking when the context was full, \d+ tokens behind the question; a larger -c")
        small = self.folder / "small"  # of so short a context that a message fills it
        shutil.copytree(self.thinker, small)
        config = json.loads((small / "config.json").read_text(encoding="utf-8"))
        (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}), encoding="utf-8")
        contexts = self.folder / "none"
        contexts.mkdir()
        with Server(contexts, "-m", small, "-a", "full", "--quiet") as server:
            short = server.chat("x" * 100)["usage"]["prompt_tokens"]
            reply = server.chat("x" * (100 + 256 - short - 3))
            self.assertEqual(reply["choices"][0]["finish_reason"], "length")
            self.assertIn("still thinking when the context was full", reply["lodestone"]["notice"])
            self.assertIn("max_tokens does not", reply["lodestone"]["notice"])

    def openai(self, server, fields, marks=2):
        reply = server.chat("Who?", **fields)
        message = reply["choices"][0]["message"]
        self.assertEqual((message["content"], message["reasoning_content"]), ("7", "Hm."))
        self.assertEqual((reply["usage"]["completion_tokens"], reply["usage"]["completion_tokens_details"]["reasoning_tokens"]),
                         (5 + marks, 3 + marks))
        # A schema is the answer's: thoughts may come before it and be anything.
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7, 8]}}}
        message = server.chat("Who?", response_format=schema, **fields)["choices"][0]["message"]
        self.assertEqual((message["content"], message["reasoning_content"]), ("7", "Hm."))
        message = server.chat("Who?", chat_template_kwargs={"enable_thinking": False}, **fields)["choices"][0]["message"]
        self.assertEqual(message["content"], "7")
        self.assertNotIn("reasoning_content", message)
        cut = server.chat("Who?", max_tokens=1 + marks, response_format=schema, **fields)
        self.assertIn("still thinking", cut["lodestone"]["notice"])
        self.assertIn("not the JSON of its schema", cut["lodestone"]["notice"])
        bounded = server.chat("Who?", thinking_token_budget=1, response_format=schema, **fields)["choices"][0]
        self.assertEqual((bounded["message"]["content"], bounded["message"]["reasoning_content"], bounded["finish_reason"]),
                         ("7", "H", "stop"))
        for effort in ("none", "minimal"):
            message = server.chat("Who?", reasoning_effort=effort, **fields)["choices"][0]["message"]
            self.assertEqual((message["content"], message.get("reasoning_content")), ("7", None))
        told = server.chat("Who?", reasoning_effort="high", **fields)
        self.assertEqual(told["choices"][0]["message"]["reasoning_content"], "Hm.")
        self.assertIn("not how much", told["lodestone"]["notice"])
        cut = server.chat("Who?", max_tokens=1 + marks, **fields)
        self.assertEqual((cut["choices"][0]["message"]["content"], cut["choices"][0]["finish_reason"]), ("", "length"))
        self.assertIn("still thinking", cut["lodestone"]["notice"])
        events = server.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], **fields})
        deltas = [json.loads(data)["choices"][0]["delta"] for _, data in events if data != "[DONE]"]
        for name, said in (("reasoning_content", "Hm."), ("content", "7")):
            self.assertEqual("".join(delta.get(name, "") for delta in deltas), said)

    def anthropic(self, server, fields):
        body = {"max_tokens": 20, "messages": [{"role": "user", "content": "Who?"}], **fields}
        content = server.json("POST", "/v1/messages", body)["content"]
        self.assertEqual([block["type"] for block in content], ["thinking", "text"])
        self.assertEqual((content[0]["thinking"], content[1]["text"]), ("Hm.", "7"))
        events = [(name, json.loads(data)) for name, data in server.stream("/v1/messages", body)]
        starts = [(e["index"], e["content_block"]["type"]) for name, e in events if name == "content_block_start"]
        stops = [e["index"] for name, e in events if name == "content_block_stop"]
        self.assertEqual((starts, stops), ([(0, "thinking"), (1, "text")], [0, 1]))
        deltas = [(e["index"], e["delta"]) for name, e in events if name == "content_block_delta"]
        self.assertEqual("".join(d["thinking"] for i, d in deltas if d["type"] == "thinking_delta" and i == 0), "Hm.")
        self.assertEqual("".join(d["text"] for i, d in deltas if d["type"] == "text_delta" and i == 1), "7")
        # The client sends back what it got.
        body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": "When?"}]
        self.assertEqual(server.json("POST", "/v1/messages", body)["content"], content)
        budget = {**body, "thinking": {"type": "enabled", "budget_tokens": 2}}
        content = server.json("POST", "/v1/messages", budget)["content"]
        self.assertEqual((content[0]["thinking"], content[1]["text"]), ("Hm", "7"))
        disabled = {**body, "thinking": {"type": "disabled"}}
        self.assertEqual([block["type"] for block in server.json("POST", "/v1/messages", disabled)["content"]], ["text"])
        effort = {"output_config": {"effort": "low"}}
        self.assertIn("effort' is left aside", server.json("POST", "/v1/messages", {**disabled, **effort})["lodestone"]["notice"])
        self.assertIn("not how much", server.json("POST", "/v1/messages", {**body, **effort})["lodestone"]["notice"])


if __name__ == "__main__":
    unittest.main()
