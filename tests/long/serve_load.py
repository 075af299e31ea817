#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load on the server with the shipped model. Each part runs alone, in one to four minutes, and exits 1 when something is lost:

serve_load.py crowd [SECONDS]   8, 64 and 1,000 connections beside slow readers and half-open ones, SECONDS (20) each; every answer is
                                compared with the one that `lodestone ask` gives, /health and the memory of the server are watched
serve_load.py shared [ROUNDS [KV-TYPE]]   tokens/s of 1 and of 16 clients that ask one document of 32k tokens by full attention, by turns
serve_load.py scarce            a full disk, no descriptors, bytes that come one a second, a thousand clients that vanish"""

import concurrent.futures
import contextlib
import http.client
import json
import multiprocessing
import pathlib
import resource
import select
import socket
import statistics
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
QUESTIONS = [question.format(name) for question in ("What is the profession of {}?", "Where was {} born?", "What does {} collect?",
                                                    "Which animal does {} keep?") for name in NAMES]
HEALTH_MS, CONNECTION_BYTES, SPARE_BYTES = 100, 64 * 1024, 16 << 20  # spare: the allocator's, of steps of 16 sequences
SLOW, SILENT, HALF_A_HEAD = 20, 100, 100  # clients that are in the way of the others
SHARED_TIMES = 3  # what 16 clients on one document gain at least over one


def say(line: str):
    print(line, flush=True)


def demo_text() -> str:
    return (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")


def body(question: str, tokens=8, **fields) -> bytes:
    return json.dumps({"context": "book", "max_tokens": tokens, "messages": [{"role": "user", "content": question}], **fields}).encode()


def request(data: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        PATH.encode(), len(data), data)


def answer_on(connection: http.client.HTTPConnection, data: bytes) -> dict:
    """Waits and asks again as the server says."""
    while True:
        connection.request("POST", PATH, data, JSON)
        response = connection.getresponse()
        received = response.read()
        if response.status not in (429, 503):
            break
        time.sleep(float(response.headers["Retry-After"]))
    assert response.status == 200, received
    return json.loads(received)


def answer(server: Server, data: bytes, timeout=600) -> dict:
    with contextlib.closing(http.client.HTTPConnection(server.host, server.port, timeout=timeout)) as connection:
        return answer_on(connection, data)


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


class Watch:
    """Asks /health again and again, and looks at the memory of the server: a process, so that clients here do not delay it."""

    def __init__(self, server: Server):
        self.server, self.most_memory, self.seconds = server, 0, []
        self.pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self.look, args=(there,), daemon=True)

    def look(self, pipe):
        seconds, most = [], 0
        while not pipe.poll(0.05):
            began = time.monotonic()
            status = self.server.request("GET", "/health")[0]
            seconds.append(time.monotonic() - began if status == 200 else float("inf"))
            most = max(most, memory(self.server))
        pipe.recv()
        pipe.send((seconds, most))

    def __enter__(self):
        self.process.start()
        return self

    def __exit__(self, *_):
        self.pipe.send("end")
        self.seconds, self.most_memory = self.pipe.recv()  # EOFError when /health was not answered
        self.process.join()

    def health_ms(self) -> float:
        return 1e3 * percentile(self.seconds, 0.99)


class InTheWay:
    """Clients that read their stream 64 bytes at a time, that never ask, and that send half a head. Whoever is closed comes again."""

    def __init__(self, server: Server, expected: dict[str, str]):
        self.server, self.expected, self.ended = server, expected, threading.Event()
        self.read, self.wrong, self.closed = 0, [], 0
        self.threads = [threading.Thread(target=self.slow_reader, args=(QUESTIONS[i],)) for i in range(SLOW)]
        self.threads += [threading.Thread(target=self.hold, args=(n, data)) for n, data in
                         ((SILENT, b""), (HALF_A_HEAD, b"POST /v1/messages HTTP/1.1\r\nHo"))]

    def connected(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(600)
        connection.connect((self.server.host, self.server.port))
        return connection

    def slow_reader(self, question: str):
        while not self.ended.is_set():
            with self.connected() as connection:
                connection.sendall(request(body(question, stream=True)))
                received = b""
                while not received.endswith(b"0\r\n\r\n") and not self.ended.is_set():
                    piece = connection.recv(64)
                    if not piece:
                        break
                    received += piece
                    time.sleep(0.1)
            if self.ended.is_set():
                return
            self.read += 1
            if (got := text_of_stream(received)) != self.expected[question]:
                self.wrong.append((question, got))

    def hold(self, count: int, data: bytes):
        held = []
        while not self.ended.wait(0.2):
            there = [one for one in held if not closed_by_the_other(one)]
            self.closed += len(held) - len(there)
            held = there
            while len(held) < count:
                held.append(self.connected())
                held[-1].sendall(data)
        for one in held:
            one.close()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def closed_by_the_other(connection: socket.socket) -> bool:
    """Its answer to half a head, too, comes right before the end."""
    looking = select.poll()
    looking.register(connection, select.POLLIN)
    return bool(looking.poll(0))


def text_of_stream(received: bytes) -> str:
    """Of a stream's bytes, with the marks of its chunks."""
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices"))


class Client:
    """Asks until the time is over; every other one keeps its connection."""

    def __init__(self, server: Server, number: int, expected: dict[str, str], end: float):
        self.question, self.keeps = QUESTIONS[number % len(QUESTIONS)], number % 2 == 1
        self.server, self.expected, self.end = server, expected, end
        self.latencies, self.wrong, self.lost = [], [], []

    def run(self):
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=600)
        while True:
            began = time.monotonic()
            try:
                got = text_of(answer_on(connection, body(self.question)))
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.lost.append(repr(error))
                connection.close()
            else:
                self.latencies.append(time.monotonic() - began)
                if got != self.expected[self.question]:
                    self.wrong.append((self.question, got))
            if not self.keeps:
                connection.close()
            if time.monotonic() > self.end:
                return connection.close()


def loaded(server: Server, count: int, seconds: float, expected: dict[str, str], before: int, room: int) -> bool:
    """So many clients are connected at once and ask until the time is over."""
    began = time.monotonic()
    clients = [Client(server, i, expected, began + seconds) for i in range(count)]
    with Watch(server) as watch, concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(Client.run, clients))
    taken = time.monotonic() - began
    latencies = [one for client in clients for one in client.latencies]
    wrong, lost = [one for client in clients for one in client.wrong], [one for client in clients for one in client.lost]
    growth = max(0, watch.most_memory - before)
    allowed = room + (count + SLOW + SILENT + HALF_A_HEAD) * CONNECTION_BYTES + SPARE_BYTES
    times = ", ".join(f"{name} {percentile(latencies, share):.2f}" for name, share in
                      (("p50", .5), ("p90", .9), ("p99", .99), ("longest", 1))) if latencies else "none"
    say(f"{count:5} clients: {len(latencies)} answers in {taken:.1f} s ({len(latencies) / taken:.1f}/s), seconds to one: {times}; {len(wrong)} wrong, "
        f"{len(lost)} lost; /health p99 {watch.health_ms():.0f} ms of {len(watch.seconds)}; memory grew by {growth / 2**20:.1f} MiB, "
        f"at most {allowed / 2**20:.1f} are allowed")
    for one in wrong[:3] + lost[:3]:
        say(f"      {one}")
    return bool(latencies) and not wrong and not lost and growth <= allowed and watch.health_ms() <= HEALTH_MS


def crowd(seconds=20.0) -> bool:
    with tempfile.TemporaryDirectory(prefix="lodestone-load-") as name:
        contexts = pathlib.Path(name) / "contexts"
        with Server(contexts, "-m", POCKET, "-a", "squeezed", "--quiet", "--queue", "2000") as server:
            server.upload("book", demo_text()[:12000])
            tokens = server.wait_for("book", timeout=300)["tokens"]
            expected = dict(zip(QUESTIONS, asked(contexts / "book.lode", QUESTIONS, "squeezed", 8)))
            differ = [q for q in QUESTIONS if text_of(answer(server, body(q))) != expected[q]]
            say(f"      alone: {len(differ)} of {len(QUESTIONS)} answers ({len(set(expected.values()))} distinct ones) differ from ask's {differ}")
            room = 16 * 64 * (contexts / "book.lode").stat().st_size // tokens  # 64 tokens of question and answer
            before = memory(server)
            with InTheWay(server, expected) as others:
                good = [loaded(server, clients, seconds, expected, before, room) for clients in (8, 64, 1000)]
            say(f"      beside them {SLOW} slow readers had {others.read} answers, {len(others.wrong)} wrong; {SILENT} silent connections and "
                f"{HALF_A_HEAD} with half a head were closed {others.closed} times {others.wrong[:3]}")
            return not differ and all(good) and others.read > 0 and not others.wrong and server.stop() == 0


def shared(rounds=3.0, kv_type="f16") -> bool:
    words, text = demo_text().split(" "), ""
    while len(text) < 112_000:  # about 32k tokens
        text += " ".join(words) + f"\n\nPart {len(text)}.\n\n"
    with tempfile.TemporaryDirectory(prefix="lodestone-load-") as name:
        with Server(pathlib.Path(name) / "contexts", "-m", POCKET, "-a", "full", "--quiet", "--kv-type", kv_type) as server:
            server.upload("book", text[:112_000])
            tokens = server.wait_for("book", timeout=900)["tokens"]

            def one(i: int) -> int:  # JSON and a temperature, so that answers are long; each client asks its own question
                data = body(QUESTIONS[i], 64, seed=i, attention="full", temperature=1.0, response_format={"type": "json_object"})
                return answer(server, data)["usage"]["completion_tokens"]

            def rate(clients: int) -> float:
                began = time.monotonic()
                with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                    generated = sum(pool.map(one, range(clients)))
                return generated / (time.monotonic() - began)

            one(0)
            rates = [(rate(1), rate(16)) for _ in range(int(rounds))]
            alone, together = (statistics.median(column) for column in zip(*rates))
            times = statistics.median(b / a for a, b in rates)
            say(f"one document of {tokens} tokens, {kv_type}, full attention: {alone:.1f} tokens/s for one client, {together:.1f} for 16 ({times:.2f} times; "
                f"at least {SHARED_TIMES} are asked for; medians of {len(rates)} rounds)")
            return server.stop() == 0 and times >= SHARED_TIMES


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
        connection.sendall(request(body(QUESTIONS[i % 32], 64, stream=i % 2 == 0))[:None if i % 3 else 60])
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
    good = parts[part](*(float(value) for value in values[:1]), *values[1:])
    say(f"{part}: {'passed' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
