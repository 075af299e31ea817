#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`mpirun -n N lodestone index|ask|eval`: what one process answers; refusals, and a rank that stops. Left out without mpirun."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = os.environ.get("LODESTONE_PROGRAM", str(ROOT / "build/release/lodestone"))
MODEL = str(ROOT / "models/pocket")
ENVIRONMENT = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
QUESTIONS = ["Which animal does Hugo Pemberton keep?", "What is the profession of Clara Whitaker?"]


def with_mpi() -> bool:
    """Whether there is a launcher, and the program knows ranks."""
    if not shutil.which("mpirun") or not pathlib.Path(MODEL).exists():
        return False
    linked = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=False)
    return "libmpi" in linked.stdout


def ranks(count: int, *arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(["mpirun", "--oversubscribe", "-n", str(count), PROGRAM, *arguments], env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=120, check=False, **kwargs)


@unittest.skipUnless(with_mpi(), "needs mpirun and a program that was built with MPI")
class ClusterTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.context = f"{cls.folder.name}/text.lode"
        text = pathlib.Path(cls.folder.name) / "text.txt"
        text.write_text((ROOT / "demo/document.txt").read_text(encoding="utf-8")[:12000], encoding="utf-8")
        subprocess.run([PROGRAM, "index", "-m", MODEL, "-f", str(text), "-o", cls.context, "-a", "topk:window=64",
                        "--quiet"], check=True, capture_output=True, timeout=120)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.folder.cleanup()

    def answers(self, output: str) -> list[tuple]:
        keys = ("attention", "answer", "tokens_generated", "density", "selectivity")
        return [tuple(a[key] for key in keys) for a in json.loads(output)["answers"]]

    def test_ranks_answer_as_one_process_does(self) -> None:
        asked = ["ask", self.context, *QUESTIONS, "-a", "full", "-a", "topk:window=64", "--json", "-n", "12"]
        alone = subprocess.run([PROGRAM, *asked], capture_output=True, text=True, check=True, timeout=120)
        shared = ranks(2, *asked)
        self.assertEqual(shared.returncode, 0, shared.stderr)
        self.assertEqual(self.answers(shared.stdout), self.answers(alone.stdout))
        self.assertGreater(json.loads(shared.stdout)["answers"][0]["ranks"]["bytes"], 0)

    def test_questions_of_standard_input_reach_all_ranks(self) -> None:
        shared = ranks(2, "ask", self.context, "-a", "full", "--json", "-n", "4", input="\n".join(QUESTIONS) + "\n")
        self.assertEqual(shared.returncode, 0, shared.stderr)
        self.assertEqual([a["question"] for a in json.loads(shared.stdout)["answers"]], QUESTIONS)

    def test_a_text_that_ranks_have_indexed_is_asked_by_any_number_of_them(self) -> None:
        methods = ["-a", "topk:window=64", "-a", "kmeans:clusters=64,probes=8,window=64"]
        shards = f"{self.folder.name}/shards.lode"
        index = ["index", "-m", MODEL, "-f", f"{self.folder.name}/text.txt", "-o", shards, *methods, "--quiet"]
        for again in ([], ["--force"]):
            indexed = ranks(3, *index, *again, "--json")
            self.assertEqual(indexed.returncode, 0, indexed.stderr)
        self.assertEqual(json.loads(indexed.stdout)["ranks"]["count"], 3)
        files = sorted(path.name for path in pathlib.Path(self.folder.name).glob("shards.lode*"))
        self.assertEqual(len(files), 4, files)  # those of the first time are gone
        asked = ["ask", shards, *QUESTIONS, *methods, "-a", "full", "--json", "-n", "12"]
        alone = subprocess.run([PROGRAM, *asked], capture_output=True, text=True, check=True, timeout=120)
        wanted = [(attention, answer) for attention, answer, *_ in self.answers(alone.stdout)]
        for count in (2, 3, 4):
            shared = ranks(count, *asked)
            self.assertEqual(shared.returncode, 0, shared.stderr)
            self.assertEqual([(attention, answer) for attention, answer, *_ in self.answers(shared.stdout)], wanted)
            for answer in json.loads(shared.stdout)["answers"]:
                told = answer["ranks"]
                states = (told["bytes"] - told["selection_bytes"]) / count / 6
                tokens = answer["tokens_prefilled"] + answer["tokens_generated"] - 1
                self.assertLessEqual(states, tokens * 2 * 8 * 65 * 4)
                self.assertEqual(told["selection_bytes"] > 0, answer["attention"] != "full")
        for verb in ("verify", "inspect"):
            subprocess.run([PROGRAM, verb, shards], capture_output=True, check=True, timeout=60)
        (pathlib.Path(self.folder.name) / files[-1]).unlink()
        lost = subprocess.run([PROGRAM, *asked], capture_output=True, text=True, check=False, timeout=60)
        self.assertEqual(lost.returncode, 2)
        self.assertIn(files[-1], lost.stderr)

    def test_ranks_score_as_one_process_does(self) -> None:
        samples = f"{self.folder.name}/samples.jsonl"
        subprocess.run([PROGRAM, "tasks", "needle", "--tokens", "1k", "--count", "4", "--seed", "1", "-m", MODEL, "-o", samples],
                       check=True, capture_output=True, timeout=120)
        scored = ["eval", "-m", MODEL, "--samples", samples, "-a", "full", "-a", "topk:window=64", "--json", "--quiet"]
        alone = json.loads(subprocess.run([PROGRAM, *scored], capture_output=True, text=True, check=True, timeout=120).stdout)
        shared = ranks(2, *scored)
        self.assertEqual(shared.returncode, 0, shared.stderr)
        for one, other in zip(alone["results"], json.loads(shared.stdout)["results"], strict=True):
            self.assertEqual((one["attention"], one["score"], one["n"]), (other["attention"], other["score"], other["n"]))
            self.assertAlmostEqual(one["selectivity"], other["selectivity"], places=6)

    def test_ranks_measure_their_link(self) -> None:
        estimate = ranks(2, "estimate", "-m", MODEL, "--tokens", "2k", "--machines", "4", "--json", "--quiet", "-a", "topk:window=64")
        self.assertEqual(estimate.returncode, 0, estimate.stderr)
        machines = json.loads(estimate.stdout)["machines"]
        self.assertEqual(machines["count"], 4)
        self.assertGreater(machines["latency_us"], 0)
        self.assertLess(machines["prefill_efficiency"], 1)

    def test_what_ranks_do_not_share_is_refused_once(self) -> None:
        for arguments, sentence in ((["inspect", self.context], "expected a verb that several ranks share"),
                                    (["ask", self.context, "Who?", "-a", "h2o"], "index the text and ask it on one machine, without mpirun"),
                                    (["index", "-m", MODEL, "-f", f"{self.folder.name}/text.txt", "-o", "x.lode", "-a", "h2o"], "without mpirun"),
                                    (["estimate", "-m", MODEL, "--tokens", "2k", "-a", "squeezed"], "expected a method whose keys several ranks choose together"),
                                    (["index", "-m", MODEL, "-f", f"{self.folder.name}/text.txt", "-o", "x.lode", "-a", "quest"], "index the text on one machine"),
                                    (["index", "-m", MODEL, "-f", f"{self.folder.name}/text.txt", "-o", "x.lode", "-a", "auto"], "methods by name"),
                                    (["serve", "-m", MODEL, "--contexts", self.folder.name, "-a", "auto"], "methods by name"),
                                    (["serve", "-m", MODEL, "--contexts", self.folder.name, "-a", "quest"], "expected a method whose keys several ranks choose together"),
                                    (["ask", "nowhere.lode", "Who?"], "nowhere.lode")):
            refused = ranks(2, *arguments)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertEqual(refused.stderr.count(sentence), 1, refused.stderr)
            self.assertEqual(refused.stdout.strip(), "")

    def test_ranks_with_other_arguments_are_refused(self) -> None:
        refused = subprocess.run(["mpirun", "--oversubscribe", "-n", "1", PROGRAM, "ask", self.context, "Who?", "-n", "4", "--threads", "1", ":",
                                  "-n", "1", PROGRAM, "ask", self.context, "Who?", "-n", "5"], env=ENVIRONMENT,
                                 capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(refused.returncode, 2, refused.stderr)
        self.assertEqual(refused.stderr.count("expected the same arguments on all ranks, found '4' on rank 0 where rank 1 has '5'"), 1, refused.stderr)

    def test_a_rank_that_stops_is_named_within_seconds(self) -> None:
        with subprocess.Popen(["mpirun", "--oversubscribe", "-n", "2", PROGRAM, "ask", self.context, "-a", "full"],
                              env=ENVIRONMENT | {"LODESTONE_RANK_TIMEOUT": "2"}, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            run.stdin.write(QUESTIONS[0] + "\n")
            run.stdin.flush()
            self.assertTrue(run.stdout.readline())
            children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True)
            os.kill(int(children.stdout.split()[1]), signal.SIGSTOP)
            began = time.monotonic()
            run.stdin.write(QUESTIONS[1] + "\n")
            run.stdin.flush()
            _, error = run.communicate(timeout=60)
            self.assertIn("rank 1 has given no sign of life", error)
            self.assertEqual(run.returncode, 1)
            self.assertLess(time.monotonic() - began, 30)

    def test_one_rank_speaks_however_slow_the_launcher_is(self) -> None:
        """Rank 0 ends all, which a busy machine's launcher does late: the others are silent meanwhile."""
        with subprocess.Popen(["mpirun", "--oversubscribe", "-n", "2", PROGRAM, "ask", self.context, "-a", "full"],
                              env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            run.stdin.write(QUESTIONS[0] + "\n")
            run.stdin.flush()
            self.assertTrue(run.stdout.readline())
            children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True)
            os.kill(run.pid, signal.SIGSTOP)
            os.kill(int(children.stdout.split()[0]), signal.SIGINT)
            time.sleep(4)  # longer than rank 0 waits for the launcher, shorter than rank 1 does
            os.kill(run.pid, signal.SIGCONT)
            _, error = run.communicate(timeout=60)
            self.assertEqual(error.count("lodestone: "), 1, error)
            self.assertIn("interrupted", error)

    def test_a_rank_that_stops_before_it_has_joined_ends_the_others(self) -> None:
        program = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && kill -STOP $$; exec {PROGRAM} ask {self.context} "Who?" -a full'
        began = time.monotonic()
        lost = subprocess.run(["mpirun", "--oversubscribe", "-n", "2", "sh", "-c", program], env=ENVIRONMENT | {"LODESTONE_RANK_TIMEOUT": "1"},
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertIn("expected all ranks to join within 4 s", lost.stderr)
        self.assertEqual(lost.returncode, 1)
        self.assertLess(time.monotonic() - began, 30)


if __name__ == "__main__":
    unittest.main()
