# SPDX-License-Identifier: Apache-2.0
"""Hostile files: each ends in one sentence, or is read and nothing else is, within bounded time and memory. Run by itself it prints
a table of them all."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

from documents_test import text_of
from hostile_files import CASES, Case
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


def made_apart(case: Case, place: pathlib.Path) -> pathlib.Path:
    """The case's file, made in a process of its own: Linux counts the memory that a process had before it began a program as the
    program's."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, os.fsencode(case.make(place)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        path = told.read()
    _, status = os.waitpid(child, 0)
    if status != 0 or not path:
        raise RuntimeError(f"cannot make: {case.name}")
    return pathlib.Path(os.fsdecode(path))


class Hostile(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        print(f"| {'file':55} | {'seconds':>7} | {'MiB':>5} | ends with")

    def test_each_ends_within_its_bounds(self):
        for n, case in enumerate(CASES):
            with self.subTest(case.name):
                own = self.folder / str(n)  # a case leaves nothing to the next
                place, output = own / "place", own / "read.lode"
                place.mkdir(parents=True)
                try:
                    self.assert_ends(case, made_apart(case, place), output)
                finally:
                    subprocess.run(["rm", "-rf", own], check=True)  # deeper than shutil goes

    def assert_ends(self, case: Case, path: pathlib.Path, output: pathlib.Path):
        ended = Ended(self.model, path, output)
        said = ended.said.strip().splitlines()[0][:150] if ended.said else "is read"
        print(f"| {case.name:55} | {ended.cpu_seconds:7.2f} | {ended.megabytes:5} | {said}", flush=True)
        if case.read:
            self.assertEqual(ended.code, DONE, ended.said)
            text = text_of(output)
            self.assertNotIn("root:", text)
            self.assertLess(len(text), case.characters)
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
