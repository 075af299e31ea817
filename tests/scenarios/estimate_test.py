#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lodestone estimate: shape of its JSON, what it recommends, and its errors."""

import json
import os
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["LODESTONE_PROGRAM"]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "models", "pocket")


def run(*arguments):
    return subprocess.run([PROGRAM, "estimate", *arguments], capture_output=True, text=True, timeout=120)


class Estimate(unittest.TestCase):
    def test_json(self):
        done = run("-m", MODEL, "--tokens", "2k", "-a", "topk:k=16,window=63", "--device", "cpu", "--json", "--quiet")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertTrue(found["fits"])
        self.assertEqual([m["attention"] for m in found["methods"]], ["full", "topk:k=16,window=63"])
        self.assertIn(found["recommended"], ["full", "topk:k=16,window=63"])
        self.assertGreater(found["prefill_seconds"], 0)
        self.assertGreaterEqual(found["file_bytes"], 2048 * 3072)
        for method in found["methods"]:
            self.assertGreater(method["ms_token"], 0)
            self.assertGreater(method["first_token_seconds"], 0)

    def test_several_machines_are_recommended_what_they_index_together(self):
        done = run("-m", MODEL, "--tokens", "2k", "--machines", "4", "--device", "cpu")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("squeezed", done.stdout)
        self.assertIn("mpirun -n 4 lodestone index", done.stdout)
        self.assertIn("us a message", done.stdout)
        self.assertNotIn("measuring measuring", done.stderr)

    def test_errors(self):
        for arguments, said in [
            (["--tokens", "1M"], "the model's context"),
            ([], "either -f TEXT or --tokens N"),
            (["--tokens", "2k", "-f", "x"], "either -f TEXT or --tokens N"),
            (["--tokens", "2k", "-a", "nonsense"], "nonsense"),
            (["--tokens", "2k", "--machines", "2", "-a", "squeezed"], "ask that file over ranks"),
        ]:
            done = run("-m", MODEL, "--device", "cpu", *arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(said, done.stderr)


    def test_a_document_is_read_as_index_reads_it(self):
        with tempfile.TemporaryDirectory() as folder:
            words, found = "It was a quiet day in the harbour. " * 40, []
            for name, text in [("a.txt", words), ("a.html", "<html><body>" + "<!-- a remark that nobody reads -->" * 50 + f"<p>{words}</p></body></html>")]:
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write(text)
                done = run("-m", MODEL, "-f", os.path.join(folder, name), "-a", "full", "--device", "cpu", "--quiet")
                self.assertEqual(done.returncode, 0, done.stderr)
                found.append(int(done.stdout.split()[0]))
            self.assertLess(abs(found[0] - found[1]), 5)

    def test_an_indexed_text_is_not_estimated(self):
        with tempfile.TemporaryDirectory() as folder:
            text, indexed = os.path.join(folder, "text.txt"), os.path.join(folder, "text.lode")
            with open(text, "w", encoding="utf-8") as file:
                file.write("The lamp was lit. " * 50)
            subprocess.run([PROGRAM, "index", "-m", MODEL, "-f", text, "-o", indexed, "-a", "full", "--quiet"], check=True, capture_output=True)
            for arguments in ([indexed], ["-m", indexed, "--tokens", "2k"], ["-m", MODEL, "-f", indexed]):
                done = run(*arguments)
                self.assertEqual(done.returncode, 2, arguments)
                self.assertIn("found the indexed text", done.stderr)
                self.assertIn("lodestone estimate -m MODEL -f TEXT", done.stderr)


if __name__ == "__main__":
    unittest.main()
