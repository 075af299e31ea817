#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load on the server with the shipped model. Each part runs alone, in one to four minutes, and exits 1 when something is lost:

serve_load.py crowd [SECONDS]   8, 64 and 1,000 connections beside slow readers and half-open ones, SECONDS (20) each; every answer is
                                compared with the one that `lodestone ask` gives, /health and the memory of the server are watched
serve_load.py shared            tokens/s of 1 and of 16 clients that ask one document of 32k tokens by full attention
serve_load.py scarce            a full disk, no descriptors, bytes that come one a second, a thousand clients that vanish"""

import concurrent.futures
import http.client
import json
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

from program import PROGRAM, environment  # noqa: E402
from server import JSON, Server  # noqa: E402

PATH = "/v1/chat/completions"
POCKET = ROOT / "models" / "pocket"
NAMES = ("Clara Whitaker", "Hugo Pemberton", "Nora Lindgren", "Silas Crowe", "Jago Trewhitt", "Maren Honeychurch", "Uther Polkinghorne",
         "Barnaby Fernihough")
QUESTIONS = [f"What is the profession of {name}?" for name in NAMES]
HEALTH_MS, CONNECTION_BYTES, SPARE_BYTES = 100, 64 * 1024, 16 << 20  # spare: the allocator's, of steps of 16 sequences


def say(line: str):
    print(line, flush=True)


def demo_text() -> str:
    return (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")


def body(question: str, tokens=8, **fields) -> bytes:
    return json.dumps({"context": "book", "max_tokens": tokens, "messages": [{"role": "user", "content": question}], **fields}).encode()


def request(data: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        PATH.encode(), len(data), data)


def answer(server: Server, data: bytes, timeout=600) -> dict:
    """Waits and asks again as the server says."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=timeout)
    try:
        while True:
            connection.request("POST", PATH, data, JSON)
            response = connection.getresponse()
            received = response.read()
            if response.status not in (429, 503):
                break
            time.sleep(float(response.headers["Retry-After"]))
        assert response.status == 200, received
        return json.loads(received)
    finally:
        connection.close()


def text_of(reply: dict) -> str:
    return reply["choices"][0]["message"]["content"]


def asked(context: pathlib.Path, questions: list[str], attention: str, tokens: int) -> list[str]:
    """What `lodestone ask` answers."""
    done = subprocess.run([PROGRAM, "ask", context, *questions, "-a", attention, "-n", str(tokens), "--json", "--quiet"],
                          capture_output=True, encoding="utf-8", check=True, env=environment())
    return [one["answer"] for one in json.loads(done.stdout)["answers"]]


def memory(server: Server) -> int:
    for line in pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Watch(threading.Thread):
    """Asks /health again and again, and looks at the memory of the server."""

    def __init__(self, server: Server):
        super().__init__()
        self.server, self.ended, self.seconds, self.most_memory = server, False, [], 0

    def run(self):
        while not self.ended:
            began = time.monotonic()
            assert self.server.request("GET", "/health")[0] == 200
            self.seconds.append(time.monotonic() - began)
            self.most_memory = max(self.most_memory, memory(self.server))
            time.sleep(0.05)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended = True
        self.join()

    def health_ms(self) -> float:
        return 1e3 * percentile(self.seconds, 0.99)


def loaded(server: Server, clients: int, seconds: float, expected: dict[str, str], room: int) -> bool:
    """All clients are connected at once and ask until the time is over."""
    before, latencies, wrong = memory(server), [], []
    end = time.monotonic() + seconds

    def client(i: int):
        question = QUESTIONS[i % len(QUESTIONS)]
        while True:
            began = time.monotonic()
            got = text_of(answer(server, body(question)))
            latencies.append(time.monotonic() - began)
            if got != expected[question]:
                wrong.append((question, got))
            if time.monotonic() > end:
                return

    began = time.monotonic()
    with Watch(server) as watch, concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    taken = time.monotonic() - began
    growth, allowed = max(0, watch.most_memory - before), room + clients * CONNECTION_BYTES + SPARE_BYTES
    say(f"{clients:5} clients: {len(latencies)} answers in {taken:.1f} s ({len(latencies) / taken:.1f}/s), p50 {percentile(latencies, .5):.2f} s, "
        f"p99 {percentile(latencies, .99):.2f} s; {len(wrong)} wrong; /health p99 {watch.health_ms():.0f} ms; memory grew by "
        f"{growth / 2**20:.1f} MiB, at most {allowed / 2**20:.1f} are allowed")
    return not wrong and growth <= allowed and watch.health_ms() <= HEALTH_MS


def crowd(seconds=20.0) -> bool:
    with tempfile.TemporaryDirectory(prefix="lodestone-load-") as name:
        contexts = pathlib.Path(name) / "contexts"
        with Server(contexts, "-m", POCKET, "-a", "squeezed", "--quiet", "--queue", "2000") as server:
            server.upload("book", demo_text()[:12000])
            tokens = server.wait_for("book", timeout=300)["tokens"]
            expected = dict(zip(QUESTIONS, asked(contexts / "book.lode", QUESTIONS, "squeezed", 8)))
            differ = [q for q in QUESTIONS if text_of(answer(server, body(q))) != expected[q]]
            say(f"      alone: {len(differ)} of {len(QUESTIONS)} answers differ from ask's {differ}")
            room = 16 * 64 * (contexts / "book.lode").stat().st_size // tokens  # 64 tokens of question and answer
            idle = [socket.create_connection((server.host, server.port)) for _ in range(200)]
            for connection in idle[:100]:
                connection.sendall(b"GET / HTTP/1.1\r\nHo")  # half a head
            slow = [socket.create_connection((server.host, server.port)) for _ in range(20)]
            for connection in slow:  # they ask for a stream and never read
                connection.sendall(request(body(QUESTIONS[0], stream=True)))
            good = [loaded(server, clients, seconds, expected, room) for clients in (8, 64, 1000)]
            for connection in idle + slow:
                connection.close()
            return not differ and all(good) and server.stop() == 0


def shared() -> bool:
    words, text = demo_text().split(" "), ""
    while len(text) < 126_000:  # about 32k tokens
        text += " ".join(words) + f"\n\nPart {len(text)}.\n\n"
    with tempfile.TemporaryDirectory(prefix="lodestone-load-") as name:
        contexts = pathlib.Path(name) / "contexts"
        with Server(contexts, "-m", POCKET, "-a", "full", "--quiet") as server:
            server.upload("book", text[:126_000])
            tokens = server.wait_for("book", timeout=900)["tokens"]
            rates = {}
            # Seeds and a temperature, so that answers are long; each client asks its own question.
            for clients in (1, 16):
                fields = {"attention": "full", "temperature": 1.0, "stop": []}
                def one(i: int) -> int:
                    data = body(QUESTIONS[i % 8], 64, seed=i, response_format={"type": "json_object"}, **fields)
                    return answer(server, data)["usage"]["completion_tokens"]
                one(0)
                began = time.monotonic()
                with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                    generated = sum(pool.map(one, range(clients)))
                rates[clients] = generated / (time.monotonic() - began)
            say(f"one document of {tokens} tokens, full attention: {rates[1]:.1f} tokens/s for one client, {rates[16]:.1f} for 16 "
                f"({rates[16] / rates[1]:.2f} times)")
            return server.stop() == 0


def limited(server: Server, what: int, value: int):
    resource.prlimit(server.process.pid, what, (value, resource.prlimit(server.process.pid, what)[1]))


def full_disk(server: Server):
    limited(server, resource.RLIMIT_FSIZE, 1 << 20)
    server.upload("nowhere", demo_text()[:6000])
    context = server.wait_for("nowhere", state="failed", timeout=120)
    say(f"  a file that cannot be written whole: {context['error']!r}")
    assert context["error"]
    server.json("DELETE", "/v1/contexts/nowhere")
    limited(server, resource.RLIMIT_FSIZE, resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)[1])


def no_descriptors(server: Server):
    limited(server, resource.RLIMIT_NOFILE, len(list(pathlib.Path(f"/proc/{server.process.pid}/fd").iterdir())) + 8)
    crowded = [socket.create_connection((server.host, server.port)) for _ in range(40)]
    time.sleep(0.5)
    for connection in crowded:
        connection.close()
    assert server.request("GET", "/health")[0] == 200
    limited(server, resource.RLIMIT_NOFILE, resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[1])
    say("  40 connections with 8 descriptors: they wait, and /health answers when they are gone")


def a_byte_a_second(server: Server):
    slow = [socket.create_connection((server.host, server.port)) for _ in range(50)]
    closed, end = 0, time.monotonic() + 25
    data = request(body(QUESTIONS[0]))
    for byte in data:
        for connection in list(slow):
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                slow.remove(connection)
                closed += 1
        if not slow or time.monotonic() > end:
            break
        time.sleep(1)
    say(f"  50 clients that send a byte a second: {closed} closed within 25 s")
    assert closed == 50


def vanishing(server: Server):
    def vanish(i: int):
        connection = socket.create_connection((server.host, server.port))
        connection.sendall(request(body(QUESTIONS[i % 8], 64, stream=i % 2 == 0))[:None if i % 3 else 60])
        if i % 5 == 0:
            connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
        connection.close()

    with Watch(server) as watch, concurrent.futures.ThreadPoolExecutor(50) as pool:
        list(pool.map(vanish, range(1000)))
        end = time.monotonic() + 120
        while b"vllm:num_requests_running 0" not in (text := server.request("GET", "/metrics")[2]) or b"vllm:num_requests_waiting 0" not in text:
            assert time.monotonic() < end, text
            time.sleep(0.2)
    say(f"  1,000 clients that ask and vanish: none is answered any longer, /health p99 {watch.health_ms():.0f} ms")


def scarce() -> bool:
    with tempfile.TemporaryDirectory(prefix="lodestone-load-") as name:
        with Server(pathlib.Path(name) / "contexts", "-m", POCKET, "-a", "squeezed", "--quiet") as server:
            server.upload("book", demo_text()[:12000])
            server.wait_for("book", timeout=300)
            expected = text_of(answer(server, body(QUESTIONS[0])))
            for trial in (full_disk, no_descriptors, a_byte_a_second, vanishing):
                trial(server)
                assert text_of(answer(server, body(QUESTIONS[0]))) == expected, trial.__name__
            return server.stop() == 0


def main() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    part, *values = sys.argv[1:] or ["crowd"]
    parts = {"crowd": crowd, "shared": shared, "scarce": scarce}
    if part not in parts:
        sys.exit(__doc__)
    return 0 if parts[part](*map(float, values)) else 1


if __name__ == "__main__":
    sys.exit(main())
