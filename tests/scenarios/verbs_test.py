# SPDX-License-Identifier: Apache-2.0
"""tasks, eval, probe and bench: the shapes of what they print, and how they refuse."""

import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

from program import INTERRUPTED, ProgramTest, run, start

SPECS = ("-a", "full", "-a", "streaming:window=32", "-a", "topk:k=4,window=32", "-a", "kmeans:clusters=8,probes=2,window=32")


class Samples(ProgramTest):
    def samples(self, task: str, seed: int = 3) -> list[dict]:
        result = self.assert_done(run("tasks", task, "--tokens", "2k", "--count", "2", "--seed", seed, "-m", self.model,
                                      "--quiet"))
        return [json.loads(line) for line in result.out.splitlines()]

    def test_samples_have_the_promised_fields(self):
        for sample in self.samples("needle"):
            self.assertEqual(sample["task"], "needle")
            self.assertLessEqual(sample["tokens"], 2048)
            self.assertIn(sample["match"], ("contains", "exact", "f1"))
            self.assertTrue({"id", "question", "answers"} <= sample.keys())
            self.assertTrue("context" in sample or "context_id" in sample)

    def test_seeds(self):
        self.assertEqual(self.samples("kv"), self.samples("kv"))
        self.assertNotEqual(self.samples("kv"), self.samples("kv", seed=4))

    def test_file_and_json(self):
        path = self.folder / "samples.jsonl"
        result = self.assert_done(run("tasks", "vt", "--tokens", "2k", "--count", "1", "-m", self.model, "-o", path, "--json"))
        self.assertIsInstance(result.json(), dict)
        self.assertGreater(path.stat().st_size, 1000)
        # Without a file the one object holds what would stand there.
        whole = self.assert_done(run("tasks", "vt", "--tokens", "2k", "--count", "1", "-m", self.model, "--json")).json()
        self.assertEqual(whole["results"], [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
        prose = self.assert_done(run("tasks", "prose", "--tokens", "300", "-m", self.model, "--json")).json()
        self.assertGreater(len(prose["text"]), 100)

    def test_every_task_of_the_interface(self):
        names = ("needle", "multikey", "multivalue", "multiquery", "kv", "vt", "qa", "freq", "cwe", "fwe", "passkey", "number", "count", "listing", "denial", "comparison",
                 "recite")
        made = self.assert_done(run("tasks", *names, "--tokens", "4k", "--count", "1", "-m", self.model, "--json", "--quiet"))
        self.assertEqual([row["task"] for row in made.json()["results"]], list(names))

    def test_text_that_comes_back(self):
        made = self.assert_done(run("tasks", "echo", "--tokens", "6k", "-m", self.model))
        self.assertIn("2048 tokens before", made.err)
        self.assertIn("1000 tokens", self.assert_done(run("tasks", "echo", "--tokens", "6k", "-m", self.model, "--distance",
                                                          "1000")).err)
        self.assert_refused(run("tasks", "echo", "--tokens", "2k", "-m", self.model), "--tokens", "3072")

    def test_refusals(self):
        common = ("--tokens", "2k", "--count", "1", "-m", self.model)
        self.assert_refused(run("tasks", "neddle", *common), "needle")
        self.assert_refused(run("tasks", "kv", "needle", "kv", *common), "kv", "twice")
        self.assert_refused(run("tasks", "kv", "freq", *common, "--facts", "9"), "--facts", "multivalue")
        self.assert_refused(run("tasks", "kv", "qa", *common, "--facts", "1"), "--facts", "2 at least")  # nothing of kv before
        self.assert_refused(run("tasks", "all", *common, "--tokens", "1k,2048"), "--tokens", "2048", "twice")
        self.assert_refused(run("tasks", "needle", "--tokens", "0", "-m", self.model), "--tokens")
        self.assert_refused(run("tasks", "needle", "--tokens", "2k", "--count", "-1", "-m", self.model), "--count")
        self.assert_refused(run("tasks", "needle", "--tokens", "2k", "--seed", "-1", "-m", self.model), "--seed")
        self.assert_refused(run("tasks", "needle", *common, "--haystack", self.folder / "nowhere"), "nowhere")
        (self.folder / "bare").mkdir()
        self.assert_refused(run("tasks", "needle", *common, "--haystack", self.folder / "bare"), "bare")


class Eval(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.samples = cls.folder / "samples.jsonl"
        made = run("tasks", "needle", "--tokens", "2k", "--count", "3", "-m", cls.model, "-o", cls.samples, "--quiet")
        assert made.code == 0, made.err

    def eval(self, *arguments):
        return run("eval", "-m", self.model, "--samples", self.samples, "--json", "--quiet", *arguments)

    def test_protocols(self):
        for protocol in ("context-dense", "decode-sparse", "last:8"):
            with self.subTest(protocol=protocol):
                report = self.assert_done(self.eval(*SPECS, "--protocol", protocol)).json()
                self.assertEqual(report["protocol"], protocol)
                self.assertEqual(len(report["results"]), 4)
                for row in report["results"]:
                    self.assertTrue({"attention", "task", "tokens", "n", "score", "agreement", "density",
                                     "selectivity"} <= row.keys())
                    self.assertTrue(0 <= row["agreement"] <= 1 and 0 <= row["selectivity"] <= 1 and row["density"] >= 0)
                full = report["results"][0]
                self.assertEqual((full["agreement"], full["density"], full["selectivity"]), (1, 1, 1))

    def test_samples_longer_than_the_model(self):
        """One of them does not end the others, and is named."""
        long = self.folder / "long.jsonl"
        lines = [{"id": name, "task": "t", "tokens": 0, "context": text, "question": " Who?", "answers": ["Ann"], "match": "contains"}
                 for name, text in (("short", "Ann did."), ("long one", "word " * 4000))]
        long.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        common = ("eval", "-m", self.model, "--samples", long, "-a", "streaming:window=16", "-c", "2k", "--json")
        result = self.assert_done(run(*common))
        self.assertEqual([row["n"] for row in result.json()["results"]], [1, 1])
        self.assertEqual([sample["id"] for sample in result.json()["left_out"]], ["long one"])
        self.assertIn("'long one'", result.err)
        cut = self.assert_done(run(*common, "--truncate", "middle"))
        self.assertEqual([row["n"] for row in cut.json()["results"]], [2, 2])
        self.assertEqual(cut.json()["left_out"], [])
        long.write_text(json.dumps(lines[1]) + "\n", encoding="utf-8")
        self.assert_refused(run(*common, "--quiet"), "'long one'", "--truncate middle")

    def test_bad_lines_of_a_published_set(self):
        """They are named and counted, and the others are scored."""
        line = {"dataset": "qasper", "context": "Ann did.", "input": "Who?", "answers": ["Ann"]}
        bad = [{**line, "_id": "odd one", "dataset": "no-such"}, {**line, "_id": "odd two", "dataset": "no-such"}]
        samples = self.folder / "published.jsonl"
        samples.write_text("".join(json.dumps(each) + "\n" for each in [*bad, line]) + "{broken\n", encoding="utf-8")
        common = ("eval", "-m", self.model, "--samples", samples, "-a", "streaming:window=16")
        result = self.assert_done(run(*common, "--json"))
        self.assertEqual([row["n"] for row in result.json()["results"]], [1, 1])
        self.assertEqual([left["id"] for left in result.json()["left_out"]], ["odd one", "odd two", None])
        self.assertTrue(result.json()["left_out"][2]["place"].endswith("published.jsonl line 4"))
        self.assertIn("published.jsonl line 2, sample 'odd two': expected one of the tasks", result.err)
        summary = self.assert_done(run(*common, "--quiet")).out.partition("Left out: ")[2]
        self.assertRegex(summary, r"^3 of 4 samples\n  2: expected one of the tasks")
        samples.write_text("".join(json.dumps(each) + "\n" for each in bad), encoding="utf-8")
        self.assert_refused(run(*common), "line 1: expected one of the tasks", "no good sample")

    def test_interval_stays_among_possible_scores(self):
        """Three documents, the fewest that have one, so that a t interval reaches far."""
        report = self.assert_done(self.eval(*SPECS, "-a", "random:fraction=1%,window=16")).json()
        for row in report["results"]:
            for end in ("difference_low", "difference_high"):
                self.assertTrue(row[end] is None or -100 <= row[end] <= 100, row)

    def test_interval_says_on_what_it_rests(self):
        shown = self.assert_done(run("eval", "-m", self.model, "--samples", self.samples, *SPECS, "--quiet")).out
        self.assertIn("needle, 2048 tokens: 3 samples, 3 documents", shown)
        self.assertRegex(shown, r"full .* \+0\.0 \[")
        two = ("--samples", self.samples, "--limit", "2")
        shown = self.assert_done(run("eval", "-m", self.model, *two, *SPECS, "--quiet")).out
        self.assertIn("2 documents", shown)
        self.assertIn("none of fewer than 3", shown)
        self.assertNotIn("[", shown)
        rows = self.assert_done(run("eval", "-m", self.model, *two, *SPECS, "--quiet", "--json")).json()["results"]
        self.assertTrue(all(row["difference_low"] is None and row["documents"] == 2 for row in rows))

    def test_audit(self):
        """What is asked for is answered, by every verb that answers questions."""
        report = self.assert_done(self.eval("-a", "topk:k=4,window=32", "--audit", "1")).json()
        self.assertNotIn("audit", report["results"][0])
        self.assertGreater(report["results"][1]["audit"]["outputs"], 0)
        steps = self.assert_done(run("bench", "decode", "-m", self.model, "--context", "1k", "-n", "2", "-a", "topk:k=4,window=32",
                                     "--audit", "1", "--json", "--quiet")).json()
        self.assertGreater(steps["results"][1]["audit"]["outputs"], 0)

    def test_progress_only_grows(self):
        result = self.assert_done(run("eval", "-m", self.model, "--samples", self.samples, *SPECS))
        done = [tuple(map(int, found)) for found in re.findall(r"^eval: (\d+)/(\d+) ", result.err, re.MULTILINE)]
        self.assertEqual(done, sorted(set(done)))
        self.assertEqual(done[-1][0], done[-1][1])

    def test_answers_of_another_run(self):
        path = self.folder / "answers.jsonl"
        self.assert_done(self.eval("-a", "full", "-o", path))
        before = path.read_bytes()
        self.assert_refused(self.eval("-a", "full", "-o", path, "--protocol", "last:8"), "protocol", "last:8", "context-dense", "remove it")
        self.assertEqual(path.read_bytes(), before)
        self.assert_refused(self.eval("-a", "full", "-o", self.samples), "something else")

    def test_limit(self):
        report = self.assert_done(self.eval("-a", "full", "--limit", "1")).json()
        self.assertEqual(report["results"][0]["n"], 1)

    def test_refusals(self):
        self.assert_refused(self.eval("-a", "full", "--protocol", "dense"), "context-dense")
        self.assert_refused(self.eval("-a", "full", "--protocol", "last:-1"), "last")
        self.assert_refused(self.eval("-a", "fool"), "full")
        self.assert_refused(self.eval("-a", "full", "--order", "cluster"), "one method beside full", "found 0")
        self.assert_refused(self.eval("-a", "full", "--prompts", self.samples), "--prompts", self.samples.name)
        self.assert_refused(self.eval(), "attention")
        for value in ("-1", "1.5", "two", "nan", "99999999999999999999", ""):
            with self.subTest(limit=value):
                self.assert_refused(self.eval("-a", "full", f"--limit={value}"), "limit")
        good = self.samples.read_text(encoding="utf-8").splitlines()
        for name, text, mention in (("empty", "", "empty"), ("word", "needle\n", "line 1"), ("list", "[]\n", "item 1"),
                                    ("fields", good[0] + "\n{}\n", "line 2"), ("cut", good[0][:-20], "line 1"),
                                    ("answers", json.dumps({**json.loads(good[0]), "answers": "x"}), "answers"),
                                    ("match", json.dumps({**json.loads(good[0]), "match": "guess"}), "match")):
            with self.subTest(name=name):
                path = self.folder / f"{name}.jsonl"
                path.write_text(text, encoding="utf-8")
                self.assert_refused(run("eval", "-m", self.model, "--samples", path, "-a", "full", "--json"), mention)
        self.assert_refused(run("eval", "-m", self.model, "--samples", self.folder / "no.jsonl", "-a", "full"), "no.jsonl")


class Probe(ProgramTest):
    def test_report(self):
        result = self.assert_done(run("probe", "-m", self.model, "-f", self.text, *SPECS, "--json", "--quiet"))
        self.assertIsInstance(result.json(), dict)
        self.assertIn("loss", result.out)
        self.assertIn("recovered", result.out)

    def test_window_is_one_for_all(self):
        """A spec that has another is told so."""
        said = self.assert_done(run("probe", "-m", self.model, "-f", self.text, "-a", "topk:k=4,window=99")).err
        self.assertIn("topk:k=4,window=99: measured with --window 63, as all are, not 99", said)

    def test_text_too_short(self):
        short = self.folder / "short.txt"
        short.write_text("Too short.", encoding="utf-8")
        self.assert_refused(run("probe", "-m", self.model, "-f", short, *SPECS), "short.txt: expected a text of at least")
        self.assert_refused(run("tune", "-m", self.model, "-f", self.text, "--check", short, "-o", self.folder / "plan.json",
                                "-a", "topk:k=4", "--window", "32"), "short.txt: expected a text of at least")

    def test_lengths(self):
        self.assert_refused(run("probe", "-m", self.model, "-f", self.text, *SPECS, "--lengths", "1M"), "--lengths: expected rising")

    def test_values_out_of_range(self):
        for flag in ("--last", "--sink", "--window", "--top", "--measured"):
            for value in ("-1", "1.5", "two", "nan", "99999999999999999999", ""):
                with self.subTest(flag=flag, value=value):
                    self.assert_refused(run("probe", "-m", self.model, "-f", self.text, *SPECS, f"{flag}={value}"), flag)


class Tables(ProgramTest):
    """What people read fits a terminal of 80 columns, whatever the specs are called."""

    def test_width(self):
        samples = self.folder / "samples.jsonl"
        self.assert_done(run("tasks", "kv", "--tokens", "2k", "--count", "3", "-m", self.model, "-o", samples, "--quiet"))
        specs = ("-a", "topk:k=4,window=32", "-a", "kmeans:clusters=8,probes=2,rope=off,sink=1,window=32,dense_layers=1")
        shape = ("--shape", "L2q4kv2d64", "--context", "2k", "--seconds", "0.01")
        for verb in (("eval", "-m", self.model, "--samples", samples), ("probe", "-m", self.model, "-f", self.text, "--heads"),
                     ("bench", "attention", *shape, "--recall", "8"), ("bench", "decode", "-m", self.model, "-c", "1k", "-n", "2"),
                     ("bench", "growth", "--contexts", "1k,2k", "--kept", "16", "--seconds", "0.01")):
            with self.subTest(verb=verb[:2]):
                shown = self.assert_done(run(*verb, *specs, "--quiet")).out
                self.assertIn("topk:k=4,window=32", shown)
                for line in shown.splitlines():
                    self.assertTrue(len(line) <= 80 or str(self.model) in line, line)


class Tune(ProgramTest):
    def tune(self, *arguments):
        other = self.folder / "other.txt"
        other.write_text(self.text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
        return run("tune", "-m", self.model, "-f", self.text, "--check", other, "-o", self.folder / "plan.json", "-a",
                   "kmeans:clusters=8,probes=2", "-a", "topk:k=4", "--window", "32", "--last", "64", "--lengths", "none",
                   "--quiet", "--force", *arguments, timeout=120)

    def test_plan_is_written_and_used(self):
        report = self.assert_done(self.tune("--target", "error=0.2", "--json")).json()
        names = [row["attention"] for row in report["results"]]
        self.assertEqual(names[:3], ["full", "plan", "streaming"])
        plan = json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
        self.assertEqual(plan["layers"], report["plan"])
        self.assertEqual(plan["window"], 32)
        shown = self.assert_done(run("inspect", self.folder / "plan.json")).out
        self.assertIn("kind: plan", shown)
        for spec in {spec for layer in plan["layers"] for spec in layer}:
            self.assertRegex(shown, re.escape(spec) + r" +\d+ +[a-z]\n")
        self.assertRegex(shown, r"layer  KV heads in their order\n +0  [a-z]")
        self.assertLessEqual(max(map(len, shown.splitlines()[3:])), 80)
        told = self.assert_done(run("inspect", self.folder / "plan.json", "--json")).json()
        self.assertEqual((told["kind"], told["heads"], told["window"]), ("plan", plan["layers"], 32))
        self.assertIn("a plan of", self.assert_done(run("verify", self.folder / "plan.json")).out)
        # What the plan does when it is used is what the chooser measured.
        result = self.assert_done(run("probe", "-m", self.model, "-f", self.folder / "other.txt", "-a",
                                      f"plan:{self.folder / 'plan.json'}", "--window", "32", "--last", "64", "--json", "--quiet"))
        self.assertEqual(result.json()["results"][2]["density"], report["results"][1]["density"])

    def test_what_a_window_finds_is_not_counted(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        text = self.folder / "start.txt"
        text.write_text((root / "demo/document.txt").read_text(encoding="utf-8")[:16000], encoding="utf-8")
        report = self.assert_done(run("probe", "-m", root / "models/pocket", "-f", text, "--last", "256", "--window", "63", "--measured", "1",
                                      "-a", "topk:k=256", "--json", "--quiet")).json()
        self.assertGreater(report["found_answers"], 0)
        full, streaming, found = (row["kept"] for row in report["results"])
        self.assertEqual((full, streaming), (1, 0))
        self.assertGreater(found, 0.5)

    def test_documents_are_made_of_plain_texts(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        plan = self.folder / "made.plan"
        made = ("tune", "-m", root / "models/pocket", "-f", root / "demo/document.txt", "-o", plan, "--documents", "1", "--window", "63",
                "--lengths", "none", "-a", "hash:budget=1/8", "--cost", "bytes", "--quiet", "--force")
        report = self.assert_done(run(*made, "--tokens", "2k", "--json", timeout=120)).json()
        self.assertEqual(report["target"], "at least 0.99 of the answers that full attention finds and sink and window alone do not")
        full, _, streaming, _ = report["results"]
        self.assertEqual((full["measured"], full["error"]), (1, None))
        self.assertEqual(streaming["measured"], 0, "what it predicts is not counted")
        self.assertNotEqual({spec for layer in report["plan"] for spec in layer}, {"full"})
        self.assert_refused(run(*made, "--tokens", "64k"), "document of 65536", "(-f)")
        self.assert_refused(run(*made, "-f", root / "demo/document.txt"), "document.txt' twice")
        self.assert_refused(run(*made, "--tokens", "2k", "--check", root / "demo/document.txt", "--lessons", "on"), "--check: expected another text")
        self.assert_refused(run(*made, "--tokens", "2k", "--last", "2000"), "--tokens: expected a text of at least")
        self.assert_refused(run(*made, "--tokens", "200k"), "--tokens: expected at most the model's 131072 positions")
        self.assert_refused(run(*made, "--tokens", "2k", "--check", self.text, "--lessons", "on"), "give more text (--check)")
        self.assert_refused(run(*made, "--lessons", "off"), "--check", "--lessons is off")

    def test_an_interrupted_choice_goes_on(self):
        """Stopped at some moments, the same command comes to the same plan, and takes less than beginning anew."""
        root = pathlib.Path(__file__).resolve().parents[2]
        made = ("tune", "-m", root / "models/pocket", "-f", root / "demo/document.txt", "--documents", "1", "--window", "63", "--tokens", "2k",
                "--lengths", "none", "-a", "hash:budget=1/8", "-a", "hash:budget=1/32", "--cost", "bytes", "-t", "1")
        began = time.monotonic()
        whole = self.folder / "whole.plan"
        report = self.assert_done(run(*made, "-o", whole, "--json", "--quiet", timeout=240)).json()
        seconds = time.monotonic() - began
        self.assertEqual([p.name for p in self.folder.glob(".*.steps")], [])
        plan, went_on = self.folder / "stopped.plan", 0
        for part in (0.4, 0.7, 0.5):
            process = start(*made, "-o", plan)
            self.addCleanup(process.communicate)
            try:
                process.wait(timeout=part * seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                self.assertEqual(process.wait(timeout=30), INTERRUPTED)
                went_on += (self.folder / ".stopped.plan.steps").exists()
        self.assertGreater(went_on, 0)
        if not plan.exists() or (self.folder / ".stopped.plan.steps").exists():
            again = self.assert_done(run(*made, "-o", plan, "--json", "--quiet", timeout=240)).json()
            self.assertEqual([row["measured"] for row in again["results"]], [row["measured"] for row in report["results"]])
        self.assertEqual(json.loads(plan.read_text())["layers"], json.loads(whole.read_text())["layers"])
        self.assertEqual([p.name for p in self.folder.glob(".*.steps")], [])
        self.assert_refused(run(*made, "-o", plan), "stopped.plan", "--force")
        # A plan whose check was ended is replaced by the same command, and by no other one.
        checked = self.folder / "checked.plan"
        process = start(*made, "-o", checked)
        self.addCleanup(process.communicate)
        while process.poll() is None and not checked.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=30), INTERRUPTED)
        kept = checked.read_text()
        self.assert_refused(run(*made, "-o", checked, "--target", "kept=0.5"), "checked.plan", "--force")
        self.assertEqual(checked.read_text(), kept)
        self.assert_done(run(*made, "-o", checked, "--quiet", timeout=240))
        (self.folder / ".other.plan.steps").write_text("of something else\n")
        self.assert_refused(run(*made, "-o", self.folder / "other.plan"), ".other.plan.steps", "remove it")

    def test_nothing_to_lose_means_full(self):
        report = self.assert_done(self.tune("--target", "error=0.00001", "--json")).json()
        self.assertEqual({spec for layer in report["plan"] for spec in layer}, {"full"})
        self.assertTrue(report["plan_met"])

    def test_refusals(self):
        for target in ("error", "error=", "error=-1", "error=nan", "agreement=1.5", "speed=3"):
            with self.subTest(target=target):
                self.assert_refused(self.tune("--target", target), "--target")
        copy = self.folder / "copy.txt"
        copy.write_bytes(self.text.read_bytes())
        for same in (self.text, copy):
            self.assert_refused(run("tune", "-m", self.model, "-f", self.text, "--check", same, "-o", self.folder / "no.json"),
                                "--check: expected another text")
        self.assert_refused(run("ask", self.folder / "no.lode", "-a", "plan:nowhere.json", "Who?"), "nowhere.json")


class Quantize(ProgramTest):
    def test_says_what_the_matrices_became(self):
        """Rows of the shipped model are 384 and 832 numbers long: few of them take blocks of 256."""
        pocket, file = pathlib.Path(__file__).resolve().parents[2] / "models/pocket", self.folder / "pocket.gguf"
        result = self.assert_done(run("quantize", "-m", pocket, "-o", file))
        self.assertIn("matrices: 6 Q4_K, 37 Q8_0", result.out)
        self.assertIn("37 of 43 matrices have rows that blocks of 256 do not divide", result.err)
        again = self.assert_done(run("quantize", "-m", file, "-o", self.folder / "f16.gguf", "--type", "F16", "--json"))
        self.assertEqual(again.json()["matrices"], {"F16": 43})
        self.assertNotIn("do not divide", again.err)

    def test_says_which_ends_of_answers_have_no_key_in_the_format(self):
        folder, file = self.folder / "many-ends", self.folder / "many-ends.gguf"
        shutil.copytree(pathlib.Path(__file__).resolve().parents[2] / "models/pocket", folder)
        for name in ("config.json", "generation_config.json"):
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            (folder / name).write_text(json.dumps({**config, "eos_token_id": [1, 5, 6, 7, 8]}), encoding="utf-8")
        result = self.assert_done(run("quantize", "-m", folder, "-o", file, "--type", "Q8_0"))
        self.assertIn("5 tokens end an answer, and GGUF has keys for 3 of them: the others (7, 8)", result.err)
        self.assertIn(b"tokenizer.ggml.eos_token_ids", file.read_bytes())
        self.assert_done(run("inspect", file))


class Bench(ProgramTest):
    def test_attention(self):
        report = self.assert_done(run("bench", "attention", "--shape", "L1q4kv2d64", "--context", "4k", *SPECS, "--json",
                                      "--quiet", timeout=120)).json()
        rows = report if isinstance(report, list) else report["results"]
        for row in rows:
            self.assertTrue({"attention", "context", "batch", "queries", "selectivity", "median_us", "apart_us",
                             "select_us", "attend_us", "merge_us", "bytes", "limit_us", "of_limit", "vs_full"} <= row.keys())
            self.assertGreater(row["median_us"], 0)
            numbers = [value for value in row.values() if isinstance(value, (int, float))]
            self.assertTrue(all(math.isfinite(value) for value in numbers), row)
            self.assertAlmostEqual(row["of_limit"], row["limit_us"] / row["median_us"], delta=1e-4 * row["of_limit"])
            self.assertTrue(0 <= row["selectivity"] <= 1)
        full = rows[0]
        self.assertEqual((full["attention"], full["vs_full"], full["selectivity"]), ("full", 1, 1))
        self.assertEqual(full["bytes"], 4096 * 2 * 2 * 64 * 2)  # keys, K and V, KV heads, d, bytes of f16

    def test_queries_beyond_the_window(self):
        """Their own keys are there, too, whatever their number is."""
        for context, queries in (("4k", "7"), ("1", "1")):
            with self.subTest(context=context, queries=queries):
                self.assert_done(run("bench", "attention", "--shape", "L1q4kv1d64", "--context", context, "--queries", queries,
                                     "--seconds", "0.02", "--quiet", "-a", "kmeans:window=5", "-a", "hash:window=5", "-a", "topk:window=5",
                                     timeout=120))  # builds as many indexes as reach beyond the caches

    def test_prefill(self):
        report = self.assert_done(run("bench", "prefill", "--shape", "L1q4kv2d64", "--context", "1k", "--json", "--quiet",
                                      timeout=120)).json()
        self.assertEqual([row["what"] for row in report["results"][:2]], ["attention", "gemm"])
        self.assertRegex(report["results"][2]["what"], "^onednn (bf16|f32) gemm$")
        for row in report["results"]:
            self.assertTrue(math.isfinite(row["gflops"]) and row["gflops"] > 0, row)

    def test_prefill_of_a_model(self):
        report = self.assert_done(run("bench", "prefill", "--random", "L2q4kv2d64", "--context", "600", "--device", "cpu",
                                      "--json", "--quiet", timeout=120)).json()
        model, gemm = report["results"]
        self.assertEqual(model["what"], "model")
        self.assertRegex(gemm["what"], "^onednn (bf16|f32) gemm$")
        self.assertAlmostEqual(model["tokens_per_second"] * model["median_us"], 600e6, delta=600)
        self.assertAlmostEqual(model["of_gemm"] * gemm["gflops"], model["gflops"], delta=1e-3 * model["gflops"])

    def test_train_saap(self):
        report = self.assert_done(run("bench", "train-saap", "--shape", "L1q4kv2d64", "--context", "700", "--prompts", "2", "--clusters", "8",
                                      "--hidden", "16", "--samples", "60", "--steps", "80", "--batch", "32", "--window", "64", "--distance", "32",
                                      "--probes", "2", "--device", "cpu", "--json", "--quiet", timeout=120)).json()
        row = report["results"][0]
        self.assertEqual((row["context"], row["prompts"], row["examples"]), (700, 2, 120))
        self.assertEqual(set(row["seconds"]), {"k-means", "labels", "targets", "steps", "measure", "a_head"})
        self.assertLess(row["train_loss"], row["first_loss"])
        self.assertTrue(0 < row["mass"] <= row["best_mass"] <= 1, row)
        self.assert_refused(run("bench", "train-saap", "--shape", "L1q4kv2d64", "--context", "700", "--device", "cpu", "--quiet"), "--context")

    def test_refusals(self):
        self.assert_refused(run("bench", "attention", "--shape", "llama-9", "--context", "4k", "-a", "full"), "llama-3.1-8b")
        self.assert_refused(run("bench", "attention", "--shape", "pocket", "--context", "-4", "-a", "full"), "--context")
        self.assert_refused(run("bench", "decode", "--context", "4k", "-a", "full"))
        self.assert_refused(run("bench", "nothing"))
        for value in ("0", "-1", "99999999999999999999"):
            self.assert_refused(run("bench", "decode", "--random", "pocket", "--context", "4k", f"--steps={value}"), "steps")


if __name__ == "__main__":
    unittest.main()
