#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/chat/golden.json: what Jinja makes, set up as transformers does, of every template of
chat/templates with every conversation of chat/conversations.json, and of every snippet of chat/snippets.txt. Run by
hand when one of these changes; needs Debian's python3-jinja2 (3.1)."""
import datetime
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

CHAT = pathlib.Path(__file__).parent / "chat"
NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
GLOBALS = {
    "a": 7, "b": -3, "x": 2.5, "s": " Größe and \"more\"\n", "words": ["pear", "Apple", "fig", "apple"], "empty": [],
    "d": {"one": 1, "two": 2, "ten": {"deep": [1, 2, {"k": "v"}]}, "items": "shadowed"}, "nothing": None, "yes": True,
    "people": [{"name": "Ann", "age": 30, "pet": {"kind": "cat"}}, {"name": "bob", "age": 25}, {"name": "Cy", "age": 30}],
}


class Generation(jinja2.ext.Extension):
    """{% generation %}, as transformers' AssistantTracker parses it."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Raised(Exception):
    """By the template itself."""


def raise_exception(message):
    raise Raised(message)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: NOW.strftime(form)
    return env


def rendered(env, source, variables):
    try:
        return {"text": env.from_string(source).render(**variables)}
    except Raised as error:
        return {"raises": str(error)}
    except Exception as error:  # whatever goes wrong in a template
        return {"error": type(error).__name__}


def main():
    env = environment()
    conversations = json.loads((CHAT / "conversations.json").read_text(encoding="utf-8"))
    golden = {"templates": {}, "snippets": []}
    for path in sorted((CHAT / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        golden["templates"][path.stem] = [
            rendered(env, source, {**SPECIAL, **{k: v for k, v in c.items() if k != "name"}}) for c in conversations]
    for snippet in (CHAT / "snippets.txt").read_text(encoding="utf-8").split("\n====\n"):
        golden["snippets"].append({"source": snippet, **rendered(env, snippet, GLOBALS)})
    golden["globals"] = GLOBALS
    text = json.dumps(golden, ensure_ascii=False, indent=0)
    (CHAT / "golden.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
