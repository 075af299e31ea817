#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_llama_server.py MODEL.gguf [--tokens 6000] [--questions 20] [--answer 32] [--threads 2] [-a SPEC]...
                             [--build FOLDER] [--llama-server PROGRAM] [--lodestone PROGRAM] [--only NAME] [--json FILE]

One document and twenty questions about it, by `lodestone serve` and by llama.cpp's server, on the same GGUF file. Both get the same
requests of OpenAI's chat completions: document and question in one message, streamed. Shown are seconds to the first token of the
first question and of those behind it, the same after a restart of the server, and tokens per second of the answers. llama.cpp keeps a
prompt in memory while it runs (cache_prompt); over a restart it can be told to save and restore a slot (--slot-save-path), which is a
row of its own. lodestone stores the document when it is uploaded, which is timed, too, and recognises it in the prompt.
llama.cpp is built as bench_llama_cpp.py says."""

import argparse
import http.client
import json
import os
import pathlib
import socket
import statistics
import subprocess
import tempfile
import time

from bench_llama_cpp import build

ROOT = pathlib.Path(__file__).resolve().parent.parent
STARTS_WITHIN = 120


def text_of(lodestone: pathlib.Path, model: pathlib.Path, tokens: int) -> str:
    """The beginning of the shipped document, about so many of the model's tokens long, up to a line's end."""
    text = (ROOT / "demo/document.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        part, output = pathlib.Path(folder) / "part.txt", pathlib.Path(folder) / "part.lode"
        part.write_text(text[:4000], encoding="utf-8")
        subprocess.run([lodestone, "index", "-m", model, "-f", part, "-o", output, "-a", "full", "--quiet"], check=True)
        shown = subprocess.run([lodestone, "inspect", output, "--json"], check=True, capture_output=True, text=True).stdout
    size = int(4000 / json.loads(shown)["tokens"] * tokens)
    return text[: text.rindex("\n", 0, size)]


def questions_of(count: int) -> list[str]:
    lines = (ROOT / "demo/questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(lines[i % len(lines)])["question"] for i in range(count)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Running:
    """A server that has answered /health."""

    def __init__(self, command: list, port: int):
        self.port = port
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([str(part) for part in command], stdout=self.log, stderr=self.log)
        end = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                self.log.seek(0)
                raise SystemExit(f"{command[0]} did not start: {self.log.read()[-2000:].decode(errors='replace')}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def call(self, method: str, path: str, body=None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, body: dict) -> dict:
        """Seconds to the first token, tokens per second behind it, and the answer, of one streamed chat completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        began, times, text, usage = time.monotonic(), [], "", {}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"expected an answer, found {response.status}: {response.read()[:500]!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            piece = (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
            if piece:
                times.append(time.monotonic() - began)
                text += piece
        connection.close()
        tokens = usage["completion_tokens"]
        rate = (tokens - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        return {"first": times[0] if times else time.monotonic() - began, "rate": rate, "tokens": tokens, "text": text,
                "prompt": usage["prompt_tokens"]}


def body_of(text: str, question: str, answer: int, **fields) -> dict:
    return {"messages": [{"role": "user", "content": f"{text}\n\n{question}"}], "max_tokens": answer, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **fields}


def asked(server: Running, text: str, questions: list[str], answer: int, **fields) -> list[dict]:
    return [server.ask(body_of(text, question, answer, **fields)) for question in questions]


def row(name: str, first_run: list[dict], second_run: list[dict], read_seconds: float) -> dict:
    rates = [one["rate"] for one in first_run + second_run if one["rate"] > 0]
    return {"server": name, "read_s": read_seconds, "first_question_s": first_run[0]["first"], "second_question_s": first_run[1]["first"],
            "later_questions_s": statistics.median(one["first"] for one in first_run[1:]),
            "first_after_restart_s": second_run[0]["first"], "second_after_restart_s": second_run[1]["first"],
            "tokens_per_second": statistics.median(rates), "prompt_tokens": first_run[0]["prompt"],
            "answers": [one["text"] for one in first_run], "same_after_restart": [a["text"] == b["text"] for a, b in zip(first_run, second_run)]}


def of_llama(args: argparse.Namespace, text: str, questions: list[str], saved_slot: bool) -> dict:
    program = args.llama_server or build(args.build, "llama-server")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [program, "-m", args.model, "-c", 8192, "-t", args.threads, "-np", 1, "--port", port, "--jinja",
                   "--slot-save-path", folder + "/"]
        with Running(command, port) as server:
            first = asked(server, text, questions, args.answer)
            if saved_slot and server.call("POST", "/slots/0?action=save", {"filename": "slot"})[0] != 200:
                raise SystemExit("llama-server: expected it to save its slot")
        with Running(command, port) as server:
            if saved_slot and server.call("POST", "/slots/0?action=restore", {"filename": "slot"})[0] != 200:
                raise SystemExit("llama-server: expected it to restore its slot")
            second = asked(server, text, questions, args.answer)
    return row("llama.cpp" + (", slot saved and restored" if saved_slot else ""), first, second, 0.0)


def of_lodestone(args: argparse.Namespace, text: str, questions: list[str], spec: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [args.lodestone, "serve", "-m", args.model, "--contexts", folder, "-a", spec, "-t", args.threads, "--port", port, "--quiet"]
        with Running(command, port) as server:
            began = time.monotonic()
            server.call("POST", "/v1/contexts", {"name": "text", "text": text})
            while (state := json.loads(server.call("GET", "/v1/contexts/text")[1]))["state"] == "reading":
                time.sleep(0.02)
            if state["state"] != "ready":
                raise SystemExit(f"lodestone: {state['error']}")
            read_seconds = time.monotonic() - began
            first = asked(server, text, questions, args.answer, attention=spec)
        with Running(command, port) as server:
            second = asked(server, text, questions, args.answer, attention=spec)
    return row(f"lodestone, {spec}", first, second, read_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("-a", dest="attention", action="append", default=[])
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path.home() / ".cache/lodestone/llama.cpp")
    parser.add_argument("--llama-server", type=pathlib.Path)
    parser.add_argument("--lodestone", type=pathlib.Path, default=ROOT / "build/release/lodestone")
    parser.add_argument("--only", choices=["llama.cpp", "lodestone"])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    text, questions = text_of(args.lodestone, args.model, args.tokens), questions_of(args.questions)
    rows = []
    if args.only != "lodestone":
        rows += [of_llama(args, text, questions, saved_slot) for saved_slot in (False, True)]
    if args.only != "llama.cpp":
        rows += [of_lodestone(args, text, questions, spec) for spec in args.attention or ["full", "auto"]]
    columns = {"server": "server", "read_s": "read", "first_question_s": "1st", "second_question_s": "2nd", "later_questions_s": "later",
               "first_after_restart_s": "1st again", "second_after_restart_s": "2nd again", "tokens_per_second": "tokens/s"}
    print("  ".join(f"{head:>{44 if key == 'server' else 9}}" for key, head in columns.items()))
    for one in rows:
        print("  ".join(f"{one[key]:>44}" if key == "server" else f"{one[key]:9.3f}" for key in columns))
    print(f"seconds; a document of about {args.tokens} tokens, {args.questions} questions, answers of at most {args.answer} tokens, "
          f"{args.threads} threads; prompts of {[one['prompt_tokens'] for one in rows]} tokens; load now {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
