# SPDX-License-Identifier: Apache-2.0
"""Usage: help, unknown words, values out of range, input and output that cannot be read or written."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import termios
import time
import unittest

import tiny_model
from program import BAD_INPUT, DONE, FAILED, PROGRAM, TEXT, ProgramTest, environment, run

VERBS = ("demo", "index", "ask", "chat", "tasks", "eval", "probe", "bench", "report", "tune", "train", "inspect", "verify", "methods")
GROUPS = {"train": ("kmeans", "saap", "hash"), "bench": ("attention", "decode", "prefill")}
LEAVES = [f"{verb} {part}".strip() for verb in VERBS for part in GROUPS.get(verb, ("",))]
RUN_A_MODEL = ("demo", "index", "ask", "chat", "eval", "probe", "train kmeans", "train saap", "train hash", "bench decode", "tune", "report")


class Help(ProgramTest):
    def test_program_lists_every_verb(self):
        result = self.assert_done(run("--help"))
        for verb in VERBS:
            self.assertRegex(result.out, rf"\n +{verb} ")
        self.assertEqual(result.err, "")

    def test_every_verb_explains_itself(self):
        for verb in LEAVES:
            result = self.assert_done(run(*verb.split(), "--help"))
            self.assertEqual(result.err, "")
            flags = ("--json", "--quiet", "--device", "--threads")
            for flag in (*flags, "--kv-type", "--gpu-memory", "--audit") if verb in RUN_A_MODEL else flags:
                self.assertIn(flag + " ", result.out, verb)

    def test_defaults_are_shown(self):
        for verb, flags in {"ask": {"--kv-type": "f16", "--predict": "128", "--stop": "\\n", "--temp": "0"},
                            "probe": {"--window": "63", "--last": "512"}, "tune": {"--window": "511", "--target": "kept=0.99; of texts as they are agreement=0.99"},
                            "bench attention": {"--context": "8192", "--shape": "llama-3.1-8b"},
                            "eval": {"--protocol": "context-dense"}, "tasks": {"--count": "1"}}.items():
            text = " ".join(self.assert_done(run(*verb.split(), "--help")).out.split())
            for flag, default in flags.items():
                self.assertRegex(text, rf"{flag} [^\[]*\[default: {re.escape(default)}\]", verb)

    def test_lines_fit_a_terminal(self):
        for verb in ("", *LEAVES):
            for line in self.assert_done(run(*verb.split(), "--help")).out.splitlines():
                self.assertLessEqual(len(line), 80, f"{verb}: {line}")

        for line in self.assert_done(run("methods")).out.splitlines():
            self.assertLessEqual(len(line), 80, line)

    def test_methods(self):
        text = self.assert_done(run("methods")).out
        listed = {row["attention"]: row for row in self.assert_done(run("methods", "--json")).json()["results"]}
        for name in ("full", "topk", "saap", "hash", "squeezed", "retrieval", "quest"):
            self.assertIn(f"\n{name} - ", text)
            self.assertIn(name, listed)
        self.assertEqual((listed["hash"]["sink"], listed["hash"]["window"], listed["hash"]["dense_layers"]), (128, 128, 0))
        self.assertEqual([k["default"] for k in listed["topk"]["keys"] if k["key"] == "k"], ["100"])
        self.assertEqual(self.assert_done(run("methods", "flat", "--json")).json()["results"][0]["attention"], "topk")
        self.assert_refused(run("methods", "topkk"), "topk")

    def test_version(self):
        self.assertRegex(self.assert_done(run("--version")).out, r"^\d+\.\d+\.\d+")


class UnknownWords(ProgramTest):
    def test_no_verb(self):
        self.assert_refused(run(), *VERBS, "--help")
        self.assert_refused(run("--xyzzy"), *VERBS, "--xyzzy")
        for group, parts in GROUPS.items():
            self.assert_refused(run(group), *parts, f"lodestone {group} --help")

    def test_verb(self):
        self.assert_refused(run("indx"), *VERBS, "'indx'; did you mean 'index'")
        self.assert_refused(run("xyzzyxyzzy"), *VERBS, "'xyzzyxyzzy'")
        for group, parts in GROUPS.items():
            self.assert_refused(run(group, "nothing"), *parts, "'nothing'")

    def test_flag(self):
        self.assert_refused(run("verify", "--jso", self.model), "--json")
        self.assert_refused(run("verify", "--xyzzyxyzzy", self.model), "--xyzzyxyzzy")
        self.assert_refused(run("verify", "--qui", self.model), "'--qui'", "'--quiet'")
        for theirs, ours in (("--temperature", "--temp"), ("--max-tokens=9", "--predict"), ("--max-new-tokens", "--predict")):
            self.assert_refused(run("ask", "x.lode", "Who?", theirs, "9"), f"did you mean '{ours}'?")
            self.assertNotIn(f"'{ours}'", self.assert_refused(run("verify", theirs, self.model)).err)
        self.assert_refused(run("ask", "--predict"), "--predict: expected a value, found none")
        self.assert_refused(run("ask", "x.lode", "--system", "x"), "'--system'; `lodestone index` takes it")
        self.assert_refused(run("verify", self.model, self.text), "verify: expected no further argument", str(self.text))
        self.assert_refused(run("verify", "--device", "cpu", "--device", "auto", self.model), "--device: expected one value, found 2")
        self.assert_refused(run("probe", "-f", self.text), "probe: expected --model, found none", "lodestone probe --help")
        self.assert_refused(run("verify"), "verify: expected file (a .lode file, ", "), found none")
        self.assert_refused(run("ask"), "ask: expected context (the .lode file), found none")
        self.assert_refused(run("bench", "prefill", "-m", self.model, "--random", "pocket"), "bench prefill: expected one of", "--model",
                            "--random")

    def test_words_with_control_characters(self):
        """One line, and nothing in it that a terminal would obey."""
        for words in (("verify", "--device", "a\x1b[31m\nb"), ("verify", "\x1b]0;x\x07"), ("ver\nify",), ("verify", "--a\nb", "x"),
                      ("index", "-m", self.model, "-f", self.text, "-o", "x", "-c", "\x1b[2J")):
            with self.subTest(words=words):
                self.assertNotRegex(self.assert_refused(run(*words)).err[:-1], r"[\x00-\x1f]")

    def test_spec(self):
        path = self.folder / "never.lode"
        for spec, mention in {"kmens": "kmeans", "": "full", "kmeans:probs=3": "probes", "kmeans:probes": "probes",
                              "kmeans:probes=": "probes", "kmeans:probes=0": "probes", "kmeans:probes=-1": "probes",
                              "kmeans:probes=nan": "probes", "kmeans:probes=1e99": "probes", "topk:k=two": "k",
                              "random:fraction=-1": "fraction", "random:fraction=nan": "fraction",
                              "streaming:window=-5": "window", "streaming:window=99999999999999999999": "window",
                              "topk:k=1,k=2": "k", "full:,": "full", "topk:mass=1.5": "above 0 up to 1"}.items():
            with self.subTest(spec=spec):
                self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", path, "-a", spec), mention)
                self.assertFalse(path.exists())


class ValuesOutOfRange(ProgramTest):
    def refused(self, *arguments):
        with self.subTest(arguments=arguments):
            self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", self.folder / "never.lode",
                                    *arguments), arguments[0].split("=")[0].lstrip("-"))

    def test_counts(self):
        for value in ("-1", "99999999999999999999", "1e9", "128q", "0x10", "", "nan", "1.5k", "9999999999M"):
            self.refused(f"--ctx-size={value}")
        for value in ("-1", "99999999999999999999", "two", ""):
            self.refused(f"--threads={value}")

    def test_shares(self):
        for value in ("nan", "-0.5", "2", "inf", "x"):
            self.refused(f"--audit={value}")
        for value in ("nan", "0", "-4", "inf"):
            self.refused(f"--rope-factor={value}")

    def test_sizes(self):
        for verb in (("index", "-m", self.model, "-f", self.text, "-o", self.folder / "never.lode"),
                     ("bench", "prefill", "--context", "1k"), ("bench", "decode", "--random", "pocket", "--context", "1k")):
            for value in ("-5", "0", "1XB", "nan", "", "1e99GiB"):
                with self.subTest(verb=verb, value=value):
                    self.assert_refused(run(*verb, f"--gpu-memory={value}"), "--gpu-memory")
        self.assert_refused(run("bench", "attention", "--context", "1k", "--gpu-memory", "1GiB"), "--gpu-memory")  # of one layer's keys
        for verb in ("serve", "mcp"):
            self.assert_refused(run(verb, "-m", self.model, "--contexts", self.folder / "contexts", "--device", "cpu", "--gpu-memory", "1GiB"),
                                "--gpu-memory: expected a GPU")

    def test_choices(self):
        self.refused("--kv-type=q3")
        self.assert_refused(run("inspect", self.model, "--kv-type", "F16"), "--kv-type: expected one of f32, f16, bf16, q8, q4, found 'F16'")
        self.refused("--device=tpu")

    def test_cuda_without_cuda(self):
        self.assert_refused(run("verify", self.model, "--device", "cuda"), "cuda")

    def test_sampling(self):
        context = self.index("sampling.lode")
        for flag in ("--temp=nan", "--temp=-1", "--top-p=nan", "--top-p=2", "--top-p=-1", "--top-k=-5", "--min-p=nan",
                     "--min-p=2", "--predict=0", "--predict=-3", "--predict=1.5", "--seed=-1", "--template=none"):
            with self.subTest(flag=flag):
                self.assert_refused(run("ask", context, "Who?", flag), flag.split("=")[0].lstrip("-"))


class FlagsWithoutUse(ProgramTest):
    """A flag that means nothing beside the others is refused with the reason, never ignored."""

    def test_flags(self):
        context = self.index("flags.lode")
        tasks, bench = ("tasks", "kv", "--tokens", "1k"), ("bench", "attention", "--shape", "L1q4kv2d64", "--context", "1k")
        prefill, saap = ("bench", "prefill", "-m", self.model), ("train", "saap", "-m", self.model, "-f", self.text, "-o", self.folder / "x")
        hashes = ("train", "hash", "-m", self.model, "-f", self.text, "-o", self.folder / "x")
        for arguments, mentions in (
                ((*tasks, "--held-out-books"), ("--held-out-books", "--haystack")), ((*tasks, "--distance", "50"), ("--distance", "echo")),
                (("tasks", "echo", "--tokens", "4k", "--count", "2"), ("--count", "a text")), (("tasks", "all", "kv", "--tokens", "1k"), ("'all' alone",)),
                ((*prefill, "--device", "cpu", "--active-memory", "1MiB"), ("--active-memory", "a GPU")),
                (("bench", "prefill", "--gpu-memory", "1GiB"), ("--gpu-memory", "a GPU")),
                (("ask", context, "Who?", "--device", "cpu", "--active-memory", "1MiB"), ("--active-memory", "a GPU")),
                (("ask", context, "Who?", "--device", "cpu", "--kv-tier", "host"), ("--kv-tier", "a GPU")),
                ((*bench, "--largest", "0.5"), ("--largest", "saap")), ((*prefill, "--tokens", "5"), ("--tokens", "whole model")),
                ((*prefill, "--shape", "pocket"), ("--shape", "whole model")),
                (("bench", "decode", "-m", self.model, "--recall", "5"), ("--recall", "--kv ood")),
                ((*saap, "--key-steps", "3"), ("--key-steps", "--keys trained")), ((*saap, "--shifted", "0.1"), ("--shifted", "--shift")),
                ((*saap, "--late", "0", "--late-tokens", "9"), ("--late-tokens", "--late")), ((*saap, "--switch-at", "9"), ("--switch-at", "--add-network")),
                ((*saap, "--adapt", "--from", "y", "--held-out", "0.5"), ("--held-out", "--adapt")), ((*saap, "--adapt"), ("--adapt", "no --from")),
                ((*saap, "--from", "y", "--balance", "0.5"), ("--balance", "--from")),
                ((*hashes, "--late", "0", "--late-tokens", "9"), ("--late-tokens", "--late")), ((*hashes, "--apart", "0.1"), ("--apart", "--further")),
                ((*hashes, "--start", "random", "--gamma", "0.1"), ("--gamma", "--start linear")),
                (("inspect", context, "-a", "kmeans"), ("--attention", "a model")), (("inspect", context, "-c", "4k"), ("--ctx-size",)),
                (("inspect", self.model, "-m", self.model), ("with -m", "found both")), (("inspect", self.model, "-c", "1M"), ("262144", "1048576", "--rope-factor 4")),
                (("ask", context, "Who?", "--order", "cluster"), ("--order cluster", "found 0")),
                (("ask", context, "Who?", "--order", "cluster", "-a", "topk:window=16"), ("--order cluster", "kmeans")),
                (("tune", "-m", self.model, "-f", self.text, "--check", "y", "-o", self.folder / "p", "-a", f"plan:{self.plan()}"), ("methods", "plan"))):
            with self.subTest(arguments=arguments):
                self.assert_refused(run(*arguments), *mentions)

    def plan(self):
        path = self.folder / "plan.json"
        path.write_text(json.dumps({"lodestone_plan": 1, "model_fingerprint": "x", "sink": 1, "window": 9, "layers": [["full", "full"]] * 2}),
                        encoding="utf-8")
        return path


class OutputsThatAreInputs(ProgramTest):
    """What a result is made from is never replaced by it."""

    def test_texts_and_models(self):
        text, model = self.folder / "own.txt", self.folder / "own-model"
        text.write_text("word " * 300, encoding="utf-8")
        shutil.copytree(self.model, model)
        link = self.folder / "link.txt"
        link.symlink_to(text)
        of_text, of_model = ("-m", model, "-f", text), ("-m", model, "-f", self.text)
        for verb in (("index", "--force"), ("train", "kmeans"), ("train", "hash"), ("train", "saap")):
            for output in (text, link):
                with self.subTest(verb=verb, output=output):
                    self.assert_refused(run(*verb, *of_text, "-o", output), "--output", "made from", output.name)
            with self.subTest(verb=verb):
                self.assert_refused(run(*verb, *of_model, "-o", model / "config.json"), "--output", "a model's own", "config.json")
        self.assert_refused(run("tune", *of_model, "--check", text, "-o", text), "--output", "made from", "own.txt")
        self.assert_refused(run("tasks", "kv", "--tokens", "1k", "-o", model / "config.json"), "--output", "a model's own")
        self.assertEqual(text.read_text(encoding="utf-8"), "word " * 300)
        self.assertEqual((model / "config.json").read_bytes(), (self.model / "config.json").read_bytes())

    def test_links_shards_and_notes_of_a_model(self):
        store, model, notes = self.folder / "store", self.folder / "linked-model", self.folder / "linked-model" / "model-notes.jsonl"
        shutil.copytree(self.model, store)
        (store / "model.safetensors").rename(store / "weights-1.safetensors")
        (store / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "weights-1.safetensors"}}), encoding="utf-8")
        model.mkdir()
        for file in store.iterdir():
            (model / file.name).symlink_to(file)
        for name in ("config.json", "tokenizer.json", "weights-1.safetensors"):
            with self.subTest(name=name):
                before = (store / name).read_bytes()
                self.assert_refused(run("tasks", "kv", "--tokens", "1k", "-o", model / name), "--output", "a model's own", name)
                self.assertEqual((store / name).read_bytes(), before)
        for force in ((), ("--force",)):
            self.assertEqual(run("tasks", "kv", "--tokens", "1k", "--count", "1", "-o", notes, *force).code, 0)
        # What would be read in the place of the shards; what the links of -m lead to.
        refused = ("--output", "a model's own")
        self.assert_refused(run("tasks", "kv", "--tokens", "1k", "-o", store / "model.safetensors"), *refused)
        (store / "weights-1.safetensors").rename(self.folder / "blob")
        (model / "weights-1.safetensors").unlink()
        (model / "weights-1.safetensors").symlink_to(self.folder / "blob")
        for verb in (("index", "--force"), ("train", "kmeans"), ("train", "hash"), ("train", "saap")):
            self.assert_refused(run(*verb, "-m", model, "-f", self.text, "-o", self.folder / "blob"), *refused)

    def test_files_that_exist(self):
        """Nothing that a verb did not make itself is replaced unless asked for."""
        mine = self.folder / "mine.txt"
        mine.write_text("my notes", encoding="utf-8")
        of_text = ("-m", self.model, "-f", self.text)
        other = self.folder / "check.txt"
        other.write_text("Another text. " * 200, encoding="utf-8")
        verbs = (("index", *of_text), ("train", "kmeans", *of_text), ("train", "hash", *of_text), ("train", "saap", *of_text),
                 ("tasks", "kv", "--tokens", "1k"), ("tune", *of_text, "--check", other))
        for verb in verbs:
            with self.subTest(verb=verb):
                self.assert_refused(run(*verb, "-o", mine), "mine.txt", "exists already", "--force")
                self.assertEqual(mine.read_text(encoding="utf-8"), "my notes")
        self.assert_done(run("train", "kmeans", *of_text, "--clusters", "4", "--quiet", "-o", mine, "--force"))
        self.assertNotEqual(mine.read_bytes(), b"my notes")
        self.assert_done(run("tasks", "prose", "--tokens", "1k", "-m", self.model, "--quiet", "-o", mine, "--force"))

    def test_books_artefacts_and_checkpoints(self):
        books, book, artefact = self.folder / "books", self.folder / "books" / "a.txt", self.folder / "art.safetensors"
        books.mkdir()
        for file in (book, artefact):
            file.write_text("word " * 300, encoding="utf-8")
        self.assert_refused(run("tasks", "needle", "--tokens", "1k", "--haystack", books, "-o", book), "--output", "made from")
        from_text = ("-m", self.model, "-f", self.text, "-o")
        self.assert_refused(run("index", "--force", *from_text, artefact, "-a", f"saap:weights={artefact}"), "--output", "made from")
        plan = self.folder / "made-from.plan"
        plan.write_text(json.dumps({"lodestone_plan": 1, "model_fingerprint": "", "sink": 1, "window": 63,
                                    "layers": [[f"kmeans:weights={artefact}"]]}), encoding="utf-8")
        self.assert_refused(run("index", "--force", *from_text, artefact, "-a", f"plan:{plan}"), "--output", "made from")
        context = self.folder / "kept.lode"
        self.assert_done(run("index", *from_text, context, "--quiet"))
        for verb in (("train", "kmeans", *from_text), ("train", "hash", *from_text), ("train", "saap", *from_text), ("tasks", "kv", "--tokens", "1k", "-o"),
                     ("tune", "-m", self.model, "-f", self.text, "--check", self.text, "-o")):
            self.assert_refused(run(*verb, context), "--output", ".lode", "kept")
        for verb in ("hash", "saap"):
            self.assert_refused(run("train", verb, *from_text, self.folder / "x", "--checkpoint", self.folder / "x"), "--output", "made from")
        for file in (book, artefact):
            self.assertEqual(file.read_text(encoding="utf-8"), "word " * 300)


class BadTexts(ProgramTest):
    def refused(self, path, *mentions, **options):
        output = self.folder / "never.lode"
        self.assert_refused(run("index", "-m", self.model, "-f", path, "-o", output, **options), *mentions)
        self.assertFalse(output.exists())

    def test_not_a_text(self):
        (self.folder / "empty.txt").touch()
        (self.folder / "cut.txt").write_bytes(TEXT.encode() + "é".encode()[:1])
        os.mkfifo(self.folder / "fifo")
        self.refused(self.folder / "missing.txt", "missing.txt")
        (self.folder / "numbers.bin").write_bytes(bytes(range(256)) * 4)
        (self.folder / "nothing").mkdir()
        self.refused(self.folder / "nothing", "nothing", "texts or documents")
        self.refused(self.folder / "empty.txt", "empty")
        self.refused(self.folder / "numbers.bin", "binary", "offset 0")
        self.refused(self.folder / "cut.txt", "UTF-8", f"offset {len(TEXT)}")
        self.refused(self.folder / "fifo", "fifo")
        self.refused("/dev/zero", "/dev/zero")
        self.refused("-", "standard input", stdin="")

    def test_longer_than_the_context(self):
        """An error with both numbers, never a cut text."""
        self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", self.folder / "never.lode", "-c", "1k", "--quiet"),
                            "1024", str(self.tokens_of_text()))

    def test_help_names_what_a_value_is(self):
        for verb, wanted in (("index", ("-f,--file FILE", "-o,--output FILE", "-m,--model MODEL", "--gpu-memory SIZE", "--include GLOB", "-a,--attention SPEC")),
                             ("ask", ("context FILE REQUIRED", "question TEXT ...")), ("verify", ("file FILE REQUIRED",)), ("report", ("-o,--output FOLDER",)),
                             ("estimate", ("document FILE",)), ("serve", ("--contexts FOLDER",))):
            said = self.assert_done(run(verb, "--help")).out
            for words in wanted:
                self.assertIn(words, said)

    def test_line_breaks_of_a_chat_template_are_shown_as_such(self):
        model = self.folder / "templated"
        shutil.copytree(self.model, model)
        (model / "chat_template.jinja").write_text("{%- if x %}\n  {{ x }}\n{%- endif %}", encoding="utf-8")
        self.assertIn(r"chat_template: {%- if x %}\n  {{ x }}\n{%- endif %}", self.assert_done(run("inspect", model)).out)

    def tokens_of_text(self):
        return self.assert_done(run("inspect", self.index("measured.lode"), "--json")).json()["tokens"]

    def test_longer_than_the_model(self):
        short = tiny_model.write(self.folder / "short", max_positions=512)
        arguments = ("index", "-m", short, "-f", self.text, "-o", self.folder / "stretched.lode")
        self.assert_refused(run(*arguments), "512", "--rope-factor")
        self.assert_done(run(*arguments, "--rope-factor", "8"))

    def test_text_from_standard_input_and_odd_paths(self):
        folder = self.folder / "a folder, näme\nand line"
        folder.mkdir()
        output = folder / "ö.lode"
        self.assert_done(run("index", "-m", self.model, "-f", "-", "-o", output, stdin=TEXT))
        self.assert_done(run("verify", output))

    def test_questions(self):
        context = self.index("questions.lode")
        self.assert_refused(run("ask", context, "-a", "full", "--json", stdin=b"\xff?\n"), "UTF-8")
        for empty in ("", "  ", "\n\t"):
            self.assert_refused(run("ask", context, empty), "question 1", "empty")
            self.assert_refused(run("ask", context, "Who?", empty), "question 2", "empty")
        answers = self.assert_done(run("ask", context, "--json", stdin="Who?\r\n\r\n")).json()["answers"]
        self.assertEqual([a["question"] for a in answers], ["Who?"])
        for arguments in ((), ("--json",), ("-",)):
            self.assert_refused(run("ask", context, "-a", "full", *arguments, stdin="\n \n"), "expected a question", "found none")
        answers = self.assert_done(run("ask", context, "-", "--json", stdin="Who?\n")).json()["answers"]
        self.assertEqual([a["question"] for a in answers], ["Who?"])


class Outputs(ProgramTest):
    def test_existing_file_is_kept(self):
        path = self.folder / "kept.lode"
        path.write_text("precious", encoding="utf-8")
        arguments = ("index", "-m", self.model, "-f", self.text, "-o", path)
        self.assert_refused(run(*arguments), "kept.lode", "--force")
        self.assertEqual(path.read_text(encoding="utf-8"), "precious")
        self.assert_done(run(*arguments, "--force"))
        self.assert_done(run("verify", path))

    def test_file_that_appears_meanwhile_is_kept(self):
        path = self.folder / "meanwhile.lode"
        index = subprocess.Popen([PROGRAM, "index", "-m", self.model, "-f", "-", "-o", path, "--quiet"], stdin=subprocess.PIPE,
                                 stderr=subprocess.PIPE, env=environment())
        time.sleep(0.5)  # it reads what it is to index, and has found no file
        path.write_text("precious", encoding="utf-8")
        _, said = index.communicate(TEXT.encode(), timeout=60)
        self.assertEqual(index.returncode, BAD_INPUT)
        self.assertIn("--force", said.decode())
        self.assertEqual(path.read_text(encoding="utf-8"), "precious")

    def test_names_that_are_not_utf8(self):
        """A path may be any bytes; what is stored in JSON may not, and that is said before the work."""
        folder = pathlib.Path(os.fsdecode(os.fsencode(self.folder) + b"/na\xefve"))
        folder.mkdir()
        self.assert_done(run("index", "-m", self.model, "-f", self.text, "-o", folder / "x.lode", "--quiet"))
        self.assert_done(run("ask", folder / "x.lode", "Who?", "-n", "1", "--json"))
        model = tiny_model.write(folder / "model")
        self.assert_refused(run("index", "-m", model, "-f", self.text, "-o", self.folder / "x.lode"), "--model", "UTF-8")
        spec = f"kmeans:probes=2,weights={folder / 'c.safetensors'}"
        self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", self.folder / "x.lode", "-a", spec), "--attention", "UTF-8")

    def test_no_place_to_write(self):
        for output in (self.folder / "no" / "such" / "x.lode", self.folder, self.text / "x.lode",
                       self.folder / ("n" * 300)):
            with self.subTest(output=output):
                result = run("index", "-m", self.model, "-f", self.text, "-o", output, "--force", "--quiet")
                self.assertIn(result.code, (FAILED, BAD_INPUT), result.err)
                self.assertRegex(result.err, r"\Alodestone: [^\n]+\n\Z")

    def test_seen_before_the_work(self):
        """What cannot be written is refused at once, not after hours."""
        nowhere, folder, pipe = self.folder / "no" / "x", self.folder, self.folder / "pipe"
        os.mkfifo(pipe)
        closed = self.folder / "closed"
        closed.mkdir(mode=0o555)
        places = {nowhere: nowhere.parent, folder: folder, pipe: pipe, **({} if os.access(closed, os.W_OK) else {closed / "x": closed})}
        model = ("-m", self.model, "-f", self.text, "--quiet")
        for arguments in (("tasks", "kv", "--tokens", "1k"), ("eval", "-m", self.model, "--samples", self.text, "-a", "full"),
                          ("tune", *model, "--check", self.text), ("train", "kmeans", *model), ("train", "saap", *model),
                          ("train", "hash", *model)):
            if arguments[:2] in (("train", "hash"), ("train", "saap")):
                self.assert_refused(run(*arguments, "-o", self.folder / "o.safetensors", "--checkpoint", nowhere), "--checkpoint", str(nowhere.parent))
            for output, named in places.items():
                with self.subTest(arguments=arguments, output=output):
                    self.assert_refused(run(*arguments, "-o", output), "--output", str(named))
        self.assertTrue(pipe.is_fifo(), "not renamed over")
        for output in ("/dev/null", self.text, self.text / "below"):
            self.assert_refused(run("report", "saap-figure-3", "-m", self.model, "-o", output), "--output")

    def test_names_that_lead_nowhere(self):
        loop = self.folder / "loop"
        loop.symlink_to("loop")
        self.assert_refused(run("index", "-m", self.model, "-f", self.text, "-o", loop), "--output", "loop", "symbolic links")
        self.assert_refused(run("index", "-m", self.model, "-f", loop, "-o", self.folder / "y.lode"), "loop")
        longest = self.folder / ("n" * 255)
        self.assert_done(run("index", "-m", self.model, "-f", self.text, "-o", longest, "--quiet"))
        self.assert_done(run("verify", longest))

    def test_limit_of_file_sizes(self):
        output = self.folder / "limited.lode"
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        result = run("index", "-m", self.model, "-f", self.text, "-o", output, "--quiet", preexec_fn=limit)
        self.assert_refused(result, "limited.lode", "cannot be written", code=FAILED)
        self.assertEqual([path.name for path in self.folder.iterdir() if "limited" in path.name], [])

    def test_closed_streams_are_not_files(self):
        """What is said must not land in the file that is written, nor a file be taken for standard input."""
        whole, cut, context = self.folder / "whole.jsonl", self.folder / "cut.jsonl", self.index("streams.lode")
        tasks = '"$0" tasks kv --tokens 1k --count 3 --seed 4 -m "$1" -o "$2" {}'
        for output, closed in ((whole, ""), (cut, "2>&-")):
            subprocess.run(["bash", "-c", tasks.format(closed), PROGRAM, str(self.model), str(output)], check=True, timeout=60,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertEqual(cut.read_bytes(), whole.read_bytes())
        answers = [self.folder / "open.answers", self.folder / "closed.answers"]
        for output, closed in zip(answers, ("", "<&- >&- 2>&-")):
            subprocess.run(["bash", "-c", f'"$0" eval -m "$1" --samples "$2" -a streaming -o "$3" {closed}', PROGRAM, str(self.model), str(whole),
                            str(output)], check=False, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for line in answers[1].read_text(encoding="utf-8").splitlines():
            json.loads(line)
        self.assertEqual(len(answers[1].read_text(encoding="utf-8").splitlines()), len(answers[0].read_text(encoding="utf-8").splitlines()))
        done = subprocess.run(["bash", "-c", '"$0" ask "$1" <&-', PROGRAM, str(context)], capture_output=True, env=environment(), timeout=60,
                              check=False)
        self.assertEqual(done.stdout, b"", "no questions were asked")

    def test_full_standard_output(self):
        context = self.index("full.lode")
        for arguments in (("inspect", context), ("inspect", context, "--json"), ("verify", context), ("--help",),
                          ("ask", context, "Who?", "--json")):
            with self.subTest(arguments=arguments), open("/dev/full", "w", encoding="utf-8") as full:
                result = run(*arguments, stdout=full)
                self.assertEqual(result.code, FAILED, result.err)

    def test_reader_that_goes_away(self):
        context = self.index("pipe.lode")
        read, write = os.pipe()
        os.close(read)
        result = run("inspect", context, stdout=write)
        os.close(write)
        self.assertIn(result.code, (FAILED, -13))

    def test_closed_streams(self):
        context = self.index("closed.lode")
        for redirection in ("<&-", "2>&-", "<&- 2>&-"):
            with self.subTest(redirection=redirection):
                done = subprocess.run(["bash", "-c", f'"$0" ask "$1" Who? --json {redirection}', PROGRAM, str(context)],
                                      capture_output=True, env=environment(), timeout=60, check=False)
                self.assertEqual(done.returncode, DONE, done.stderr)
                self.assertEqual(len(json.loads(done.stdout)["answers"]), 1)
        done = subprocess.run(["bash", "-c", '"$0" ask "$1" Who? --json >&-', PROGRAM, str(context)],
                              capture_output=True, env=environment(), timeout=60, check=False)
        self.assertEqual(done.returncode, FAILED, done.stderr)
        self.assert_done(run("verify", context))

    def test_no_escape_codes_and_silence(self):
        output = self.folder / "plain.lode"
        arguments = ("index", "-m", self.model, "-f", self.text, "-o", output, "--force")
        self.assertNotIn("\x1b", self.assert_done(run(*arguments)).err)
        self.assertEqual(self.assert_done(run(*arguments, "--quiet")).err, "")

    def test_bars_fit_the_terminal(self):
        """A line that wraps cannot be drawn over: every redraw would leave one behind."""
        for columns in (30, 80):
            with self.subTest(columns=columns):
                controller, terminal = pty.openpty()
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
                process = subprocess.Popen([PROGRAM, "index", "-m", self.model, "-f", self.text, "-o", self.folder / "bar.lode", "--force", "--restart"],
                                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal,
                                           env=environment({"TERM": "xterm"}))
                os.close(terminal)
                shown = b""
                with contextlib.suppress(OSError):  # the terminal's other end has been closed
                    while part := os.read(controller, 4096):
                        shown += part
                os.close(controller)
                self.assertEqual(process.wait(timeout=60), DONE)
                drawn = re.findall(r"\r([^\r\n]*?)\x1b\[K", shown.decode())
                self.assertGreater(len(drawn), 0)
                self.assertLess(max(map(len, drawn)), columns)

    def test_little_address_space(self):
        """A sentence at any limit, never a signal."""
        context = self.index("narrow.lode")
        for room in range(120, 420, 20):
            limit = lambda room=room: resource.setrlimit(resource.RLIMIT_AS, (room << 20, room << 20))
            with self.subTest(room=room):
                result = run("ask", context, "Who?", "-n", "1", "-t", "1", preexec_fn=limit)
                self.assertIn(result.code, (DONE, FAILED, 127), result.err)

    def test_a_memory_fault_without_address_space(self):
        """A library that gets no memory and does not look dies of a signal, as does a stack that cannot grow: the reason is said."""
        context = self.index("faults.lode")
        for limited in (True, False):
            with self.subTest(limited=limited), subprocess.Popen([PROGRAM, "ask", context, "-n", "1", "-t", "1"], stdin=subprocess.PIPE, text=True,
                                                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
                process.stdin.write("Who?\n")
                process.stdin.flush()
                self.assertTrue(process.stdout.readline())
                if limited:
                    pages = int(pathlib.Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[0])
                    resource.prlimit(process.pid, resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
                process.send_signal(signal.SIGSEGV)
                _, said = process.communicate(timeout=60)
                self.assertEqual(process.returncode, FAILED if limited else -signal.SIGSEGV, said)
                self.assertEqual(said.count("lodestone: out of memory: the address space"), int(limited), said)

    def test_no_room_for_threads(self):
        result = run("inspect", self.model, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (60 << 20, 60 << 20)))
        if result.code != 127:  # not even the libraries found room
            self.assertEqual(result.code, FAILED, result.err)
            self.assertRegex(result.err, r"\Alodestone: (cannot start a thread|out of memory|cannot reserve)[^\n]*\n\Z")


class Json(ProgramTest):
    """--json: one object and nothing else on stdout."""

    def test_index_ask_inspect_verify(self):
        context = self.folder / "json.lode"
        for arguments in (("index", "-m", self.model, "-f", self.text, "-o", context, "-a", "kmeans:clusters=4"),
                          ("ask", context, "Who?", "-n", "4", "--show-sources"), ("inspect", context),
                          ("inspect", self.model, "-a", "kmeans"), ("verify", context), ("verify", self.model)):
            with self.subTest(verb=arguments[0]):
                result = self.assert_done(run(*arguments, "--json"))
                self.assertIsInstance(result.json(), dict)
                self.assertEqual(result.out.count("\n"), 1)
                self.assertIsNone(re.search(r'"[^"]* [^"]*":', re.sub(r'"chat_template":"[^"]*"', "", result.out)), "keys are single words")
                self.assertIsNone(re.search(r"\d\.\d{17}", result.out), "no digits that mean nothing")


class Machines(ProgramTest):
    def answers(self, context, *arguments, **options):
        result = self.assert_done(run("ask", context, "Who?", "-n", "16", "-a", "full", "-a", "topk:k=8,window=16", "--json",
                                      *arguments, **options))
        return [a["answer"] for a in result.json()["answers"]]

    def test_threads_and_instruction_sets_agree(self):
        context = self.index("machines.lode", "--kv-type", "f32")
        usual = self.answers(context)
        self.assertEqual(usual, self.answers(context, "--threads", "1"))
        self.assertEqual(usual, self.answers(context, env={"LODESTONE_ISA": "scalar"}))

    def test_unknown_data_folder(self):
        self.assert_refused(run("demo", env={"LODESTONE_DATA": str(self.folder / "no")}), "LODESTONE_DATA", "models/pocket")

    def test_unknown_instruction_set(self):
        arguments = ("index", "-m", self.model, "-f", self.text, "-o", self.folder / "never.lode", "--quiet")
        self.assert_refused(run(*arguments, env={"LODESTONE_ISA": "mmx"}), "LODESTONE_ISA", "scalar")


if __name__ == "__main__":
    unittest.main()
