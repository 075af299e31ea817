# SPDX-License-Identifier: Apache-2.0
"""Runs the built program as a user would, and what its black-box tests share."""

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import tiny_model

PROGRAM = os.environ.get("LODESTONE_PROGRAM", "build/release/lodestone")
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
TEXT = "The lamp of the harbour was lit by the widow Ann. The ship came in at noon, and the bell rang thrice.\n"


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", **(extra or {})}


def run(*arguments, stdin: str | bytes = "", stdout=subprocess.PIPE, timeout: float = 180, env=None, **options) -> Result:
    given = stdin if isinstance(stdin, bytes) else stdin.encode()
    done = subprocess.run([PROGRAM, *map(str, arguments)], input=given, stdout=stdout, stderr=subprocess.PIPE,
                          timeout=timeout, env=environment(env), check=False, **options)
    return Result(done.returncode, (done.stdout or b"").decode(errors="replace"), done.stderr.decode(errors="replace"))


def start(*arguments, **options) -> subprocess.Popen:
    return subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment(), encoding="utf-8", errors="replace", **options)


class ProgramTest(unittest.TestCase):
    """A folder for each test class with a tiny model, and assertions on how the program ended."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="lodestone-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.model = tiny_model.write(cls.folder / "model")
        cls.text = cls.folder / "text.txt"
        cls.text.write_text(TEXT * 20, encoding="utf-8")

    def assert_done(self, result: Result) -> Result:
        self.assertEqual(result.code, DONE, result.err)
        return result

    def assert_refused(self, result: Result, *mentions: str, code: int = BAD_INPUT) -> Result:
        """The exit code, nothing on stdout, and one sentence on stderr that mentions all of these."""
        self.assertEqual(result.code, code, result.err)
        self.assertEqual(result.out, "")
        self.assertRegex(result.err, r"\Alodestone: [^\n]{8,}\n\Z")
        for mention in mentions:
            self.assertIn(mention, result.err)
        return result

    def index(self, name: str = "text.lode", *arguments, text: pathlib.Path | None = None) -> pathlib.Path:
        path = self.folder / name
        self.assert_done(run("index", "-m", self.model, "-f", text or self.text, "-o", path, "--quiet", *arguments))
        return path
