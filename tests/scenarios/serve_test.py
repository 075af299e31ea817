# SPDX-License-Identifier: Apache-2.0
"""`lodestone serve` as its clients see it: questions, streams, named documents, restarts, and whoever behaves badly."""

import base64
import concurrent.futures
import hashlib
import json
import os
import random
import resource
import signal
import socket
import time
import unittest

import tiny_model
from program import BAD_INPUT, TEXT, ProgramTest, run
from server import JSON, Server

QUESTION = "Who lit the lamp of the harbour?"
# The window holds question and answer: the server attends to all of these, `ask` to those in the window.
METHOD = "kmeans:clusters=4,probes=2,window=160"
LONG_TEXT = TEXT * 20
KEY = "a-key-of-some-length-0123456789"


class ServeTest(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.contexts = cls.folder / "contexts"
        # Float32 keys: the server attends to the question's rows apart from the document's, which rounds otherwise than `ask`.
        cls.server = Server(cls.contexts, "-m", cls.model, "-a", METHOD, "--kv-type", "f32")
        cls.addClassCleanup(cls.server.__exit__)
        cls.server.upload("harbour", LONG_TEXT)
        cls.server.wait_for("harbour")

    def ask(self, question: str, *arguments, tokens=8) -> dict:
        """What `ask` says about the stored document, which the server answers from, too."""
        result = run("ask", self.contexts / "harbour.lode", question, "-n", tokens, "--json", *arguments)
        return self.assert_done(result).json()["answers"][0]


class Questions(ServeTest):
    def test_the_answer_is_that_of_ask(self):
        # Nothing was measured when the text was indexed: `auto` is full attention, no method the first that it is indexed for.
        for arguments, fields in ([], {}), (["-a", "full"], {"attention": "full"}), (["-a", "auto"], {"attention": "auto"}):
            reply = self.server.chat(QUESTION, context="harbour", max_tokens=8, **fields)
            asked = self.ask(QUESTION, *arguments)
            self.assertEqual(reply["choices"][0]["message"]["content"], asked["answer"])
            self.assertEqual(reply["lodestone"]["attention"], asked["attention"])
            self.assertAlmostEqual(reply["lodestone"]["density"], asked["density"])
            self.assertEqual(reply["usage"]["prompt_tokens_details"]["cached_tokens"], asked["tokens_reused"])
            self.assertEqual(reply["usage"]["completion_tokens"], asked["tokens_generated"])

    def test_a_stream_is_the_whole_in_pieces(self):
        body = {"messages": [{"role": "user", "content": QUESTION}], "context": "harbour", "max_tokens": 12}
        whole = self.server.json("POST", "/v1/chat/completions", body)
        events = self.server.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        self.assertEqual(events[-1], (None, "[DONE]"))
        chunks = [json.loads(data) for _, data in events[:-1]]
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertEqual(chunks[-1]["usage"], whole["usage"])
        pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
        self.assertEqual("".join(pieces), whole["choices"][0]["message"]["content"])
        self.assertEqual(chunks[-2]["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"])
        self.assertEqual(chunks[-2]["lodestone"]["sources"], whole["lodestone"]["sources"])
        self.assertEqual({chunk["model"] for chunk in chunks}, {whole["model"]})
        started = json.loads(self.server.stream("/v1/messages", body)[0][1])
        self.assertEqual(started["message"]["model"], whole["model"])

    def test_messages_in_the_shapes_of_anthropic(self):
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], "context": "harbour",
                "max_tokens": 12, "model": "model"}
        whole = self.server.json("POST", "/v1/messages", body)
        self.assertEqual((whole["type"], whole["role"], whole["content"][0]["type"]), ("message", "assistant", "text"))
        events = self.server.stream("/v1/messages", body)
        names = [name for name, _ in events]
        self.assertEqual(names[:2] + names[-3:], ["message_start", "content_block_start", "content_block_stop",
                                                  "message_delta", "message_stop"])
        deltas = [json.loads(data)["delta"] for name, data in events if name == "content_block_delta"]
        text = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
        self.assertEqual(text, whole["content"][0]["text"])
        self.assertEqual(json.loads(events[-2][1])["usage"], whole["usage"])
        self.assertEqual(json.loads(events[0][1])["message"]["usage"], {**whole["usage"], "output_tokens": 0})
        self.assertEqual(whole["usage"]["cache_read_input_tokens"],
                         self.server.json("GET", "/v1/contexts/harbour")["tokens"])

    def test_a_document_in_the_messages_is_recognised_wherever_it_stands(self):
        named = self.server.chat(QUESTION, context="harbour", max_tokens=8)
        for messages in ([{"role": "user", "content": f"{LONG_TEXT}\n{QUESTION}"}],
                         [{"role": "user", "content": f"{QUESTION}\n\n{LONG_TEXT.strip()}"}],
                         [{"role": "system", "content": LONG_TEXT}, {"role": "user", "content": QUESTION}],
                         [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": LONG_TEXT}},
                                                       {"type": "text", "text": QUESTION}]}]):
            reply = self.server.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8})
            self.assertEqual(reply["lodestone"]["reuse"]["how"], "recognised")
            self.assertEqual(reply["usage"], named["usage"])
            self.assertEqual(reply["choices"][0]["message"], named["choices"][0]["message"])
        other = self.server.chat(LONG_TEXT.replace("widow", "sister") + QUESTION, max_tokens=1)
        self.assertEqual(other["lodestone"]["reuse"]["tokens"], 0)
        self.assertTrue(other["lodestone"]["reuse"]["why"])

    def test_stop_strings_seeds_and_choices(self):
        reply = self.server.chat(QUESTION, context="harbour", max_tokens=8)
        text = reply["choices"][0]["message"]["content"]
        stop = text[len(text) // 2]
        cut = self.server.chat(QUESTION, context="harbour", max_tokens=8, stop=[stop])
        self.assertEqual(cut["choices"][0]["message"]["content"], text[:text.index(stop)].rstrip())
        self.assertEqual(cut["choices"][0]["finish_reason"], "stop")
        several = {"context": "harbour", "max_tokens": 6, "temperature": 1.5, "seed": 7, "n": 3}
        first, second = (self.server.chat(QUESTION, **several)["choices"] for _ in range(2))
        self.assertEqual(first, second)
        self.assertEqual([choice["index"] for choice in first], [0, 1, 2])
        alone = self.server.chat(QUESTION, **{**several, "seed": 9, "n": 1})
        self.assertEqual(alone["choices"][0]["message"], first[2]["message"])

    SCHEMA = {"type": "object", "additionalProperties": False, "required": ["who", "kind", "times", "sure"],
              "properties": {"who": {"type": "string", "maxLength": 12}, "kind": {"enum": ["person", "ship \"Ann\""]},
                             "times": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "sure": {"type": "boolean"}}}

    def test_answers_within_a_schema(self):
        """The model is random: what keeps it in shape is the schema alone."""
        form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": self.SCHEMA}}
        body = {"messages": [{"role": "user", "content": QUESTION}], "context": "harbour", "max_tokens": 400, "response_format": form}
        texts = []
        for fields in ({}, {"temperature": 1.5, "seed": 5}, {"exact": True}, {"attention": "full"}, {"context": ""}):
            fields = {key: value for key, value in {**body, **fields}.items() if value != ""}
            reply = self.server.json("POST", "/v1/chat/completions", fields)
            text = reply["choices"][0]["message"]["content"]
            value = json.loads(text)
            self.assertEqual(list(value), list(self.SCHEMA["properties"]), text)
            self.assertLessEqual(len(value["who"]), 12)
            self.assertIn(value["kind"], self.SCHEMA["properties"]["kind"]["enum"])
            self.assertTrue(all(isinstance(time, int) for time in value["times"]), text)
            self.assertIsInstance(value["sure"], bool)
            self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
            texts.append(text)
        self.assertEqual(texts[2], texts[3])
        events = self.server.stream("/v1/chat/completions", body)
        pieces = [json.loads(data)["choices"][0]["delta"].get("content", "") for _, data in events[:-1]]
        self.assertEqual("".join(pieces), texts[0])
        anything = self.server.chat(QUESTION, context="harbour", max_tokens=5, response_format={"type": "json_object"})
        self.assertTrue(anything["choices"][0]["message"]["content"].startswith("{"))

    def test_sources_can_be_left_out(self):
        with_them, without = (self.server.chat(QUESTION, context="harbour", max_tokens=8, sources=wanted) for wanted in (True, False))
        self.assertEqual(with_them["choices"], without["choices"])
        self.assertTrue(with_them["lodestone"]["sources"])
        self.assertEqual(without["lodestone"]["sources"], [])

    def test_exact_is_full_attention(self):
        exact = self.server.chat(QUESTION, context="harbour", max_tokens=8, exact=True)
        full = self.server.chat(QUESTION, context="harbour", max_tokens=8, attention="full")
        self.assertEqual(exact["choices"], full["choices"])

    def test_many_clients_at_once_get_their_own_answers(self):
        questions = [f"What is number {i} of the lamp?" for i in range(16)]
        expected = [self.ask(question, tokens=6)["answer"] for question in questions[:4]]
        body = [{"context": "harbour", "max_tokens": 6}] * 16
        alone = [self.server.chat(q, **b)["choices"][0]["message"]["content"] for q, b in zip(questions, body)]
        self.assertEqual(alone[:4], expected)
        with concurrent.futures.ThreadPoolExecutor(16) as clients:
            replies = list(clients.map(lambda q: self.server.chat(q, context="harbour", max_tokens=6), questions * 4))
        self.assertEqual([r["choices"][0]["message"]["content"] for r in replies], alone * 4)

    def test_sources_lie_where_they_say(self):
        reply = self.server.chat(QUESTION, context="harbour", max_tokens=4, attention="full")
        for source in reply["lodestone"]["sources"]:
            self.assertEqual(LONG_TEXT[source["start_char_index"]:source["end_char_index"]], source["cited_text"])
            self.assertEqual(LONG_TEXT[:source["start_char_index"]].count("\n") + 1, source["line"])

    def test_models_health_metrics_and_page(self):
        models = self.server.json("GET", "/v1/models")
        self.assertEqual([model["id"] for model in models["data"]], ["model"])
        self.assertEqual(self.server.json("GET", "/v1/models/model")["id"], "model")
        self.assertEqual(self.server.json("GET", "/health"), {"status": "ok"})
        self.server.chat(QUESTION, context="harbour", max_tokens=2)
        metrics = self.server.request("GET", "/metrics")[2].decode()
        for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket", "lodestone:documents 1"):
            self.assertIn(name, metrics)
        status, headers, page = self.server.request("GET", "/")
        self.assertEqual(status, 200)
        policy = headers["content-security-policy"]
        self.assertIn("default-src 'none'", policy)
        script = page[page.index(b"<script>") + len(b"<script>"):page.index(b"</script>")]
        self.assertIn(f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}';", policy)
        self.assertEqual(headers["x-frame-options"], "DENY")
        self.assertNotRegex(page.decode(), r"(src|href)\s*=\s*[\"']?(https?:)?//")
        self.assertEqual(self.server.request("HEAD", "/")[2], b"")

    def test_the_log_names_no_words_of_users(self):
        self.server.chat("a-secret-word", context="harbour", max_tokens=1)
        self.server.request("GET", "/another-secret?and=a-third-secret")
        lines = [json.loads(line) for line in self.server.log_text().splitlines()]
        self.assertTrue(any(line["route"] == "/v1/chat/completions" for line in lines))
        self.assertNotIn("secret", self.server.log_text())


class Conversations(ProgramTest):
    """A model with a chat template: what the server asks is what `ask` and `chat` ask."""

    TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('a late system') }}"
                "{% endif %}<|begin|>{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|begin|>assistant:{% endif %}")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": cls.TEMPLATE}), encoding="utf-8")
        cls.contexts = cls.folder / "contexts"
        cls.contexts.mkdir()
        text = cls.folder / "long.txt"
        text.write_text(LONG_TEXT, encoding="utf-8")
        run("index", "-m", cls.model, "-f", text, "-o", cls.contexts / "indexed.lode", "--kv-type", "f32", "-a", METHOD)
        cls.server = Server(cls.contexts, "-m", cls.model, "-a", METHOD, "--kv-type", "f32", "--quiet")
        cls.addClassCleanup(cls.server.__exit__)
        cls.server.upload("uploaded", LONG_TEXT)
        cls.server.wait_for("uploaded")

    def test_a_document_is_asked_within_its_conversation(self):
        indexed, uploaded = (self.server.json("GET", f"/v1/contexts/{name}") for name in ("indexed", "uploaded"))
        self.assertEqual(indexed["state"], "ready", indexed)
        self.assertEqual(indexed["tokens"], uploaded["tokens"])
        asked = self.assert_done(run("ask", self.contexts / "indexed.lode", QUESTION, "-n", 8, "--json")).json()["answers"][0]
        for name in ("indexed", "uploaded"):
            reply = self.server.chat(QUESTION, context=name, max_tokens=8)
            self.assertEqual(reply["choices"][0]["message"]["content"], asked["answer"])
            self.assertEqual(reply["usage"]["prompt_tokens"], asked["tokens_reused"] + asked["tokens_prefilled"])

    def test_turns_go_on(self):
        talk = self.assert_done(run("chat", self.contexts / "indexed.lode", "-n", 6, "--json", stdin=f"{QUESTION}\nWhen?\n")).json()
        first = talk["turns"][0]["answer"]
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first}, {"role": "user", "content": "When?"}]
        reply = self.server.json("POST", "/v1/chat/completions", {"messages": messages, "context": "indexed", "max_tokens": 6})
        self.assertEqual(reply["choices"][0]["message"]["content"], talk["turns"][1]["answer"])

    def test_a_document_is_recognised_wherever_it_stands(self):
        named = self.server.chat(QUESTION, context="uploaded", max_tokens=8)
        for messages in ([{"role": "user", "content": f"{LONG_TEXT}\n{QUESTION}"}],
                         [{"role": "system", "content": LONG_TEXT}, {"role": "user", "content": QUESTION}]):
            reply = self.server.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8})
            self.assertEqual(reply["lodestone"]["reuse"]["how"], "recognised")
            self.assertEqual(reply["choices"], named["choices"])
        # A document alone, an answer to it, and only then a question.
        messages = [{"role": "user", "content": LONG_TEXT}, {"role": "assistant", "content": "I have read it."},
                    {"role": "user", "content": QUESTION}]
        reply = self.server.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8})
        self.assertEqual(reply["lodestone"]["reuse"]["tokens"], named["lodestone"]["reuse"]["tokens"])

    def test_without_a_document(self):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
        reply = self.server.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 3})
        # "<|begin|>" twice for each message, "<|end|>\n" behind each, and "<|begin|>assistant:".
        self.assertGreater(reply["usage"]["prompt_tokens"], len("Be brief.Who?") + 6)
        late = {"messages": [messages[1], messages[0], messages[1]], "max_tokens": 3}
        error = self.server.json("POST", "/v1/chat/completions", late, expect=400)["error"]["message"]
        self.assertIn("a late system", error)

    def test_a_text_that_the_template_refuses(self):
        model = tiny_model.write(self.folder / "raises")
        (model / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}", encoding="utf-8")
        with Server(self.folder / "none", "-m", model, "--quiet") as server:
            server.upload("a", LONG_TEXT)
            error = str(server.wait_for("a", "failed")["error"])
        self.assertIn("no such role", error)
        self.assertNotIn("chat off", error, "no request has this setting")

    def test_special_tokens_in_messages_are_text(self):
        plain = self.server.chat("<|end|>", context="uploaded", max_tokens=1)
        self.assertGreater(plain["usage"]["prompt_tokens"], self.server.chat("x", context="uploaded", max_tokens=1)["usage"]["prompt_tokens"] + 2)


class Contexts(ServeTest):
    def test_the_life_of_a_context(self):
        posted = self.server.upload("mine", "It was a quiet day. " * 30, attention="full")
        self.assertIn(posted["state"], ("reading", "ready"))
        ready = self.server.wait_for("mine")
        self.assertEqual(ready["tokens"], ready["tokens_done"])
        self.assertEqual(ready["bytes"], (self.contexts / "mine.lode").stat().st_size)
        names = [context["name"] for context in self.server.json("GET", "/v1/contexts")["data"]]
        self.assertEqual(names, sorted(names))
        self.assertIn("mine", names)
        self.assertEqual(self.server.request("GET", "/v1/contexts/mine/text")[2].decode(), "It was a quiet day. " * 30)
        self.server.json("POST", "/v1/contexts", {"name": "mine", "text": "x"}, expect=409)
        self.assertTrue(self.server.json("DELETE", "/v1/contexts/mine")["deleted"])
        self.assertFalse((self.contexts / "mine.lode").exists())
        self.server.json("GET", "/v1/contexts/mine", expect=404)
        self.server.json("DELETE", "/v1/contexts/mine", expect=404)
        self.server.chat(QUESTION, context="mine", expect=404)

    def test_a_file_of_a_form(self):
        body = (b'--x\r\nContent-Disposition: form-data; name="file"; filename="../../etc/My notes.txt"\r\n'
                b"Content-Type: text/plain\r\n\r\n" + TEXT.encode() + b"\r\n--x--\r\n")
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        status, _, data = self.server.request("POST", "/v1/contexts", body, headers)
        self.assertEqual(status, 202, data)
        name = json.loads(data)["name"]
        self.assertRegex(name, r"\A[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
        self.server.wait_for(name)
        self.assertEqual(sorted(path.suffix for path in self.contexts.iterdir()), [".lode"] * len(list(self.contexts.iterdir())))
        again = self.server.json("POST", "/v1/contexts", body, headers, expect=202)["name"]
        self.assertEqual(again, name.replace(".txt", "-2.txt"))
        for taken in (name, again):
            self.server.json("DELETE", f"/v1/contexts/{taken}")

    def test_uploads_without_a_name_get_one_of_their_own(self):
        names = [self.server.json("POST", "/v1/contexts", {"text": TEXT * 20, "wait": True})["name"] for _ in range(3)]
        self.assertEqual(names, ["document", "document-2", "document-3"])
        for name in names:
            self.assertEqual(self.server.request("GET", f"/v1/contexts/{name}/text")[2].decode(), TEXT * 20)
            self.server.json("DELETE", f"/v1/contexts/{name}")

    def test_an_upload_that_waits_is_answered_when_it_is_read(self):
        ready = self.server.json("POST", "/v1/contexts", {"name": "awaited", "text": TEXT * 20, "wait": True})
        self.assertEqual((ready["state"], ready["tokens_done"]), ("ready", ready["tokens"]))
        self.server.chat(QUESTION, context="awaited", max_tokens=1)
        form = (b'--x\r\nContent-Disposition: form-data; name="wait"\r\n\r\ntrue\r\n'
                b'--x\r\nContent-Disposition: form-data; name="file"; filename="broken.pdf"\r\n\r\n%PDF-1.4 no\r\n--x--\r\n')
        for _ in range(2):
            failed = self.server.json("POST", "/v1/contexts", form, {"Content-Type": "multipart/form-data; boundary=x"}, expect=409)
            self.assertIn("cannot be used", failed["error"]["message"])
        self.assertEqual(self.server.request("GET", "/v1/contexts/broken-2.pdf")[0], 404, "one that failed keeps no name")

    def test_an_upload_that_waits_hears_when_it_is_deleted(self):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(self.server.request, "POST", "/v1/contexts", {"name": "gone", "text": TEXT * 200, "wait": True})
            while self.server.request("DELETE", "/v1/contexts/gone")[0] == 404:
                time.sleep(0.01)
            status, _, data = waits.result(timeout=60)
        self.assertEqual(status, 409, data)
        self.assertIn("deleted", json.loads(data)["error"]["message"])

    def test_time_to_live(self):
        self.server.upload("short", TEXT, ttl="2s")
        self.server.wait_for("short")
        end = time.monotonic() + 20
        while self.server.request("GET", "/v1/contexts/short")[0] != 404:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.2)
        self.assertFalse((self.contexts / "short.lode").exists())

    def test_a_folder_that_cannot_be_looked_through_loses_nothing(self):
        pid = self.server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # not one more descriptor
        try:
            (self.contexts / "note.txt").write_text("so that the folder changes")
            time.sleep(2.5)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            (self.contexts / "note.txt").unlink()
        self.assertEqual(self.server.json("GET", "/v1/contexts/harbour")["state"], "ready")
        self.server.upload("later", TEXT)
        self.server.wait_for("later")
        self.server.json("DELETE", "/v1/contexts/later")

    def test_files_that_come_while_it_runs(self):
        self.index("other.lode")
        os.replace(self.folder / "other.lode", self.contexts / "other.lode")
        end = time.monotonic() + 20
        while self.server.request("GET", "/v1/contexts/other")[0] != 200:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)
        self.assertEqual(self.server.json("GET", "/v1/contexts/other")["state"], "ready")
        self.server.json("DELETE", "/v1/contexts/other")


class Restarts(ProgramTest):
    def test_a_restart_answers_without_reading_and_lists_what_is_damaged(self):
        contexts = self.folder / "kept"
        with Server(contexts, "-m", self.model, "-a", METHOD) as server:
            server.upload("book", LONG_TEXT)
            server.wait_for("book")
            before = server.chat(QUESTION, context="book", max_tokens=8)
            self.assertEqual(server.stop(), 0)
        whole = (contexts / "book.lode").read_bytes()
        (contexts / "cut.lode").write_bytes(whole[:len(whole) // 2])
        (contexts / "noise.lode").write_bytes(b"noise" * 1000)
        (contexts / "a name.lode").write_bytes(whole)
        with Server(contexts, "--quiet") as server:  # the model is the context's own
            states = {c["name"]: c for c in server.json("GET", "/v1/contexts")["data"]}
            self.assertEqual(states["book"]["state"], "ready")
            for name in ("cut", "noise", "a name"):
                self.assertEqual(states[name]["state"], "failed")
                self.assertNotIn(str(contexts), states[name]["error"])
            after = server.chat(QUESTION, context="book", max_tokens=8)
            self.assertEqual(after["choices"], before["choices"])
            self.assertEqual(after["usage"], before["usage"])
            server.chat(QUESTION, context="cut", expect=409)

    def test_killed_at_any_moment_a_context_is_whole_or_absent(self):
        contexts = self.folder / "killed"
        rng = random.Random(3)
        for _ in range(4):
            with Server(contexts, "-m", self.model, "-a", METHOD, "--quiet") as server:
                server.upload("one", LONG_TEXT)
                time.sleep(rng.random())
                server.stop(signal.SIGKILL)
            with Server(contexts, "-m", self.model, "--quiet") as server:
                for context in server.json("GET", "/v1/contexts")["data"]:
                    self.assertEqual(context["state"], "ready")
                    self.assertTrue(server.chat(QUESTION, context=context["name"], max_tokens=4)["choices"])
                    server.json("DELETE", f"/v1/contexts/{context['name']}")

    def test_memory_for_documents_is_bounded_and_their_files_stay(self):
        contexts = self.folder / "many"
        with Server(contexts, "-m", self.model, "-a", "full", "--cache-memory", "1KiB", "--quiet") as server:
            for name in ("one", "two", "three"):
                server.upload(name, LONG_TEXT + name)
            for name in ("one", "two", "three"):
                server.wait_for(name)
                server.chat(QUESTION, context=name, max_tokens=2)
            end = time.monotonic() + 20
            while any(c["in_memory"] for c in server.json("GET", "/v1/contexts")["data"]):  # none fits, none is in use
                self.assertLess(time.monotonic(), end)
                time.sleep(0.1)
            self.assertTrue(server.chat(QUESTION, context="one", max_tokens=2)["choices"])


class Access(ProgramTest):
    def test_keys(self):
        keys = self.folder / "keys"
        keys.write_text(f"# of the team\n{KEY}\n")
        with Server(self.folder / "locked", "-m", self.model, "--api-key-file", keys, "--quiet") as server:
            for headers in ({}, {"Authorization": "Bearer wrong-key-wrong-key"}, {"Authorization": KEY},
                            {"x-api-key": KEY + "x"}, {"x-api-key": KEY[:-1]}, {"Authorization": "Bearer "}):
                for path in ("/v1/models", "/metrics", "/v1/contexts", "/nothing"):
                    status, given, body = server.request("GET", path, headers=headers)
                    self.assertEqual((status, given["www-authenticate"]), (401, "Bearer"), (path, headers))
                    self.assertNotIn(KEY.encode(), body)
            for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"bearer {KEY}"}):
                self.assertEqual(server.request("GET", "/v1/models", headers=headers)[0], 200)
            self.assertEqual(server.request("GET", "/health")[0], 200)
            self.assertEqual(server.request("GET", "/")[0], 200)

    def test_other_machines_need_a_key(self):
        for arguments in (["--host", "0.0.0.0"], ["--host", "192.0.2.1"]):
            self.assert_refused(run("serve", "-m", self.model, "--contexts", self.folder / "c", *arguments), "--api-key-file")
        empty = self.folder / "empty"
        for text in ("", "# nothing\n", "short\n"):
            empty.write_text(text)
            self.assert_refused(run("serve", "-m", self.model, "--contexts", self.folder / "c", "--api-key-file", empty),
                                "key")
        self.assert_refused(run("serve", "-m", self.model, "--contexts", self.folder / "c", "--host", "a.name"), "--host")
        self.assert_refused(run("serve", "--contexts", self.folder / "none"), "-m")

    def test_a_port_that_is_taken(self):
        with Server(self.folder / "first", "-m", self.model, "--quiet") as server:
            self.assert_refused(run("serve", "-m", self.model, "--contexts", self.folder / "second", "--port", server.port),
                                str(server.port))


class Stopping(ProgramTest):
    def test_answers_under_way_are_finished(self):
        with Server(self.folder / "stopping", "-m", self.model, "-a", "full", "--quiet") as server:
            server.upload("book", LONG_TEXT)
            server.wait_for("book")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                under_way = pool.submit(server.chat, QUESTION, context="book", max_tokens=60)
                time.sleep(0.2)
                self.assertEqual(server.stop(), 0)
                self.assertTrue(under_way.result()["choices"])

    def test_a_long_reading_does_not_hold_it_up(self):
        with Server(self.folder / "long", "-m", self.model, "-a", "full", "--grace", "1") as server:
            server.upload("book", TEXT * 1800)
            time.sleep(0.5)
            began = time.monotonic()
            self.assertEqual(server.stop(), 0)
            self.assertLess(time.monotonic() - began, 15)
            self.assertIn("1 document still being read is not kept: send it again\n", server.log_text())
        self.assertEqual(list((self.folder / "long").iterdir()), [])


if __name__ == "__main__":
    unittest.main()
