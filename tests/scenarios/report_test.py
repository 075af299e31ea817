# SPDX-License-Identifier: Apache-2.0
"""report: one page that needs nothing else, made again without measuring again, and published data sets."""

import json
import re
import signal
import time
import unittest
import xml.etree.ElementTree

from program import INTERRUPTED, ProgramTest, run, start

SUITE = """title = "A first look"
[[run]]
kind = "eval"
tasks = ["needle", "kv"]
lengths = ["1k"]
methods = ["streaming", "topk:k=4", "saap"]
dense = "sink=1,window=32"
protocols = ["context-dense", "decode-sparse"]
samples = 2
show = ["table", "score-density", "needle-map"]
"""


class Report(ProgramTest):
    def suite(self, text: str = SUITE):
        path = self.folder / "look.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def report(self, folder: str, *arguments):
        return run("report", self.suite(), "-m", self.model, "-o", self.folder / folder, *arguments, timeout=120)

    def test_page_and_resume(self):
        first = self.assert_done(self.report("one", "--json", "--quiet")).json()
        self.assertEqual([s["attention"] for s in first["skipped"]], ["saap:sink=1,window=32"])
        page = (self.folder / "one" / "index.html").read_text(encoding="utf-8")
        xml.etree.ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
        self.assertNotRegex(page.replace('xmlns="http://www.w3.org/2000/svg"', ""), r"https?:|<script|src=|url\(|@import")
        self.assertIn("One spec is left out", page)
        self.assertIn("<code>saap:", page)
        markdown = (self.folder / "one" / "report.md").read_text(encoding="utf-8")
        self.assertRegex(markdown, r"commit ([0-9a-f]{12}(-dirty)?|unknown), ")
        figures = re.findall(r"\]\((figures/[^)]*)\)", markdown)
        self.assertEqual(len(figures), 4)
        for figure in figures:
            xml.etree.ElementTree.parse(self.folder / "one" / figure)
        answers = self.folder / "one" / "raw" / "answers-context-dense.jsonl"
        before = answers.read_bytes()
        self.assert_done(self.report("one", "--quiet"))
        self.assertEqual(answers.read_bytes(), before)
        self.assertEqual((self.folder / "one" / "report.md").read_text(encoding="utf-8"), markdown)

    def test_published_samples(self):
        samples = self.folder / "qa_1.jsonl"
        samples.write_text(json.dumps({"index": 0, "input": "Ann is here.\nQuestion: Who is here?", "outputs": ["Ann"],
                                       "length": 64}) + "\n", encoding="utf-8")
        result = self.assert_done(run("eval", "-m", self.model, "--samples", samples, "-a", "streaming:window=32", "--json",
                                      "--quiet")).json()
        self.assertEqual(result["results"][0]["task"], "qa_1")
        self.assert_done(self.report("two", "--samples", samples, "--quiet"))
        self.assertIn("| attention | qa_1 | mean |", (self.folder / "two" / "report.md").read_text(encoding="utf-8"))

    def test_benchmarks(self):
        """Those whose texts this project has no copy of ask for them, and all their methods but those without an artefact run."""
        for name in ("longbench", "infinitebench", "prefixqa"):
            self.assert_refused(run("report", name, "-m", self.model, "-o", self.folder / "four"), "expected --samples FILE")
        samples = self.folder / "prefix.json"
        samples.write_text(json.dumps([{"context": "Ann is here. " * 120, "question": question, "answer": "Ann"}
                                       for question in ("Who?", "Who is here?")] + [{"context": "lost"}]), encoding="utf-8")
        result = self.assert_done(run("report", "prefixqa", "-m", self.model, "--samples", samples, "-o", self.folder / "four", "--json",
                                      timeout=240))
        self.assertEqual({s["attention"].partition(":")[0] for s in result.json()["skipped"]}, {"saap", "hash"})
        self.assertEqual([left["place"].rpartition(" ")[2] for left in result.json()["left_out"]], ["3"])
        self.assertIn("| prefixqa |", (self.folder / "four" / "report.md").read_text(encoding="utf-8"))

    def test_interrupted_before_anything_was_measured(self):
        suite = SUITE.replace('"1k"', '"64k"')  # whose first prefill takes longer than this test waits
        process = start("report", self.suite(suite), "-m", self.model, "-o", self.folder / "cut")
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, INTERRUPTED, err)
        self.assertNotIn("goes on", err)

    def test_refusals(self):
        self.assert_refused(run("report", "no-such-suite", "-m", self.model), "no-such-suite")
        self.assert_refused(run("report", self.suite("title = 3\n"), "-m", self.model), "line 1")
        self.assert_refused(run("report", self.suite(SUITE.replace("topk:k=4", "topk:kk=4")), "-m", self.model, "-o",
                                self.folder / "three", "--quiet"), "look.toml line 6: 'methods'")
        self.assertFalse((self.folder / "three").exists())
        self.assert_refused(run("report", self.suite(SUITE.replace('"kv"', '"kw"')), "-m", self.model, "-o",
                                self.folder / "three", "--quiet"), "kw")
        self.assert_refused(self.report("three", "--samples", self.text, "--format", "csv"), "longbench")


if __name__ == "__main__":
    unittest.main()
