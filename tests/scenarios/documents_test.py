# SPDX-License-Identifier: Apache-2.0
"""Documents as people have them: what is read of each kind, folders, growing texts, interrupted readings, sources."""

import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

import documents
import lode_file
from program import INTERRUPTED, TEXT, ProgramTest, run, start


def keys_of(path: pathlib.Path) -> dict[str, bytes]:
    """Tokens, keys and values of an indexed text."""
    data = path.read_bytes()
    return {s.name: data[s.offset : s.offset + s.size] for s in lode_file.sections(data) if s.name == "tokens" or s.name.startswith("kv/")}


def part(i: int) -> str:
    return f"Part {i} tells of the harbour. " + "".join(f"In year {i}{n} the bell of tower {n * 7 % 13} rang {n} times. " for n in range(40)) + "\n"


class Growing(ProgramTest):
    def setUp(self):
        self.place = pathlib.Path(self.folder / self.id().rsplit(".", 1)[1])
        self.place.mkdir()

    def index_all(self, *arguments):
        return self.assert_done(run("index", "-m", self.model, "--json", "--quiet", *arguments)).json()

    def test_ten_appends_equal_one_reading(self):
        files = [documents.write(self.place, f"p{i}.txt", part(i)) for i in range(10)]
        named = [word for file in files for word in ("-f", file)]
        one = self.index_all(*named, "-o", self.place / "one.lode", "-a", "kmeans")
        whole = documents.write(self.place, "whole.txt", "".join(part(i) for i in range(10)))
        self.index_all("-f", whole, "-o", self.place / "whole.lode")
        grown = self.place / "grown.lode"
        self.index_all("-f", files[0], "-o", grown, "-a", "kmeans")
        for file in files[1:]:
            result = self.assert_done(run("index", "--append", grown, "-f", file, "--json", "--quiet")).json()
            self.assertLess(result["tokens_read"], one["tokens"] // 10 + 600)
        self.assertEqual(keys_of(grown), keys_of(self.place / "one.lode"))
        self.assertEqual(keys_of(grown), keys_of(self.place / "whole.lode"))
        self.assertEqual([f["path"] for f in result["files"]], list(map(str, files)))
        self.assert_done(run("ask", grown, "Who rang?", "-n", "4", "--show-sources"))
        self.assert_done(run("verify", grown))

    def test_a_folder_is_read_again_from_the_first_change_on(self):
        folder = self.place / "notes"
        for i in range(6):
            documents.write(folder, f"n{i}.md", part(i))
        output = self.place / "notes.lode"
        first = self.index_all("-f", folder, "-o", output)
        self.assertEqual(first["tokens_kept"], 0)
        again = self.index_all("-f", folder, "-o", output)
        self.assertEqual(again["tokens_read"], 0)
        (folder / "n3.md").write_text(part(30), encoding="utf-8")
        result = run("index", "-m", self.model, "-f", folder, "-o", output)
        self.assert_done(result)
        self.assertRegex(result.err, r"tokens are kept from before; reading goes on from notes/n[2-5]\.md")
        shutil.copy(output, self.place / "copy.lode")
        again = self.index_all("-f", folder, "-o", self.place / "copy.lode", "--restart")
        self.assertEqual(again["tokens_kept"], 0)
        # What has changed came last, and stays there: its next change costs only itself.
        (folder / "n3.md").write_text(part(31), encoding="utf-8")
        result = self.index_all("-f", folder, "-o", output)
        self.assertLess(result["tokens_read"], first["tokens"] // 6 + 600)
        self.assertEqual(result["files"][-1]["path"], "notes/n3.md")

    def test_an_interrupted_reading_goes_on(self):
        text = documents.write(self.place, "long.txt", TEXT * 180)
        output, log = self.place / "long.lode", self.place / ".long.lode.partial"
        for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, INTERRUPTED)):
            process = start("index", "-m", self.model, "-f", text, "-o", output, "--quiet")
            before = log.stat().st_size if log.exists() else 0
            while process.poll() is None and (not log.exists() or log.stat().st_size <= before):
                time.sleep(0.01)
            self.assertIsNone(process.poll(), "finished before it could be interrupted")
            process.send_signal(sent)
            process.communicate()
            self.assertEqual(process.returncode, code)
            self.assertFalse(output.exists())
        with log.open("r+b") as half:  # the last block was not whole
            half.truncate(log.stat().st_size - 100)
        result = self.assert_done(run("index", "-m", self.model, "-f", text, "-o", output))
        self.assertRegex(result.err, r"going on after \d+ tokens that an interrupted reading left")
        self.assertFalse(log.exists())
        self.index_all("-f", text, "-o", self.place / "once.lode")
        self.assertEqual(keys_of(output), keys_of(self.place / "once.lode"))


if __name__ == "__main__":
    unittest.main()
