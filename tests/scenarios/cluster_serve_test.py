#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`mpirun -n N lodestone serve`: rank 0 speaks HTTP, all ranks read and answer. Left out without mpirun."""

import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from cluster_test import ENVIRONMENT, MODEL, QUESTIONS, ROOT, ranks, with_mpi
from server import Server

SPEC = "topk:window=64"


class RankServer(Server):
    """A server of so many ranks; `process` is mpirun."""

    def __init__(self, count: int, contexts, *arguments, timeout: float = 5):
        super().__init__(contexts, "-m", MODEL, *arguments, launcher=("mpirun", "--oversubscribe", "-n", str(count)),
                         env=ENVIRONMENT | {"LODESTONE_RANK_TIMEOUT": str(timeout)})

    def pids(self) -> list[int]:
        """The processes, by rank."""
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=True)
        by_rank = {}
        for pid in map(int, children.stdout.split()):
            for entry in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"OMPI_COMM_WORLD_RANK="):
                    by_rank[int(entry.split(b"=")[1])] = pid
        return [by_rank[rank] for rank in range(len(by_rank))]

    def answer(self, context: str, question: str, **fields) -> str:
        body = self.chat(question, context=context, **{"max_tokens": 12, **fields})
        return body["choices"][0]["message"]["content"].strip()


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@unittest.skipUnless(with_mpi(), "needs mpirun and a program that was built with MPI")
class ClusterServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(prefix="lodestone-")
        cls.addClassCleanup(folder.cleanup)
        cls.contexts = pathlib.Path(folder.name)
        cls.text = (ROOT / "demo/document.txt").read_text(encoding="utf-8")[:9000]

    def asked(self, count: int) -> dict:
        """What `mpirun -n COUNT lodestone ask` answers, by context and spec."""
        found = {}
        for context in ("first", "second"):
            done = ranks(count, "ask", str(self.contexts / f"{context}.lode"), *QUESTIONS, "-a", "full", "-a", SPEC, "--json", "-n", "12")
            self.assertEqual(done.returncode, 0, done.stderr)
            for a in json.loads(done.stdout)["answers"]:
                found.setdefault((context, a["attention"]), []).append(a["answer"])
        return found

    def expect_answers(self, server: RankServer, wanted: dict) -> None:
        """All questions about all contexts by all methods, of as many clients at once."""
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            found = {(context, spec): [clients.submit(server.answer, context, question, attention=spec) for question in QUESTIONS]
                     for context, spec in wanted}
            for key, answers in found.items():
                self.assertEqual([a.result() for a in answers], wanted[key], key)

    def expect_refusals(self, server: RankServer) -> None:
        refused = server.json("POST", "/v1/contexts", {"name": "auto", "text": self.text, "attention": "auto"}, expect=400)
        self.assertIn("expected methods by name", refused["error"]["message"])
        server.upload("quest", self.text, attention="quest")
        self.assertIn("index the text on one machine", server.wait_for("quest", "failed")["error"])
        self.assertIn("learns from the prefill itself", server.chat("Who?", context="first", attention="h2o", expect=400)["error"]["message"])
        own = server.chat(QUESTIONS[0], context="first", max_tokens=4)["lodestone"]
        self.assertEqual(own["sources"], [])
        self.assertIn("there are no passages: several ranks answer", own["notice"])

    def go_away(self, server: RankServer) -> None:
        """A client that leaves in the middle of a stream; its answer ends."""
        body = json.dumps({"context": "first", "stream": True, "max_tokens": 4000, "attention": "full", "stop": [],
                           "messages": [{"role": "user", "content": "x " * 3000}]}).encode()
        with socket.create_connection((server.host, server.port)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.3)
        end = time.monotonic() + 10
        while b"vllm:num_requests_running 0" not in server.request("GET", "/metrics")[2].replace(b'{engine="0"}', b""):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)

    def test_ranks_serve_what_any_number_of_them_has_read(self) -> None:
        with RankServer(2, self.contexts, "-a", SPEC, timeout=1) as server:
            server.upload("first", self.text)
            server.upload("second", self.text[3000:], attention=["full"])
            server.wait_for("first")
            server.wait_for("second")
            wanted = self.asked(2)
            self.expect_answers(server, wanted)
            events = server.stream("/v1/chat/completions", {"context": "first", "attention": SPEC, "max_tokens": 12,
                                                            "messages": [{"role": "user", "content": QUESTIONS[0]}]})
            pieces = [json.loads(data) for _, data in events if data != "[DONE]"]
            streamed = "".join(p["choices"][0]["delta"].get("content", "") for p in pieces if p["choices"])
            self.assertEqual(streamed.strip(), wanted["first", SPEC][0])
            self.expect_refusals(server)
            self.go_away(server)
            before = [cpu_seconds(pid) for pid in server.pids()]
            time.sleep(2.5)  # longer than a silent rank may be; nobody is lost, and nobody is busy
            for rank, (pid, seconds) in enumerate(zip(server.pids(), before, strict=True)):
                self.assertLess(cpu_seconds(pid) - seconds, 0.6, rank)
            self.expect_answers(server, wanted)
            os.kill(server.pids()[0], signal.SIGTERM)
            self.assertEqual(server.process.wait(timeout=30), 0, server.log_text())
        self.assertEqual(len(list(self.contexts.glob("first.lode.*-*of2"))), 2)
        with RankServer(3, self.contexts) as server:
            self.assertEqual({c["name"]: c["state"] for c in server.json("GET", "/v1/contexts")["data"]},
                             {"first": "ready", "second": "ready"})
            self.expect_answers(server, self.asked(3))
            with concurrent.futures.ThreadPoolExecutor(1) as client:
                asked = client.submit(server.chat, "x " * 6000, expect=503, max_tokens=4000)
                time.sleep(0.3)
                began = time.monotonic()
                server.stop(signal.SIGINT)  # Ctrl-C reaches mpirun, which ends all ranks
                self.assertLess(time.monotonic() - began, 10)
                self.assertIn("the launcher (mpirun) is ending all ranks", asked.result(timeout=10)["error"]["message"])

    def test_a_lost_rank_ends_the_answers_with_the_reason(self) -> None:
        with RankServer(2, self.contexts, timeout=1) as server, concurrent.futures.ThreadPoolExecutor(2) as clients:
            asked = clients.submit(server.chat, "x " * 6000, expect=503, max_tokens=4000)
            time.sleep(0.3)
            os.kill(server.pids()[1], signal.SIGSTOP)
            began = time.monotonic()
            self.assertIn("rank 1 has given no sign of life", asked.result(timeout=30)["error"]["message"])
            self.assertEqual(server.process.wait(timeout=30), 1)
            self.assertLess(time.monotonic() - began, 15)
            self.assertIn("rank 1 has given no sign of life", server.log_text())


if __name__ == "__main__":
    unittest.main()
