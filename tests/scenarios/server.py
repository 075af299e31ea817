# SPDX-License-Identifier: Apache-2.0
"""A running `lodestone serve`, and requests to it: well-formed ones, and bytes as they are."""

import errno
import http.client
import json
import re
import signal
import socket
import subprocess
import tempfile
import time

from program import PROGRAM, environment

JSON = {"Content-Type": "application/json"}


class Server:
    """Listens on a free port of 127.0.0.1 until stop() or the end of a `with`."""

    def __init__(self, contexts, *arguments, launcher=(), env=None):
        self.log = tempfile.TemporaryFile(mode="w+b")
        command = [*launcher, PROGRAM, "serve", "--contexts", str(contexts), "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log,
                                        env=environment(env))
        line = self.process.stdout.readline().decode()
        match = re.search(r"listening on http://([\d.]+):(\d+)/", line)
        if not match:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not start: {line!r} {self.log_text()}")
        self.host, self.port = match[1], int(match[2])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
        self.process.stdout.close()
        self.log.close()

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def stop(self, how=signal.SIGTERM, timeout=60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=timeout)

    # ---- Requests. ----
    def request(self, method: str, path: str, body=None, headers=None, timeout=120):
        """(status, headers, bytes). A dict is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            if isinstance(body, dict):
                body, headers = json.dumps(body), {**JSON, **(headers or {})}
            connection.request(method, path, body=body, headers=headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body=None, headers=None, expect=200):
        status, _, data = self.request(method, path, body, headers)
        assert status == expect, f"{method} {path}: {status} {data[:500]!r}"
        return json.loads(data)

    def chat(self, question: str, expect=200, **fields):
        body = {"messages": [{"role": "user", "content": question}], **fields}
        return self.json("POST", "/v1/chat/completions", body, expect=expect)

    def stream(self, path: str, body: dict, headers=None):
        """The events of a stream: (name or None, data as text)."""
        status, _, data = self.request("POST", path, {**body, "stream": True}, headers)
        assert status == 200, f"{status} {data[:500]!r}"
        events = []
        for block in data.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if fields:
                events.append((fields.get("event"), fields.get("data")))
        return events

    def upload(self, name: str, text: str, **fields):
        return self.json("POST", "/v1/contexts", {"name": name, "text": text, **fields}, expect=202)

    def wait_for(self, name: str, state="ready", timeout=60):
        end = time.monotonic() + timeout
        while True:
            context = self.json("GET", f"/v1/contexts/{name}")
            if context["state"] == state:
                return context
            assert context["state"] == "reading" and time.monotonic() < end, context
            time.sleep(0.05)

    def raw(self, data: bytes, timeout=30, shut=False) -> bytes:
        """What the server sends until it closes, for these bytes on a connection."""
        with socket.create_connection((self.host, self.port), timeout=timeout) as connection:
            connection.sendall(data)
            if shut:
                try:
                    connection.shutdown(socket.SHUT_WR)
                except OSError as error:
                    if error.errno != errno.ENOTCONN:  # the server has closed it amid the flood
                        raise
            received = b""
            while True:
                try:
                    piece = connection.recv(65536)
                except ConnectionResetError:
                    break
                if not piece:
                    break
                received += piece
            return received
