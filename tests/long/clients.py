#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The real clients, unchanged, against the server with the shipped model. Run it with a Python that has them:
  python3 -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic mcp llm && /tmp/clients/bin/python tests/long/clients.py"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

from program import PROGRAM  # noqa: E402
from server import Server  # noqa: E402

QUESTION = "What is the profession of Clara Whitaker?"
KEY = "a-key-for-clients-0123456789"


def check(condition, what: str):
    print(("ok   " if condition else "FAIL ") + what, flush=True)
    if not condition:
        sys.exit(1)


def with_openai(server: Server, text: str):
    import openai
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY)
    check([m.id for m in client.models.list()] == ["pocket"], f"openai {openai.__version__}: models")
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model="pocket", messages=messages, extra_body={"context": "book"}, max_tokens=20)
    check(whole.choices[0].message.content == "bookbinder", "openai: an answer from a named context")
    check(whole.usage.prompt_tokens_details.cached_tokens > 3000, "openai: cached_tokens")
    check(whole.model_extra["lodestone"]["reuse"]["how"] == "named", "openai: lodestone.reuse")
    stream = client.chat.completions.create(model="pocket", messages=[{"role": "system", "content": text}, *messages], stream=True,
                                            stream_options={"include_usage": True}, max_completion_tokens=20)
    chunks = list(stream)
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check(content == "bookbinder", "openai: a stream, of a document recognised in the prompt")
    check(chunks[-1].usage.prompt_tokens_details.cached_tokens > 3000, "openai: usage of the stream")
    schema = {"type": "object", "properties": {"profession": {"type": "string", "maxLength": 30}, "sure": {"type": "boolean"}},
              "required": ["profession", "sure"], "additionalProperties": False}
    shaped = client.chat.completions.create(
        model="pocket", messages=messages, extra_body={"context": "book"}, max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}})
    value = json.loads(shaped.choices[0].message.content)
    check(set(value) == {"profession", "sure"} and isinstance(value["sure"], bool), f"openai: a JSON schema: {value}")
    try:
        client.chat.completions.create(model="other", messages=messages)
        check(False, "openai: an unknown model is refused")
    except openai.NotFoundError as error:
        check(error.code == "model_not_found", "openai: errors are its own")
    try:
        openai.OpenAI(base_url=client.base_url, api_key="wrong-key-wrong-key").models.list()
        check(False, "openai: a wrong key is refused")
    except openai.AuthenticationError:
        check(True, "openai: a wrong key is refused")


def with_anthropic(server: Server, text: str):
    import anthropic
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=KEY)
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}, "citations": {"enabled": True}}
    messages = [{"role": "user", "content": [document, {"type": "text", "text": QUESTION}]}]
    whole = client.messages.create(model="pocket", max_tokens=20, messages=messages)
    check(whole.content[0].text == "bookbinder", f"anthropic {anthropic.__version__}: an answer")
    check("Clara Whitaker" in whole.content[0].citations[0].cited_text, "anthropic: citations")
    check(whole.usage.cache_read_input_tokens > 3000, "anthropic: cache_read_input_tokens")
    with client.messages.stream(model="pocket", max_tokens=20, messages=messages) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(pieces == final.content[0].text == "bookbinder", "anthropic: a stream")
    check(final.stop_reason == "end_turn" and len(final.content[0].citations) >= 1, "anthropic: its end and citations")


def with_llm(server: Server, folder: pathlib.Path):
    home = folder / "llm"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: pocket\n  model_name: pocket\n  api_base: http://127.0.0.1:{server.port}/v1\n  api_key_name: lodestone\n")
    environment = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": KEY}
    program = pathlib.Path(sys.executable).parent / "llm"
    subprocess.run([program, "keys", "set", "lodestone", "--value", KEY], env=environment, check=True, timeout=60)
    text = (folder / "book.txt").read_text(encoding="utf-8")
    done = subprocess.run([program, "-m", "pocket", "--system", text, QUESTION], env=environment, capture_output=True,
                          encoding="utf-8", timeout=120, check=False)
    check(done.stdout.strip() == "bookbinder", f"llm: the document as system prompt, recognised: {done.stdout!r} {done.stderr[-200:]}")


def as_sent(result) -> dict:
    """Names as the protocol has them: the client's own have changed from one version to the next."""
    return result.model_dump(by_alias=True)


async def with_mcp(contexts: pathlib.Path):
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    parameters = StdioServerParameters(command=str(pathlib.Path(PROGRAM).resolve()), args=["mcp", "--contexts", str(contexts), "--quiet"])
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        started = as_sent(await session.initialize())
        check(started["serverInfo"]["name"] == "lodestone", f"mcp {version('mcp')}: protocol {started['protocolVersion']}")
        tools = as_sent(await session.list_tools())["tools"]
        check([t["name"] for t in tools] == ["list_documents", "ask_document", "find_passages"], "mcp: tools")
        listed = as_sent(await session.call_tool("list_documents", {}))
        check(listed["structuredContent"]["documents"][0]["name"] == "book", "mcp: list_documents")
        asked = as_sent(await session.call_tool("ask_document", {"document": "book", "question": QUESTION}))
        check(asked["structuredContent"]["answer"] == "bookbinder" and not asked["isError"], "mcp: ask_document")
        found = as_sent(await session.call_tool("find_passages", {"document": "book", "query": QUESTION, "count": 3}))
        check("Clara Whitaker" in found["structuredContent"]["passages"][0]["cited_text"], "mcp: find_passages")
        wrong = as_sent(await session.call_tool("ask_document", {"document": "none", "question": QUESTION}))
        check(wrong["isError"], "mcp: a document that is not there")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="lodestone-clients-") as name:
        folder = pathlib.Path(name)
        (folder / "keys").write_text(KEY + "\n")
        text = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:12000]
        (folder / "book.txt").write_text(text, encoding="utf-8")
        contexts = folder / "contexts"
        with Server(contexts, "-m", ROOT / "models" / "pocket", "-a", "kmeans", "--api-key-file", folder / "keys", "--quiet") as server:
            with_key = {"Authorization": f"Bearer {KEY}"}
            server.json("POST", "/v1/contexts", {"name": "book", "text": text}, with_key, expect=202)
            while server.json("GET", "/v1/contexts/book", headers=with_key)["state"] == "reading":
                time.sleep(0.1)
            with_openai(server, text)
            with_anthropic(server, text)
            with_llm(server, folder)
        asyncio.run(with_mcp(contexts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
