#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills the server with signal 9 at random moments of uploads, indexing and answers. After each restart every document is
whole, with the answers that it gave before, or absent.

usage: serve_kill.py [ROUNDS [SEED]]"""

import http.client
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

from server import Server  # noqa: E402

QUESTIONS = [f"What is the profession of {name}?" for name in ("Clara Whitaker", "Hugo Pemberton")]
ARGUMENTS = ("-m", ROOT / "models" / "pocket", "-a", "squeezed", "-a", "kmeans:probes=8,window=256", "--quiet")


def documents() -> dict[str, str]:
    text = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")
    return {"small": text[:5000], "large": text[:12000], "other": text[6000:14000]}


def answers(server: Server, name: str) -> list[str]:
    return [server.chat(q, context=name, max_tokens=8, attention=a)["choices"][0]["message"]["content"]
            for q in QUESTIONS for a in ("squeezed", "full")]


def busy(server: Server, name: str, ended: threading.Event):
    """Asks until the server goes."""
    while not ended.is_set():
        try:
            server.chat(QUESTIONS[0], context=name, max_tokens=40, attention="full")
        except (OSError, http.client.HTTPException, AssertionError):
            time.sleep(0.02)


def wait_for_a_moment(server: Server, name: str, rng: random.Random) -> dict:
    """On a machine of any speed: within the upload's first third of a second, at a share of the tokens, among the indexes and the file,
    or at the answers behind them. Returns the state that was seen last."""
    kind, share = rng.choice(("upload", "tokens", "tokens", "indexes", "ready")), rng.random()
    end = time.monotonic() + (share / 3 if kind == "upload" else 300)
    while True:
        state = server.json("GET", f"/v1/contexts/{name}")
        far_enough = {"upload": False, "tokens": state["tokens_done"] > share * state["tokens"],
                      "indexes": state.get("step") in ("indexes", "writing"), "ready": False}[kind]
        if far_enough or state["state"] != "reading" or time.monotonic() > end:
            break
        time.sleep(0.005)
    if kind in ("indexes", "ready"):
        time.sleep(rng.random() * rng.choice((0.02, 0.5)))
        state = server.json("GET", f"/v1/contexts/{name}")
    assert state["state"] != "failed", state
    return state


def killed_once(contexts: pathlib.Path, rng: random.Random, expected: dict[str, list[str]]) -> str:
    """What was going on when it was killed."""
    texts = documents()
    with Server(contexts, *ARGUMENTS) as server:
        there = {context["name"] for context in server.json("GET", "/v1/contexts")["data"]}
        name = rng.choice(sorted(texts))
        if name in there:
            server.json("DELETE", f"/v1/contexts/{name}")
        ended = threading.Event()
        asking = threading.Thread(target=busy, args=(server, rng.choice(sorted(texts)), ended))
        asking.start()
        server.upload(name, texts[name])
        state = wait_for_a_moment(server, name, rng)
        server.stop(signal.SIGKILL)
        ended.set()
        asking.join()
    with Server(contexts, *ARGUMENTS) as server:
        listed = server.json("GET", "/v1/contexts")["data"]
        for context in listed:
            assert context["state"] == "ready", context
        for context in listed[:1] if rng.random() < 0.5 else listed:
            got = answers(server, context["name"])
            assert got == expected[context["name"]], (context["name"], got, expected[context["name"]])
        whole = any(context["name"] == name for context in listed)
        assert server.stop() == 0
    extra = [p.name for p in contexts.iterdir() if p.suffix != ".lode" or p.name.startswith(".")]
    assert not extra, extra
    moment = state.get("step") or state["state"]
    return f"{name}: killed while {moment}, {state['tokens_done']} of {state['tokens']} tokens; afterwards {'whole' if whole else 'absent'}"


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    with tempfile.TemporaryDirectory(prefix="lodestone-kill-") as folder:
        contexts = pathlib.Path(folder) / "contexts"
        with Server(contexts, *ARGUMENTS) as server:
            expected = {}
            for name, text in documents().items():
                server.upload(name, text)
                server.wait_for(name, timeout=300)
                expected[name] = answers(server, name)
            assert server.stop() == 0
        for i in range(rounds):
            print(f"{i + 1:3} {killed_once(contexts, rng, expected)}", flush=True)
    print(f"{rounds} kills: every document was whole or absent, and answered as before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
