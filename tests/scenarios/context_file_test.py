# SPDX-License-Identifier: Apache-2.0
"""A .lode file is the text that was indexed, or it is refused with the reason: it is never used when it does not fit."""

import array
import concurrent.futures
import json
import pathlib
import shutil
import struct
import unittest

import lode_file
import tiny_model
from program import BAD_INPUT, DONE, FAILED, ProgramTest, run

SPECS = ("-a", "full", "-a", "kmeans:clusters=4,probes=2,window=64", "-a", "topk:k=8,window=64")


def copy(path: pathlib.Path, name: str, data: bytes) -> pathlib.Path:
    damaged = path.with_name(name)
    damaged.write_bytes(data)
    return damaged


class RoundTrip(ProgramTest):
    def ask(self, context, *arguments):
        return self.assert_done(run("ask", context, "Who lit it?", "-n", "12", "--json", *arguments)).json()["answers"]

    def test_answers_come_from_the_file(self):
        """Nothing of the text is prefilled again, and every process says the same."""
        context = self.index("round.lode", *SPECS)
        tokens = self.assert_done(run("inspect", context, "--json")).json()["tokens"]
        first, second = self.ask(context), self.ask(context)
        self.assertEqual([a["answer"] for a in first], [a["answer"] for a in second])
        self.assertEqual({a["tokens_reused"] for a in first}, {tokens})
        self.assertLess(max(a["tokens_prefilled"] for a in first), 100)

    def test_stored_indexes_equal_fresh_ones(self):
        stored, plain = self.index("stored.lode", *SPECS), self.index("plain.lode")
        self.assertEqual([a["answer"] for a in self.ask(stored, *SPECS)], [a["answer"] for a in self.ask(plain, *SPECS)])

    def test_every_kv_type(self):
        for kv_type in ("f32", "f16", "bf16", "q8"):
            with self.subTest(kv_type=kv_type):
                context = self.index(f"{kv_type}.lode", "--kv-type", kv_type)
                self.assert_done(run("verify", context))
                stored = self.assert_done(run("inspect", context, "--json")).json()
                self.assertEqual((stored["kv_type"], stored["rope_factor"]), (kv_type, 1.0))
                self.assertEqual(len(self.ask(context)), 1)

    def test_what_specs_share_counts_once(self):
        long = self.folder / "long.txt"
        long.write_text("".join(f"Lamp {i} was lit by keeper {i * 7}. " for i in range(400)), encoding="utf-8")
        specs = ("-a", "retrieval:k=64,window=64"), ("-a", "retrieval:k=64,window=64", "-a", "retrieval:k=99,window=64")
        stored = []
        for name, given in zip(("one.lode", "two.lode"), specs):
            context = self.folder / name
            written = self.assert_done(run("index", "-m", self.model, "-f", long, "-o", context, "--json", *given)).json()
            stored.append(self.assert_done(run("inspect", context, "--json")).json()["index_bytes"])
            self.assertEqual(written["index_bytes"], stored[-1])
        self.assertLess(stored[1], 1.5 * stored[0])  # the graph

    def test_text_shorter_than_sink_and_window(self):
        short = self.folder / "short.txt"
        short.write_text("a", encoding="utf-8")
        for answer in self.ask(self.index("short.lode", *SPECS, text=short)):
            self.assertIsInstance(answer["answer"], str)

    def test_readers_share_the_file(self):
        context = self.index("shared.lode")
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: self.ask(context)[0]["answer"], range(4)))
        self.assertEqual(len(set(found)), 1)

    def test_answer_that_is_cut_off(self):
        context = self.index("cut.lode")
        cut = self.assert_done(run("ask", context, "Who?", "-n", "3", "--stop", ""))
        self.assertIn("cut off behind token 3, by --predict", cut.err)
        room = run("inspect", context, "--json").json()["tokens"] + 16
        short = run("ask", self.index("little.lode", "-c", str(room)), "Who?", "--stop", "", "--template", "{question}", "-n", "64")
        self.assertIn("token 64, by --predict", self.assert_done(short).err)  # what `index` had does not bind `ask`
        less = run("ask", context, "Who?", "--stop", "", "--template", "{question}", "-n", "64", "-c", str(room))
        self.assertIn("by the context's end", self.assert_done(less).err)
        for count, more in (("3", ()), ("40", ("--stop", " "))):
            answer = self.assert_done(run("ask", context, "Who?", "-n", count, "--json", *more)).json()["answers"][0]
            self.assertEqual(answer["stopped"], answer["tokens_generated"] < int(count))
            self.assertEqual(answer["ended_by"], "stop" if answer["stopped"] else "predict")
        answer = run("ask", context, "Who?", "--stop", "", "--template", "{question}", "-n", "64", "-c", str(room), "--json").json()["answers"][0]
        self.assertEqual(answer["ended_by"], "context")

    def test_exact_answers_are_those_of_full(self):
        context = self.index("exact.lode", *SPECS)
        sparse = ("-a", "streaming:window=16")
        (full,), (exact,) = self.ask(context, "-a", "full"), self.ask(context, *sparse, "--exact")
        self.assertEqual(exact["answer"], full["answer"])
        self.assertEqual(exact["tokens_generated"], full["tokens_generated"])
        drafts = exact["exact"]
        self.assertEqual(drafts["accepted"] + drafts["dense_steps"] + 1, exact["tokens_generated"])
        told = self.assert_done(run("ask", context, "Who?", "-n", "6", *sparse, "--exact"))
        self.assertRegex(told.err, r"exact: full attention accepted \d+ of \d+ drafted tokens in \d+ steps?")
        self.assert_refused(run("ask", context, "Who?", "--exact", "--audit", "1"), "--audit", "--exact")

    def test_model_that_moved(self):
        moved = tiny_model.write(self.folder / "moving", seed=7)
        context = self.folder / "moved.lode"
        self.assert_done(run("index", "-m", moved, "-f", self.text, "-o", context))
        elsewhere = moved.rename(self.folder / "elsewhere")
        self.assert_refused(run("ask", context, "Who?"), f"expected its model at '{moved}'", "-m MODEL names the place")
        self.assert_done(run("ask", context, "Who?", "-m", elsewhere))


class Misfits(ProgramTest):
    def test_other_model(self):
        context = self.index("mine.lode")
        other = tiny_model.write(self.folder / "other", seed=2)
        self.assert_refused(run("ask", context, "Who?", "-m", other), f"was indexed with, '{self.model}'", f"another model, '{other}'", "-m")
        changed = tiny_model.write(self.folder / "changed")
        context = self.folder / "changed.lode"
        self.assert_done(run("index", "-m", changed, "-f", self.text, "-o", context, "-a", "full"))
        shutil.rmtree(changed)
        tiny_model.write(changed, seed=3)
        self.assert_refused(run("ask", context, "Who?"), f"another model there now, '{changed}'", "name the right one with -m")

    def test_question_in_front_of_the_file(self):
        context = self.index("swapped.lode", "-a", "full")
        self.assert_refused(run("ask", "Who lit it?", context), "expected the .lode file in front of the question", "lodestone ask", "Who lit it?")
        other = copy(context, "other.lode", context.read_bytes())
        for words in (("missing.lode", context, "Who lit it?"), ("missing", context, other, "Who lit it?")):
            self.assertNotIn("lodestone ask", self.assert_refused(run("ask", *words), f"{words[0]}: cannot be opened").err)

    def test_a_long_text_has_an_index_that_is_safe(self):
        text = self.folder / "long text.txt"
        text.write_text("The lamp of the harbour was lit. " * 500, encoding="utf-8")
        told = self.assert_done(run("index", "-m", self.model, "-f", text, "-o", self.folder / "long text.lode"))
        self.assertIn("squeezed:sparsity=0.7", told.err)
        self.assertIn(f"lodestone ask '{self.folder / 'long text.lode'}'", told.out)
        found = self.assert_done(run("inspect", self.folder / "long text.lode", "--json")).json()
        self.assertGreater(found["tokens"], 8192)
        self.assertIn("squeezed:sparsity=0.7", found["methods"])
        asked = self.assert_done(run("ask", self.folder / "long text.lode", "Who?", "-n", "2", "--json"))
        (answer,) = asked.json()["answers"]
        self.assertIn(answer["attention"], [*found["methods"], "full"])
        self.assertIn("attends by " + answer["attention"], asked.err)
        self.assert_refused(run("ask", self.folder / "long text.lode", "Who?", "-a", "auto:error=0"), "error", "auto")
        self.assert_done(run("index", "-m", self.model, "-f", text, "-o", self.folder / "without.lode", "-a", "full", "--quiet"))
        self.assertNotIn("squeezed", str(self.assert_done(run("inspect", self.folder / "without.lode", "--json")).json()["methods"]))

    def test_keys_that_overflow(self):
        """Nothing is written that no question can be asked about."""
        model, output = self.folder / "loud", self.folder / "loud.lode"
        shutil.copytree(self.model, model)
        path = model / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        begin, end = json.loads(data[8 : 8 + length])["model.layers.1.self_attn.k_proj.weight"]["data_offsets"]
        loud = array.array("f", data[8 + length + begin : 8 + length + end])
        loud = array.array("f", (1e7 * x for x in loud))
        path.write_bytes(data[: 8 + length + begin] + loud.tobytes() + data[8 + length + end :])
        self.assert_refused(run("index", "-m", model, "-f", self.text, "-o", output, "--quiet"), "layer 1", "finite keys", "bf16")
        self.assertFalse(output.exists())
        self.assert_done(run("index", "-m", model, "-f", self.text, "-o", output, "--quiet", "--kv-type", "bf16"))

    def test_escape_sequences_of_a_document_do_not_reach_the_terminal(self):
        text = self.folder / "escapes.txt"
        text.write_text("The \x1b]0;owned\x07lamp \x9b2J of the harbour. " * 40, encoding="utf-8")
        context = self.index("escapes.lode", text=text)
        shown = self.assert_done(run("ask", context, "Who?", "--show-sources", "-n", "4"))
        for stream in (shown.out, shown.err):
            self.assertNotRegex(stream, "[\x00-\x08\x0b-\x1f\x7f-\x9f]")
        named = self.folder / "tit\x1b[31mle.txt"
        named.write_bytes(text.read_bytes())
        told = run("train", "kmeans", "-m", self.model, "-f", named, "-o", self.folder / "esc.safetensors", "--clusters", "4", "-c", "16")
        self.assertNotIn("\x1b", self.assert_done(told).err)

    def test_other_tokenizer(self):
        context = self.index("words.lode")
        other = self.folder / "retokenized"
        shutil.copytree(self.model, other)
        path = other / "tokenizer.json"
        path.write_text(path.read_text(encoding="utf-8").replace("\\p{N}{1,3}", "\\p{N}"), encoding="utf-8")
        self.assert_refused(run("ask", context, "Who?", "-m", other), "tokenizer")

    def test_other_rope(self):
        context = self.index("rope.lode")
        other = self.folder / "turned"
        shutil.copytree(self.model, other)
        path = other / "config.json"
        path.write_text(path.read_text(encoding="utf-8").replace("10000.0", "10001.0"), encoding="utf-8")
        self.assert_refused(run("ask", context, "Who?", "-m", other), "another")
        self.assert_refused(run("ask", context, "Who?", "--rope-factor", "8"), "--rope-factor", "8")
        self.assert_done(run("ask", context, "Who?", "-n", "1", "--rope-factor", "1"))
        stretched = self.index("stretched.lode", "--rope-factor", "4")
        self.assert_done(run("ask", stretched, "Who?", "-n", "1"))
        self.assert_refused(run("ask", stretched, "Who?", "--rope-factor", "2"), "--rope-factor", "4")

    def test_what_the_file_has_decided(self):
        context = self.index("decided.lode", "--kv-type", "bf16")
        self.assert_refused(run("ask", context, "Who?", "--kv-type", "f32"), "--kv-type", "bf16", "f32")
        self.assert_done(run("ask", context, "Who?", "-n", "1", "--kv-type", "bf16"))
        self.assert_refused(run("ask", context, "Who?", "-c", "16"), "--ctx-size", "16")
        self.assert_done(run("ask", context, "Who?", "-n", "1", "-c", "2k"))

    def test_not_a_context(self):
        for name, data in {"empty": b"", "text": b"Once upon a time\n" * 500, "zeros": bytes(8192), "byte": b"L"}.items():
            with self.subTest(name=name):
                path = copy(self.text, name + ".lode", data)
                self.assert_refused(run("ask", path), name + ".lode")
                for verb, code in (("verify", FAILED), ("inspect", BAD_INPUT)):
                    self.assert_refused(run(verb, path), name + ".lode", "a model folder, a GGUF file, a .lode file, a .safetensors file or a plan",
                                        f"{len(data)} bytes that begin with" if data else "an empty file", code=code)
        self.assert_refused(run("verify", self.folder / "none.lode"), "none.lode")
        self.assert_refused(run("verify", self.text), "text.txt", "a model folder, a GGUF file")


class Damage(ProgramTest):
    """One altered bit, one missing byte: noticed by verify and before the first answer, and named."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.context = cls.folder / "whole.lode"
        assert run("index", "-m", cls.model, "-f", cls.text, "-o", cls.context, *SPECS).code == DONE
        cls.data = cls.context.read_bytes()

    def assert_noticed(self, data: bytes, *mentions: str):
        damaged = copy(self.context, "damaged.lode", data)
        sentence = self.assert_refused(run("verify", damaged), *mentions, code=FAILED).err
        told = run("verify", damaged, "--json")
        self.assertEqual((told.code, told.err), (FAILED, sentence))
        self.assertEqual(told.json(), {"file": str(damaged), "intact": False, "wrong": sentence.removeprefix("lodestone: ").rstrip("\n")})
        self.assert_refused(run("ask", damaged, "Who?", "-n", "1"))

    def test_one_bit_in_each_section(self):
        sections = lode_file.sections(self.data)
        self.assertGreater(len(sections), 10)
        kinds = {}
        for section in sections:  # one of each kind: kv/0/0/k stands for all layers and heads
            kinds.setdefault("/".join(p for p in section.name.split("/") if not p.isdigit()), section)
        for section in kinds.values():
            if section.size == 0:
                continue
            with self.subTest(section=section.name):
                altered = bytearray(self.data)
                altered[section.offset + section.size // 2] ^= 1 << 3
                self.assert_noticed(bytes(altered), section.name)

    def test_one_bit_in_header_table_and_footer(self):
        places = [0, 4, 9, 17, 33, 100, 4095, lode_file.table_offset(self.data), len(self.data) - 1, len(self.data) - 20]
        for place in places:
            with self.subTest(place=place):
                altered = bytearray(self.data)
                altered[place] ^= 1
                self.assert_noticed(bytes(altered))

    def test_cut_short_or_longer(self):
        size = len(self.data)
        for length in (1, 100, 4095, 4096, 4097, size // 2, size - 4096, size - 17, size - 1):
            with self.subTest(length=length):
                self.assert_noticed(self.data[:length])
        self.assert_noticed(self.data + b"\0")


if __name__ == "__main__":
    unittest.main()
