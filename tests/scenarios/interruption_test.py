# SPDX-License-Identifier: Apache-2.0
"""Whatever ends the work early, a path holds the old complete file or the new complete one, and nothing useless is left beside it."""

import fcntl
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import time
import unittest

from program import BAD_INPUT, DONE, FAILED, INTERRUPTED, PROGRAM, TEXT, ProgramTest, run, start


class Interruption(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.long_text = cls.folder / "long.txt"
        cls.long_text.write_text(TEXT * 1800, encoding="utf-8")  # attention over it takes far longer than any test waits

    def setUp(self):
        self.place = self.folder / self.id().rsplit(".", 1)[1]
        self.place.mkdir()
        self.output = self.place / "text.lode"

    def names(self) -> list[str]:
        """Without what the same command goes on from."""
        return sorted(p.name for p in self.place.iterdir() if p.name != ".text.lode.partial")

    def index_arguments(self, text: pathlib.Path, *arguments):
        return ("index", "-m", self.model, "-f", text, "-o", self.output, *arguments)

    def start_long_work(self) -> subprocess.Popen:
        """Indexing that has begun its prefill."""
        # With the usual signals, also where the tests run under nohup.
        process = start(*self.index_arguments(self.long_text, "--force"),
                        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        time.sleep(1.0)
        self.assertIsNone(process.poll(), "finished before it could be interrupted")
        return process

    def assert_ends(self, process: subprocess.Popen, code: int, seconds: float):
        began = time.monotonic()
        self.assertEqual(process.wait(timeout=30), code)
        self.assertLess(time.monotonic() - began, seconds)

    def test_control_c_once(self):
        process = self.start_long_work()
        process.send_signal(signal.SIGINT)
        self.assert_ends(process, INTERRUPTED, 10)
        self.assertEqual(self.names(), [])

    def test_control_c_keeps_the_old_file(self):
        self.assert_done(run(*self.index_arguments(self.text)))
        old = self.output.read_bytes()
        process = self.start_long_work()
        process.send_signal(signal.SIGINT)
        self.assert_ends(process, INTERRUPTED, 10)
        self.assertEqual(self.names(), ["text.lode"])
        self.assertEqual(self.output.read_bytes(), old)

    def test_control_c_twice(self):
        process = self.start_long_work()
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        self.assert_ends(process, INTERRUPTED, 2)
        self.assertEqual(self.names(), [])

    def test_terminate_and_hang_up(self):
        for ending in (signal.SIGTERM, signal.SIGHUP):
            process = self.start_long_work()
            process.send_signal(ending)
            self.assert_ends(process, INTERRUPTED, 10)
            self.assertEqual(self.names(), [])

    def test_control_c_while_waiting_for_questions(self):
        self.assert_done(run(*self.index_arguments(self.text)))
        process = subprocess.Popen([PROGRAM, "ask", str(self.output)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        self.assert_ends(process, INTERRUPTED, 5)

    def assert_says_that_it_goes_on(self, kept: pathlib.Path, least_lines: int, *arguments):
        """Ctrl-C once something is kept there, and before all is done."""
        process = start(*arguments, "--quiet")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 30
        while not (kept.exists() and kept.read_bytes().count(b"\n") >= least_lines):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        self.assertIsNone(process.poll(), "finished before it could be interrupted")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, INTERRUPTED, err)
        self.assertIn(f"lodestone: what was done is in {kept}; the same command goes on from there\n", err)

    def test_control_c_tells_what_goes_on(self):
        samples = [{"id": str(i), "task": "qa", "tokens": len(text), "context": text, "question": "Who?", "answers": ["Ann"],
                    "match": "contains"} for i, text in enumerate((TEXT, TEXT * 1800))]
        path = self.place / "samples.jsonl"
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
        answers = self.place / "answers.jsonl"
        self.assert_says_that_it_goes_on(answers, 2, "eval", "-m", self.model, "--samples", path, "-a", "streaming:window=32",
                                         "-o", answers)
        artefact = self.place / "hash.safetensors"
        self.assert_says_that_it_goes_on(pathlib.Path(f"{artefact}.checkpoint"), 0, "train", "hash", "-m", self.model,
                                         "-f", self.text, "-f", self.long_text, "-o", artefact, "--lessons", "off", "--tokens", "64k", "--sink", "2",
                                         "--window", "16", "--top", "4", "--queries", "6", "--others", "40")

    def test_kill_at_any_moment(self):
        """The short text is indexed in a fraction of a second: kills fall before, while and after the file is written."""
        self.assert_done(run(*self.index_arguments(self.text)))
        began = time.monotonic()
        self.assert_done(run(*self.index_arguments(self.text, "--force")))
        usual = time.monotonic() - began
        rng = random.Random(1)
        for _ in range(25):
            process = start(*self.index_arguments(self.text, "--force"))
            time.sleep(rng.uniform(0, 1.2 * usual))
            process.kill()
            process.communicate()
            self.assert_done(run("verify", self.output))
        self.assert_done(run(*self.index_arguments(self.text, "--force")))
        self.assertEqual(self.names(), ["text.lode"], "the next writer removes what a dead one left")

    def test_two_writers(self):
        """Of two writers to one path, each ends with a complete file or says that another is writing it."""
        processes = [start(*self.index_arguments(self.text, "--force")) for _ in range(4)]
        results = [(*p.communicate(timeout=60), p.returncode) for p in processes]
        self.assertIn(DONE, [code for _, _, code in results])
        for _, err, code in results:
            self.assertIn(code, (DONE, BAD_INPUT), err)
            if code == BAD_INPUT:
                self.assertIn("another process", err)
        self.assert_done(run("verify", self.output))
        self.assertEqual(self.names(), ["text.lode"])

    def test_a_reading_of_another_process_is_not_joined(self):
        """What it has read so far is its own: a second reading of hours would end in a file that is there already."""
        log = self.output.with_name(f".{self.output.name}.partial")
        with log.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assert_refused(run(*self.index_arguments(self.text)), "another process that makes the same file")
            self.assertTrue(log.exists())
        self.assert_done(run(*self.index_arguments(self.text)))
        self.assertEqual(self.names(), ["text.lode"])

    def test_replaced_while_in_use(self):
        """A reader keeps the file that it opened."""
        self.assert_done(run(*self.index_arguments(self.text)))
        reader = subprocess.Popen([PROGRAM, "ask", str(self.output), "--json", "-n", "8"], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(0.5)
        other = self.folder / "other.txt"
        other.write_text("Nothing of the kind.\n" * 60, encoding="utf-8")
        self.assert_done(run(*self.index_arguments(other, "--force")))
        out, err = reader.communicate("Who?\nWhere?\n", timeout=60)
        self.assertEqual(reader.returncode, DONE, err)
        self.assertEqual(out.count('"question"'), 2)
        self.assert_done(run("verify", self.output))

    def start_reader(self) -> subprocess.Popen:
        """A program that has answered one question and waits for the next."""
        self.assert_done(run(*self.index_arguments(self.text)))
        reader = subprocess.Popen([PROGRAM, "ask", str(self.output), "--quiet", "-n", "4"], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(reader.kill)
        reader.stdin.write("Who?\n")
        reader.stdin.flush()
        reader.stdout.readline()
        return reader

    def assert_says_that_its_file_is_gone(self, reader: subprocess.Popen):
        _, err = reader.communicate("Where?\n", timeout=60)
        self.assertEqual(reader.returncode, FAILED, err)
        self.assertRegex(err, r"\Alodestone: [^\n]*can no longer be read[^\n]*\n\Z")

    def test_context_cut_short_while_in_use(self):
        reader = self.start_reader()
        os.truncate(self.output, 4096)
        self.assert_says_that_its_file_is_gone(reader)

    def test_weights_cut_short_while_in_use(self):
        weights = self.model / "model.safetensors"
        whole = weights.read_bytes()
        reader = self.start_reader()
        self.addCleanup(weights.write_bytes, whole)
        os.truncate(weights, 0)
        self.assert_says_that_its_file_is_gone(reader)

    def assert_full_disk_is_survived(self, old: bytes, **limits):
        result = run(*self.index_arguments(self.text, "--force"), **limits)
        self.assert_refused_at_run_time(result)
        self.assertEqual(self.output.read_bytes(), old)
        self.assertEqual(self.names(), ["text.lode"])

    def assert_refused_at_run_time(self, result):
        self.assertEqual(result.code, FAILED, result.err)
        self.assertIn("text.lode", result.err.splitlines()[-1])

    def test_limit_on_file_size(self):
        """Every write can fail: at the first byte, within a section, at the table."""
        self.assert_done(run(*self.index_arguments(self.text)))
        old = self.output.read_bytes()
        for limit in (0, 1, 4096, 5000, len(old) // 2, len(old) - 1):
            with self.subTest(limit=limit):
                self.assert_full_disk_is_survived(old, preexec_fn=lambda limit=limit: limit_file_size(limit))

    def test_full_disk(self):
        """One without room for keys and values, twice while they are read, is seen before the work, any other when it is full."""
        self.assert_done(run(*self.index_arguments(self.text)))
        old = self.output.read_bytes()
        kv = run("inspect", self.output, "--json").json()["kv_bytes"]
        for room, flag, said in ((kv // 2, "--force", "expected room for"), (kv + 4096, "--force", "No space left on device"),
                                 (kv + 4096, "--restart", "more for '.text.lode.partial' until it is whole), found ")):
            with self.subTest(said=said):
                self.assert_disk_of(-(-len(old) // 4096) * 4096 + room, old, said, flag)

    def assert_disk_of(self, size: int, old: bytes, said: str, flag: str):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "lodestone-test", str(self.place)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            self.skipTest("mounting a small tmpfs needs root")
        try:
            self.output.write_bytes(old)
            result = run(*self.index_arguments(self.text, *{"--force", flag}))
            self.assert_refused_at_run_time(result)
            self.assertIn(said, result.err)
            self.assertEqual(self.output.read_bytes(), old)
            self.assertEqual(self.names(), ["text.lode"])
        finally:
            subprocess.run(["umount", str(self.place)], check=True)


def limit_file_size(limit: int):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writes fail with EFBIG, as they do with ENOSPC
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


if __name__ == "__main__":
    unittest.main()
