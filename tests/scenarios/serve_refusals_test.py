# SPDX-License-Identifier: Apache-2.0
"""What `lodestone serve` answers to requests that it cannot serve: a status and a sentence for each, and it goes on serving."""

import concurrent.futures
import json
import re
import socket
import time
import unittest

from program import TEXT, ProgramTest
from server import JSON, Server

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Who?"}]


def head(line: str, *fields: str, host: str | None = "localhost") -> bytes:
    lines = [line, *([f"Host: {host}"] if host is not None else []), *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def post(path: str, body: bytes, *fields: str) -> bytes:
    return head(f"POST {path} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close",
                *fields) + body


def chat(**fields) -> bytes:
    return post(CHAT, json.dumps({"messages": ASKED, **fields}).encode())


def message(**fields) -> bytes:
    return post("/v1/messages", json.dumps({"messages": ASKED, "max_tokens": 4, **fields}).encode())


def context(**fields) -> bytes:
    return post("/v1/contexts", json.dumps(fields).encode())


def form(body: bytes, kind: str = "multipart/form-data; boundary=b") -> bytes:
    return head("POST /v1/contexts HTTP/1.1", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close") + body


def shaped(schema) -> bytes:
    return chat(context="harbour", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


LONG_LISTS = {f"list {i}": {"type": "array", "items": {"type": "string"}, "maxItems": 1000} for i in range(100)}
PART = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
GET = "GET /v1/models HTTP/1.1"

# What is sent, the status, and what the sentence mentions.
REFUSED = {
    # ---- HTTP. ----
    "no request line": (b"\r\n\r\n\r\n", 400, "HTTP"),
    "noise": (b"\x00\x01\x02\x03\r\n\r\n", 400, "HTTP"),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 60 + b"\r\n\r\n", 400, "HTTP"),
    "no version": (b"GET /\r\nHost: a\r\n\r\n", 400, "HTTP"),
    "version 2": (head("GET / HTTP/2.0"), 505, "HTTP/1.1"),
    "version 0.9": (head("GET / HTTP/0.9"), 505, "HTTP/1.1"),
    "line ends of LF alone": (b"GET / HTTP/1.1\nHost: localhost\n\n", 505, "version"),
    "a blank in the path": (head("GET /a b HTTP/1.1"), 505, "version"),
    "an empty method": (head(" / HTTP/1.1"), 400, "method"),
    "a method of other bytes": (head("G\xc3T / HTTP/1.1"), 400, "method"),
    "an unknown method": (head("BREW /v1/models HTTP/1.1", "Connection: close"), 405, "GET"),
    "a method that a path lacks": (head("DELETE /v1/models HTTP/1.1", "Connection: close"), 405, "GET"),
    "OPTIONS": (head("OPTIONS /v1/chat/completions HTTP/1.1", "Connection: close"), 405, "POST"),
    "TRACE": (head("TRACE / HTTP/1.1", "Connection: close"), 405, "GET"),
    "CONNECT": (head("CONNECT localhost:80 HTTP/1.1"), 400, "target"),
    "PUT of a context": (head("PUT /v1/contexts/a HTTP/1.1", "Connection: close"), 405, "DELETE"),
    "an absolute target": (head("GET http://localhost/ HTTP/1.1"), 400, "target"),
    "a star": (head("OPTIONS * HTTP/1.1"), 400, "target"),
    "no host": (head(GET, host=None), 400, "Host"),
    "two hosts": (head(GET, "Host: localhost"), 400, "host"),
    "a colon that is missing": (head(GET, "X-Odd"), 400, "field"),
    "a blank before the colon": (head(GET, "X-Odd : 1"), 400, "field"),
    "a header without a name": (head(GET, ": 1"), 400, "field"),
    "a NUL in a header": (head(GET, "X-Odd: a\x00b"), 400, "value"),
    "a header of 20 KB": (head(GET, "X-Odd: " + "x" * 20000), 431, "bytes"),
    "headers of 20 KB": (head(GET, *(f"X-{i}: {'x' * 100}" for i in range(200))), 431, "bytes"),
    "a path of 20 KB": (head(f"GET /{'x' * 20000} HTTP/1.1"), 431, "bytes"),
    "a length that is no number": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: ten"), 400, "Content-Length"),
    "a negative length": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: -1"), 400, "Content-Length"),
    "a length beyond 64 bits": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 99999999999999999999999"), 400, "Content-Length"),
    "a length with a sign": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: +5"), 400, "Content-Length"),
    "two lengths": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 5", "Content-Length: 6"), 400, "ontent-"),
    "two equal lengths": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 5", "Content-Length: 5"), 400, "ontent-"),
    "a length and chunks": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 5", "Transfer-Encoding: chunked"), 400, "ransfer-"),
    "chunks and a length": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked", "Content-Length: 5"), 400, "Content-Length"),
    "another transfer encoding": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: gzip"), 501, "chunked"),
    "gzip, chunked": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: gzip, chunked"), 501, "chunked"),
    "chunks in HTTP/1.0": (head(f"POST {CHAT} HTTP/1.0", "Transfer-Encoding: chunked"), 501, "chunked"),
    "a chunk of no size": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked") + b"zz\r\n", 400, "chunk"),
    "a chunk that is too long": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\n", 400, "chunk"),
    "a body where none belongs": (head("GET /health HTTP/1.1", "Content-Length: 100000"), 413, "KiB"),
    "an encoding with a blank before its colon": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding : chunked"), 400, "field"),
    "an encoding that only ends in chunked": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: xchunked"), 501, "chunked"),
    "an encoding twice": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), 400, "ransfer-"),
    "an encoding behind a vertical tab": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: \x0bchunked"), 400, "value"),
    "a length that is a list": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 5, 5"), 400, "Content-Length"),
    "a length in hexadecimal": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 0x5"), 400, "Content-Length"),
    "a chunk whose line ends in LF alone": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked") + b"2\n{}\r\n0\r\n\r\n", 400, "chunk"),
    "a chunk longer than its bytes": (head(f"POST {CHAT} HTTP/1.1", "Transfer-Encoding: chunked") + b"1\r\n{}\r\n0\r\n\r\n", 400, "chunk"),
    "a lone CR in a header": (head(GET, "X-Odd: a\rb"), 400, "line"),
    "a method in lower case": (head("get /health HTTP/1.1", "Connection: close"), 405, "GET"),
    "a body of a terabyte": (head("POST /v1/contexts HTTP/1.1", "Content-Length: 1099511627776"), 413, "MiB"),
    # ---- Who may ask. ----
    "another host": (head(GET, "Connection: close", host="attacker.example"), 403, "--allow-host"),
    "a host that only begins alike": (head(GET, "Connection: close", host="localhost.attacker.example"), 403, "--allow-host"),
    "a host with a user": (head(GET, "Connection: close", host="a@localhost"), 403, "Host"),
    "a host with a path": (head(GET, "Connection: close", host="localhost/x"), 403, "Host"),
    "a port of letters": (head(GET, "Connection: close", host="localhost:80x"), 403, "Host"),
    "an empty host": (head(GET, "Connection: close", host=""), 403, "Host"),
    "another origin": (head(GET, "Connection: close", "Origin: http://attacker.example"), 403, "Origin"),
    "the origin of a file": (head(GET, "Connection: close", "Origin: null"), 403, "Origin"),
    "an origin of another port": (head(GET, "Connection: close", "Origin: http://localhost:1"), 403, "Origin"),
    "a request of another site": (head(GET, "Connection: close", "Sec-Fetch-Site: cross-site"), 403, "site"),
    # ---- Paths. ----
    "nothing there": (head("GET /v1/nothing HTTP/1.1", "Connection: close"), 404, "nothing"),
    "a slash too many": (head("GET //health HTTP/1.1", "Connection: close"), 404, "nothing"),
    "a way out of the folder": (head("GET /v1/contexts/../../etc/passwd HTTP/1.1", "Connection: close"), 404, "nothing"),
    "an encoded way out": (head("GET /v1/contexts/..%2f..%2fetc%2fpasswd HTTP/1.1", "Connection: close"), 404, "context"),
    "an encoded way out, text": (head("GET /v1/contexts/..%2f..%2fetc%2fpasswd/text HTTP/1.1", "Connection: close"), 404, "context"),
    "a way out encoded twice": (head("GET /v1/contexts/%252e%252e%252fx HTTP/1.1", "Connection: close"), 404, "context"),
    "a way out with backslashes": (head("GET /v1/contexts/..%5c..%5cx HTTP/1.1", "Connection: close"), 404, "context"),
    "a way out from the root": (head("GET /../../etc/passwd HTTP/1.1", "Connection: close"), 404, "nothing"),
    "encoded dots": (head("GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1", "Connection: close"), 404, "nothing"),
    "a file of the folder": (head("GET /v1/contexts/harbour.lode HTTP/1.1", "Connection: close"), 404, "context"),
    "line ends in a path": (head("GET /v1/contexts/a%0d%0aX-Odd:%201 HTTP/1.1", "Connection: close"), 404, "context"),
    "a NUL in a name": (head("GET /v1/contexts/a%00b HTTP/1.1", "Connection: close"), 404, "context"),
    "a percent that ends early": (head("GET /v1/contexts/a%2 HTTP/1.1", "Connection: close"), 400, "%"),
    "a percent without digits": (head("GET /v1/contexts/a%zz HTTP/1.1", "Connection: close"), 400, "%"),
    "the deletion of a way out": (head("DELETE /v1/contexts/..%2fx HTTP/1.1", "Connection: close"), 404, "context"),
    "an unknown model": (head("GET /v1/models/other HTTP/1.1", "Connection: close"), 404, "model"),
    # ---- JSON. ----
    "no content type": (head(f"POST {CHAT} HTTP/1.1", "Content-Length: 2", "Connection: close") + b"{}", 415, "application/json"),
    "a form": (head(f"POST {CHAT} HTTP/1.1", "Content-Type: application/x-www-form-urlencoded", "Content-Length: 2", "Connection: close") + b"{}", 415, "application/json"),
    "an empty body": (post(CHAT, b""), 400, "JSON"),
    "half an object": (post(CHAT, b'{"messages": ['), 400, "JSON"),
    "two objects": (post(CHAT, b"{} {}"), 400, "JSON"),
    "a list": (post(CHAT, b"[]"), 400, "object"),
    "a key twice": (post(CHAT, b'{"n": 1, "n": 2}'), 400, "twice"),
    "a NUL": (post(CHAT, b'{"n": 1}\x00'), 400, "NUL"),
    "invalid UTF-8": (post(CHAT, b'{"user": "\xff"}'), 400, "JSON"),
    "half a surrogate pair": (post(CHAT, b'{"user": "\\ud800"}'), 400, "JSON"),
    "100,000 brackets": (post(CHAT, b"[" * 100000), 400, "deep"),
    "NaN": (post(CHAT, b'{"temperature": NaN}'), 400, "JSON"),
    "a number of 400 digits": (post(CHAT, b'{"messages": [], "seed": ' + b"9" * 400 + b"}"), 400, "JSON"),
    # ---- Chat completions. ----
    "no messages": (post(CHAT, b"{}"), 400, "messages"),
    "messages of none": (chat(messages=[]), 400, "found an empty list"),
    "messages that are a string": (chat(messages="hello"), 400, "messages"),
    "a message that is a string": (chat(messages=["hello"]), 400, "messages[0]"),
    "a role that is missing": (chat(messages=[{"content": "a"}]), 400, "role"),
    "an unknown role": (chat(messages=[{"role": "tool", "content": "a"}]), 400, "role"),
    "no content": (chat(messages=[{"role": "user"}]), 400, "content"),
    "content that is a number": (chat(messages=[{"role": "user", "content": 7}]), 400, "content"),
    "an empty question": (chat(messages=[*ASKED[:-1], {"role": "user", "content": ""}]), 400, "found an empty text"),
    "a question of blanks": (chat(context="harbour", messages=[{"role": "user", "content": " \n"}]), 400, "found an empty text"),
    "an image": (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400, "text"),
    "a part without text": (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "text"),
    "the assistant's word last": (chat(messages=[*ASKED, {"role": "assistant", "content": "a"}]), 400, "user"),
    "an unknown field": (chat(contex="harbour"), 400, "context"),
    "an unknown model to ask": (chat(model="gpt-5"), 404, "gpt-5"),
    "an unknown context": (chat(context="nobody"), 404, "nobody"),
    "a context that is a path": (chat(context="../../etc/passwd"), 404, "context"),
    "a context that is a number": (chat(context=7), 400, "context"),
    "an empty context": (chat(context=""), 400, "context"),
    "two contexts": (chat(context="a", cachedContent="b"), 400, "cachedContent"),
    "an unknown method of attention": (chat(context="harbour", attention="magic"), 400, "attention"),
    "a key of a method": (chat(context="harbour", attention="kmeans:probs=4"), 400, "probs"),
    "a value out of range": (chat(context="harbour", attention="kmeans:probes=-4"), 400, "probes"),
    "a method that names a file": (chat(context="harbour", attention="saap:weights=/etc/passwd"), 400, "file"),
    "a plan": (chat(context="harbour", attention="plan:/etc/passwd"), 400, "file"),
    "sparse attention without a context": (chat(attention="kmeans"), 400, "context"),
    "a number for a model": (chat(model=7), 400, "model"),
    "a number for a method": (chat(context="harbour", attention=7), 400, "attention"),
    "a list of methods": (chat(context="harbour", attention=["full"]), 400, "attention"),
    "a Gemini context that is a number": (chat(cachedContent=7), 400, "cachedContent"),
    "a Gemini context without a name": (chat(cachedContent="cachedContents/"), 400, "cachedContent"),
    "a message of a tool's calls": (chat(messages=[{"role": "assistant", "content": "a", "tool_calls": [{}]}, *ASKED]), 400, "tool_calls"),
    "content of no parts": (chat(messages=[{"role": "user", "content": []}]), 400, "content"),
    "a part that is a string": (chat(messages=[{"role": "user", "content": ["a"]}]), 400, "content[0]"),
    "a document without a source": (chat(messages=[{"role": "user", "content": [{"type": "document"}]}]), 400, "source"),
    "a document by its address": (chat(messages=[{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://a"}}]}]), 400, "/v1/contexts"),
    "exact that is a word": (chat(exact="yes"), 400, "exact"),
    "sources that are a word": (chat(sources="no"), 400, "sources"),
    "a hot temperature": (chat(temperature=3), 400, "temperature"),
    "a cold temperature": (chat(temperature=-0.1), 400, "temperature"),
    "a temperature that is a word": (chat(temperature="hot"), 400, "temperature"),
    "top_p above 1": (chat(top_p=1.5), 400, "top_p"),
    "a negative top_k": (chat(top_k=-1), 400, "top_k"),
    "min_p above 1": (chat(min_p=1.5), 400, "min_p"),
    "half a seed": (chat(seed=0.5), 400, "seed"),
    "a seed of words": (chat(seed="seven"), 400, "seed"),
    "no choices": (chat(n=0), 400, "'n'"),
    "too many choices": (chat(n=1000), 400, "'n'"),
    "no tokens": (chat(max_tokens=0), 400, "max_tokens"),
    "no completion tokens": (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    "half a token": (chat(max_tokens=1.5), 400, "max_tokens"),
    "tokens beyond 64 bits": (post(CHAT, b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 18446744073709551615}'), 400, "max_tokens"),
    "stops of numbers": (chat(stop=[1]), 400, "stop"),
    "too many stops": (chat(stop=["a"] * 100), 400, "stop"),
    "stream that is a number": (chat(stream=1), 400, "stream"),
    "stream options that are a list": (chat(stream=True, stream_options=[]), 400, "stream_options"),
    "usage that is a word": (chat(stream=True, stream_options={"include_usage": "yes"}), 400, "include_usage"),
    "functions": (chat(functions=[{"name": "f"}]), 400, "functions"),
    "top log probabilities": (chat(top_logprobs=3), 400, "top_logprobs"),
    "another penalty": (chat(frequency_penalty=1), 400, "frequency_penalty"),
    "a penalty that is a word": (chat(frequency_penalty="high"), 400, "frequency_penalty"),
    "a format that is a word": (chat(response_format="json"), 400, "response_format"),
    "tools": (chat(tools=[{"type": "function"}]), 400, "tools"),
    "log probabilities": (chat(logprobs=True), 400, "logprobs"),
    "a penalty": (chat(presence_penalty=0.5), 400, "presence_penalty"),
    "a bias": (chat(logit_bias={"50256": -100}), 400, "logit_bias"),
    "an unknown format": (chat(response_format={"type": "xml"}), 400, "response_format"),
    "a schema that is missing": (chat(response_format={"type": "json_schema", "json_schema": {}}), 400, "schema"),
    "a schema that is a list": (chat(response_format={"type": "json_schema", "json_schema": {"schema": []}}), 400, "schema"),
    "a keyword that is not supported": (shaped({"type": "string", "pattern": "a+"}), 400, "pattern"),
    "a reference to nowhere": (shaped({"$ref": "#/$defs/none"}), 400, "$ref"),
    "a schema that refers to itself alone": (shaped({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), 400, "$ref"),
    "a schema whose choice is itself": (shaped({"anyOf": [{"$ref": "#"}]}), 400, "never ends"),
    "a schema without an end": (shaped({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), 400, "never ends"),
    "a constraint beside a choice": (shaped({"anyOf": [{}], "required": ["a"]}), 400, "anyOf"),
    "required properties that are not there": (shaped({"type": "object", "required": ["a"]}), 400, "required"),
    "members of a type": (shaped({"type": "object", "additionalProperties": {"type": "integer"}}), 400, "additionalProperties"),
    "no value of its type": (shaped({"type": "string", "enum": [1]}), 400, "type"),
    "a constant of a megabyte": (shaped({"const": "a" * (1 << 20)}), 400, "smaller"),
    "a schema of many members": (shaped({"properties": {str(i): {} for i in range(2000)}}), 400, "members"),
    "a schema in a crowd": (chat(context="harbour", metadata={str(i): 1 for i in range(2000)}, response_format={"type": "json_schema", "json_schema": {"schema": {}}}), 400, "members"),
    "schemas deep in each other": (shaped({"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(500)} | {"500": {}}}), 400, "deep"),
    "a million items": (shaped({"type": "array", "minItems": 1000000}), 400, "minItems"),
    "a schema of a hundred long lists": (shaped({"type": "object", "properties": LONG_LISTS}), 400, "smaller"),
    "a key of auto": (chat(context="harbour", attention="auto:speed=1"), 400, "speed"),
    "a value of auto": (chat(context="harbour", attention="auto:error=-1"), 400, "error"),
    "an effort that nobody knows": (chat(reasoning_effort="much"), 400, "reasoning_effort"),
    "two efforts": (chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}), 400, "'reasoning_effort': expected the same"),
    "an effort of no thoughts": (chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}), 400, "reasoning_effort"),
    "fewer than no thoughts": (chat(thinking_token_budget=-1), 400, "thinking_token_budget"),
    # ---- Messages. ----
    "another output": (message(output_config={"format": {"type": "xml"}}), 400, "output_config"),
    "an output that is a word": (message(output_config="json"), 400, "output_config"),
    "an odd field of the output": (message(output_config={"shape": {}}), 400, "output_config.shape"),
    "an output without a schema": (message(output_config={"format": {"type": "json_schema"}}), 400, "schema"),
    "a stop sequence that is a number": (message(stop_sequences=[7]), 400, "stop_sequences"),
    "tools of Anthropic": (message(tools=[{"name": "f"}]), 400, "tools"),
    "OpenAI's name for the length": (message(max_completion_tokens=4), 400, "max_completion_tokens"),
    "no tokens of a message": (message(max_tokens=0), 400, "max_tokens"),
    "a seed in a message": (message(seed=1), 400, "seed"),
    "no max_tokens": (post("/v1/messages", json.dumps({"messages": ASKED}).encode()), 400, "max_tokens"),
    "a temperature above Anthropic's": (message(temperature=1.5), 400, "temperature"),
    "thinking": (message(thinking={"type": "always"}), 400, "thinking"),
    "budget of all tokens": (message(thinking={"type": "enabled", "budget_tokens": 64}, max_tokens=64), 400, "less than max_tokens"),
    "budget of no thoughts": (message(thinking={"type": "disabled", "budget_tokens": 8}), 400, "budget_tokens"),
    "effort of messages": (message(output_config={"effort": "much"}), 400, "effort"),
    "a system that is a number": (message(system=7), 400, "system"),
    "a PDF in base64": (message(messages=[{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": ""}}]}]), 400, "/v1/contexts"),
    # ---- Contexts. ----
    "a context without text": (context(name="a"), 400, "text"),
    "a context of blanks": (context(name="a", text=" \n"), 400, "text"),
    "a name that is a path": (context(name="../a", text="x"), 400, "name"),
    "a name that begins with a dot": (context(name=".a", text="x"), 400, "name"),
    "a name of 200 letters": (context(name="a" * 200, text="x"), 400, "name"),
    "a name with a slash": (context(name="a/b", text="x"), 400, "name"),
    "a name that is taken": (context(name="harbour", text="x"), 409, "harbour"),
    "a model that is not there": (context(name="a", text="x", model="b"), 404, "model"),
    "a ttl of nothing": (context(name="a", text="x", ttl=0), 400, "ttl"),
    "a ttl of words": (context(name="a", text="x", ttl="soon"), 400, "ttl"),
    "a negative ttl": (context(name="a", text="x", ttl="-5s"), 400, "ttl"),
    "a text that is a number": (context(name="a", text=7), 400, "text"),
    "a name that is a number": (context(name=7, text="x"), 400, "name"),
    "a title that is a list": (context(name="a", text="x", title=["a"]), 400, "title"),
    "methods that are numbers": (context(name="a", text="x", attention=[1]), 400, "attention"),
    "too many methods": (context(name="a", text="x", attention=["full"] * 17), 400, "attention"),
    "a method for a context": (context(name="a", text="x", attention="magic"), 400, "attention"),
    "a path of a context": (context(name="a", text="x", path="/etc/passwd"), 400, "path"),
    "a form without a boundary": (form(b"x", "multipart/form-data"), 400, "boundary"),
    "a form that begins otherwise": (form(b"hello"), 400, "boundary"),
    "a form without an end": (form(PART % (b"file", b"x")), 400, "boundary"),
    "a part without a name": (form(b"--b\r\nContent-Type: text/plain\r\n\r\nx\r\n--b--\r\n"), 400, "name"),
    "a part without an end of headers": (form(b"--b\r\nX: y" + b"z" * 5000), 400, "headers"),
    "a form without a file": (form(PART % (b"name", b"x") + b"--b--\r\n"), 400, "file"),
    "a form with two files": (form(PART % (b"file", b"x") + PART % (b"file", b"y") + b"--b--\r\n"), 400, "two"),
    "a form with two names": (form(PART % (b"name", b"x") + PART % (b"name", b"y") + PART % (b"file", b"z") + b"--b--\r\n"), 400, "two"),
    "a form's name that is no UTF-8": (form(PART % (b"name", b"\xff") + PART % (b"file", b"z") + b"--b--\r\n"), 400, "UTF-8"),
    "a form's ttl of words": (form(PART % (b"ttl", b"soon") + PART % (b"file", b"z") + b"--b--\r\n"), 400, "ttl"),
    "a form with an odd part": (form(PART % (b"path", b"/etc/passwd") + b"--b--\r\n"), 400, "path"),
    "a form with an empty file": (form(PART % (b"file", b"") + b"--b--\r\n"), 400, "empty"),
    "a form with many parts": (form(PART % (b"name", b"x") * 40 + b"--b--\r\n"), 400, "32"),
}


class Refusals(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.contexts = cls.folder / "contexts"
        cls.server = Server(cls.contexts, "-m", cls.model, "-a", "kmeans:clusters=4,probes=2,window=32", "--quiet")
        cls.addClassCleanup(cls.server.__exit__)
        cls.server.upload("harbour", TEXT * 5)
        cls.server.wait_for("harbour")

    def test_each_has_its_status_and_sentence(self):
        self.assertGreaterEqual(len(REFUSED), 80)
        for what, (data, status, mention) in REFUSED.items():
            with self.subTest(what):
                reply = self.server.raw(data)
                self.assertRegex(reply[:20], rb"\AHTTP/1.1 \d{3} ", reply[:200])
                self.assertEqual(int(reply[9:12]), status, reply[:600])
                body = json.loads(reply.split(b"\r\n\r\n", 1)[1])
                sentence = body["error"]["message"]
                self.assertIn(mention, sentence)
                self.assertLess(len(sentence), 700)
                self.assertNotIn(str(self.folder), sentence)
        self.assertEqual(self.server.json("GET", "/health"), {"status": "ok"})
        self.assertEqual([p.name for p in self.contexts.iterdir()], ["harbour.lode"])

    def test_errors_have_the_shape_of_their_protocol(self):
        openai = json.loads(self.server.raw(chat(n=0)).split(b"\r\n\r\n", 1)[1])
        self.assertEqual(set(openai["error"]), {"message", "type", "param", "code"})
        anthropic = json.loads(self.server.raw(message(temperature=7)).split(b"\r\n\r\n", 1)[1])
        self.assertEqual((anthropic["type"], anthropic["error"]["type"]), ("error", "invalid_request_error"))
        limits = self.server.raw(head("GET /v1/messages HTTP/1.1", "Connection: close"))
        self.assertIn(b"Allow: POST", limits)

    def test_requests_behind_each_other_on_one_connection(self):
        one = head("GET /health HTTP/1.1")
        last = head("GET /health HTTP/1.1", "Connection: close")
        replies = self.server.raw(one * 5 + last)
        self.assertEqual(len(re.findall(rb"HTTP/1.1 200 OK", replies)), 6)

    def test_a_body_that_is_invited(self):
        body = json.dumps({"messages": ASKED, "max_tokens": 1, "context": "harbour"}).encode()
        data = head(f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(body)}",
                    "Expect: 100-continue", "Connection: close")
        with socket.create_connection((self.server.host, self.server.port), timeout=30) as connection:
            connection.sendall(data)
            self.assertTrue(connection.recv(100).startswith(b"HTTP/1.1 100"))
            connection.sendall(body)
            self.assertTrue(connection.recv(100).startswith(b"HTTP/1.1 200"))

    def test_a_body_in_chunks(self):
        body = json.dumps({"messages": ASKED, "max_tokens": 1, "context": "harbour"}).encode()
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:7], body[7:])) + b"0\r\n\r\n"
        reply = self.server.raw(head(f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", "Transfer-Encoding: chunked",
                                     "Connection: close") + chunks)
        self.assertTrue(reply.startswith(b"HTTP/1.1 200"), reply[:300])


class SlowClients(ProgramTest):
    """They cost a connection each, for as long as the limits say, and nobody else waits."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = Server(cls.folder / "contexts", "-m", cls.model, "-a", "full", "--quiet", "--max-connections", "40")
        cls.addClassCleanup(cls.server.__exit__)

    def drip(self, data: bytes, seconds: float) -> bytes:
        """A byte a second, and what came back."""
        with socket.create_connection((self.server.host, self.server.port), timeout=1) as connection:
            received = b""
            end = time.monotonic() + seconds
            for i in range(len(data)):
                if time.monotonic() > end:
                    break
                try:
                    connection.sendall(data[i:i + 1])
                    received += connection.recv(65536)
                    self.closed += 1
                    break
                except TimeoutError:
                    continue
                except OSError:
                    self.closed += 1
                    break
            return received

    def test_a_byte_a_second(self):
        self.closed = 0
        head_only = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100
        body = head(f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", "Content-Length: 500") + b"{" * 100
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            slow_head = pool.submit(self.drip, head_only, 25)
            slow_body = pool.submit(self.drip_body, body, 40)
            latencies = []
            for _ in range(20):
                began = time.monotonic()
                self.assertEqual(self.server.json("GET", "/health"), {"status": "ok"})
                latencies.append(time.monotonic() - began)
                time.sleep(0.05)
            self.assertLess(sorted(latencies)[10], 1)
            self.assertEqual(slow_head.result(), b"")
            self.assertEqual(slow_body.result(), b"")
            self.assertEqual(self.closed, 2)

    def drip_body(self, data: bytes, seconds: float) -> bytes:
        at = data.index(b"\r\n\r\n") + 4
        with socket.create_connection((self.server.host, self.server.port), timeout=1) as connection:
            connection.sendall(data[:at])
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try:
                    connection.sendall(b"{")
                    received = connection.recv(65536)
                    self.closed += 1
                    return received
                except TimeoutError:
                    continue
                except OSError:
                    self.closed += 1
                    break
            return b""

    def test_connections_that_say_nothing_and_leave(self):
        idle = [socket.create_connection((self.server.host, self.server.port), timeout=30) for _ in range(30)]
        self.assertEqual(self.server.json("GET", "/health"), {"status": "ok"})
        more = [socket.create_connection((self.server.host, self.server.port), timeout=30) for _ in range(20)]
        refused = [c for c in more if self.first_bytes(c).startswith(b"HTTP/1.1 503")]
        self.assertGreaterEqual(len(refused), 5)
        for connection in idle + more:
            connection.close()
        end = time.monotonic() + 20
        while True:  # as they are seen to have gone, there is room again
            try:
                self.assertEqual(self.server.request("GET", "/health")[0], 200)
                break
            except (AssertionError, OSError):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.1)

    @staticmethod
    def first_bytes(connection) -> bytes:
        connection.settimeout(0.5)
        try:
            return connection.recv(100)
        except OSError:
            return b""

    def test_a_client_that_goes_ends_its_answer(self):
        self.server.upload("book", TEXT * 20)
        self.server.wait_for("book")
        body = json.dumps({"messages": ASKED, "context": "book", "max_tokens": 3000, "stream": True}).encode()
        request = head(f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(body)}") + body
        connections = []
        for _ in range(6):
            connections.append(socket.create_connection((self.server.host, self.server.port), timeout=30))
            connections[-1].sendall(request)
        connections[0].recv(100)
        for connection in connections:
            connection.close()
        end = time.monotonic() + 30
        while True:
            metrics = self.server.request("GET", "/metrics")[2].decode()
            busy = sum(int(n) for n in re.findall(r"^vllm:num_requests_(?:running|waiting) (\d+)", metrics, re.M))
            if busy == 0:
                break
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)


if __name__ == "__main__":
    unittest.main()
