#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills `index`, `index --append` and `ask` with signal 9 at random moments, on a tiny hybrid of recurrent layers and
attention. After each kill the document is the old one or the new one, whole; the same command then ends as if nothing had
happened; and what is asked of it is answered as before, without reading a token of it again.

usage: hybrid_kill.py [ROUNDS [SEED]]     LODESTONE_PROGRAM names the program (build/release/lodestone otherwise)"""

import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = os.environ.get("LODESTONE_PROGRAM", ROOT / "build" / "release" / "lodestone")
LETTERS = "?.ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
TOKENS, MORE = 10_000, 2_000  # a letter is a token
METHOD = "kmeans:clusters=64,probes=8,window=255"
QUESTIONS = ("WhoIsIt", "WhereWasIt")


def write_model(folder: pathlib.Path) -> None:
    """Qwen3.5's tiny golden with room for a text, and a tokenizer of letters."""
    source = ROOT / "tests" / "golden" / "families" / "qwen35"
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 17
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", folder)
    (folder / "tokenizer.json").write_text(json.dumps({
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"}, "added_tokens": [],
        "model": {"type": "BPE", "unk_token": "?", "vocab": {letter: i for i, letter in enumerate(LETTERS)}, "merges": []}}))


class Trial:
    def __init__(self, folder: pathlib.Path, seed: int):
        self.folder, self.rng = folder, random.Random(seed)
        self.model = folder / "model"
        write_model(self.model)
        self.text, self.more = folder / "text.txt", folder / "more.txt"
        self.text.write_text("".join(self.rng.choices(LETTERS[2:], k=TOKENS)))
        self.more.write_text("".join(self.rng.choices(LETTERS[2:], k=MORE)))
        self.document = folder / "document.lode"
        self.index = ("index", "-m", self.model, "-f", self.text, "-a", METHOD, "-o", self.document, "--quiet", "--kv-type", "f16")
        self.append = ("index", "--append", self.document, "-f", self.more, "--quiet")
        self.ask = ("ask", self.document, *QUESTIONS, "-n", "12", "--json", "--quiet", "--template", "{question}", "-a", METHOD)
        self.seconds: dict[str, float] = {}
        self.question_seconds: list[float] = []

    def done(self, name: str, arguments) -> str:
        began = time.monotonic()
        result = subprocess.run([str(PROGRAM), *map(str, arguments)], text=True, capture_output=True, check=False)
        assert result.returncode == 0, (name, result.stderr)
        self.seconds.setdefault(name, time.monotonic() - began)
        return result.stdout

    def answers(self, tokens: int) -> list[str]:
        """Asked of a process that has just started; the document's tokens are not read again."""
        said = json.loads(self.done("ask", self.ask))["answers"]
        for answer, question in zip(said, QUESTIONS, strict=True):
            assert answer["tokens_reused"] == tokens, answer
            assert answer["tokens_prefilled"] <= len(question) + 2, answer
        self.question_seconds.append(said[1]["prompt_seconds"])
        return [answer["answer"] for answer in said]

    def prepare(self) -> None:
        """What an undisturbed run answers: after the first reading, and after the second."""
        self.done("index", self.index)
        self.before = self.answers(TOKENS)
        shutil.copy(self.document, self.folder / "before.lode")
        self.done("append", self.append)
        self.after = self.answers(TOKENS + MORE)
        assert self.before != self.after, "the texts cannot be told apart"

    def start_over(self, what: str) -> None:
        for path in self.folder.glob("*.lode*"):
            if path.name != "before.lode":
                path.unlink()
        for path in self.folder.glob(".*"):
            path.unlink()
        if what != "index":
            shutil.copy(self.folder / "before.lode", self.document)

    def killed_once(self) -> tuple[str, str]:
        """What was killed, and what stood there afterwards."""
        what = self.rng.choice(("index", "append", "ask"))
        arguments = {"index": self.index, "append": self.append, "ask": self.ask}[what]
        self.start_over(what)
        process = subprocess.Popen([str(PROGRAM), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(self.rng.uniform(0, 1.1 * self.seconds[what]))
        process.kill()
        process.wait()
        if not self.document.exists():
            assert what == "index"
            state = "goes on" if list(self.folder.glob(".*.partial")) else "absent"
        else:
            self.done("verify", ("verify", self.document))
            tokens = json.loads(self.done("inspect", ("inspect", self.document, "--json")))["tokens"]
            assert tokens in ((TOKENS,) if what != "append" else (TOKENS, TOKENS + MORE)), (what, tokens)
            assert self.answers(tokens) == (self.before if tokens == TOKENS else self.after), what
            state = "old" if tokens == TOKENS and what == "append" else "whole"
        if what == "index":
            self.done("again", (*self.index, "--force"))
            assert self.answers(TOKENS) == self.before, "the same command, again"
        elif what == "append" and state == "old":
            self.done("again", self.append)
            assert self.answers(TOKENS + MORE) == self.after, "the same command, again"
        self.start_over("index")
        return what, state


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory(prefix="lodestone-hybrid-") as folder:
        trial = Trial(pathlib.Path(folder), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
        trial.prepare()
        print(f"undisturbed: index {trial.seconds['index']:.2f} s, append {trial.seconds['append']:.2f} s, "
              f"ask {trial.seconds['ask']:.2f} s", flush=True)
        counts: dict[tuple[str, str], int] = {}
        for _ in range(rounds):
            outcome = trial.killed_once()
            counts[outcome] = counts.get(outcome, 0) + 1
        for (what, state), count in sorted(counts.items()):
            print(f"{count:4} times {what} killed: document {state}")
        print(f"{rounds} kills; the second question's first token after {1e3 * statistics.median(trial.question_seconds):.1f} ms "
              f"(median of {len(trial.question_seconds)} restarts), no token of the document read again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
