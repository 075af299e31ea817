# SPDX-License-Identifier: Apache-2.0
"""Hostile files: each ends in one sentence, or is read and nothing else is, within bounded time and memory. Run by itself it prints
a table of them all."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scenarios"))
from documents_test import text_of
from hostile_files import CASES
from program import BAD_INPUT, DONE, PROGRAM, ProgramTest, environment, run


class Ended:
    """How `index` ended on a file, what it said, and what it took, the programs that it started included."""

    def __init__(self, model: pathlib.Path, path: pathlib.Path, output: pathlib.Path):
        with tempfile.TemporaryFile() as said:
            began = time.monotonic()
            process = subprocess.Popen([PROGRAM, "index", "-m", model, "-f", path, "-o", output, "--quiet"], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=said, env=environment())
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = self.code = os.waitstatus_to_exitcode(status)
            self.seconds = time.monotonic() - began
            self.cpu_seconds = usage.ru_utime + usage.ru_stime
            self.megabytes = usage.ru_maxrss // 1024
            said.seek(0)
            self.said = said.read().decode(errors="replace")


class Hostile(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        print(f"| {'file':55} | {'seconds':>7} | {'MiB':>5} | ends with")

    def test_each_ends_within_its_bounds(self):
        for case in CASES:
            with self.subTest(case.name):
                place, output = self.folder / "place", self.folder / "never.lode"
                place.mkdir()
                ended = Ended(self.model, case.make(place), output)
                print(f"| {case.name:55} | {ended.cpu_seconds:7.2f} | {ended.megabytes:5} | {ended.said.strip().splitlines()[0][:150] if ended.said else 'is read'}", flush=True)
                subprocess.run(["rm", "-rf", place], check=True)  # deeper than shutil goes
                if case.read:
                    self.assertEqual(ended.code, DONE, ended.said)
                    self.assertNotIn("root:", text_of(output))
                    output.unlink()
                else:
                    self.assertEqual(ended.code, BAD_INPUT, ended.said)
                    self.assertRegex(ended.said, r"\Alodestone: [^\n]{8,}\n\Z")
                    self.assertFalse(output.exists())
                for mention in case.mentions:
                    self.assertIn(mention, ended.said)
                self.assertNotIn("\x1b", ended.said)
                self.assertLess(ended.cpu_seconds, case.seconds)
                self.assertLess(ended.megabytes, case.megabytes)

    def test_a_folder_of_very_many_files_can_be_read_in_part(self):
        folder = self.folder / "many"
        folder.mkdir()
        for n in range(66_000):
            os.close(os.open(folder / f"{n}.log", os.O_CREAT | os.O_WRONLY))
        for name in ("a", "b", "c"):
            (folder / f"{name}.md").write_text(f"Text {name}.\n", encoding="utf-8")
        output = self.folder / "part.lode"
        result = self.assert_done(run("index", "-m", self.model, "-f", folder, "-o", output, "--include", "*.md", "--json"))
        self.assertEqual([f["path"] for f in result.json()["files"]], ["many/a.md", "many/b.md", "many/c.md"])
        shutil.rmtree(folder)


if __name__ == "__main__":
    unittest.main()
