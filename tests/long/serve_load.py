#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load on the server with the shipped model, for a minute or two: 8, 64 and 1,000 connections, slow readers and half-open ones.
Every answer is compared with what the same question got alone. Prints latencies and memory; exits 1 on a lost or mixed answer."""

import concurrent.futures
import http.client
import json
import pathlib
import resource
import socket
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

from server import JSON, Server  # noqa: E402

PATH = "/v1/chat/completions"


def body(question: str) -> bytes:
    return json.dumps({"context": "book", "max_tokens": 8, "messages": [{"role": "user", "content": question}]}).encode()


def answer(server: Server, question: str, timeout=600) -> str:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=timeout)
    try:
        while True:
            connection.request("POST", PATH, body(question), JSON)
            response = connection.getresponse()
            data = response.read()
            if response.status not in (429, 503):
                break
            time.sleep(float(response.headers["Retry-After"]))
        assert response.status == 200, data
        return json.loads(data)["choices"][0]["message"]["content"]
    finally:
        connection.close()


def memory(server: Server) -> int:
    for line in pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Health(threading.Thread):
    """Asks /health again and again; how long it took."""

    def __init__(self, server: Server):
        super().__init__()
        self.server, self.stop, self.seconds = server, False, []

    def run(self):
        while not self.stop:
            began = time.monotonic()
            assert self.server.request("GET", "/health")[0] == 200
            self.seconds.append(time.monotonic() - began)
            time.sleep(0.02)


def loaded(server: Server, clients: int, requests: int, expected: dict[str, str]):
    questions = list(expected)
    health = Health(server)
    health.start()
    began, latencies, wrong = time.monotonic(), [], 0

    def one(i: int) -> bool:
        start = time.monotonic()
        got = answer(server, questions[i % len(questions)])
        latencies.append(time.monotonic() - start)
        return got == expected[questions[i % len(questions)]]

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        wrong = sum(not right for right in pool.map(one, range(requests)))
    health.stop = True
    health.join()
    seconds = time.monotonic() - began
    print(f"{clients:5} clients: {requests} answers in {seconds:.1f} s ({requests / seconds:.1f}/s), p50 {percentile(latencies, .5):.2f} s, "
          f"p99 {percentile(latencies, .99):.2f} s; {wrong} wrong; health p99 {1e3 * percentile(health.seconds, .99):.0f} ms; "
          f"{memory(server) / 2**20:.0f} MiB of memory", flush=True)
    if wrong:
        sys.exit(1)


def main() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(prefix="lodestone-load-") as name:
        arguments = ("-m", ROOT / "models" / "pocket", "-a", "squeezed", "--quiet")
        with Server(pathlib.Path(name) / "contexts", *arguments) as server:
            server.upload("book", (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:12000])
            server.wait_for("book", timeout=300)
            names = ("Clara Whitaker", "Hugo Pemberton", "Nora Lindgren", "Silas Crowe", "Jago Trewhitt", "Maren Honeychurch", "Uther Polkinghorne", "Barnaby Fernihough")
            expected = {q: answer(server, q) for q in (f"What is the profession of {n}?" for n in names)}
            print(f"        alone: {memory(server) / 2**20:.0f} MiB of memory", flush=True)
            idle = [socket.create_connection((server.host, server.port)) for _ in range(200)]
            for connection in idle[:100]:
                connection.sendall(b"GET / HTTP/1.1\r\nHo")  # half a head
            slow = [socket.create_connection((server.host, server.port)) for _ in range(20)]
            for connection in slow:  # ask and never read
                data = body(next(iter(expected)))
                connection.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                                   % (PATH.encode(), len(data), data))
            loaded(server, 8, 64, expected)
            loaded(server, 64, 128, expected)
            for connection in idle + slow:
                connection.close()
            loaded(server, 1000, 1000, expected)
            return server.stop()


if __name__ == "__main__":
    sys.exit(main())
