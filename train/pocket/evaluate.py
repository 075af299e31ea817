# SPDX-License-Identifier: Apache-2.0
"""Measures an exported model on held-out books, words, names and values.

    python evaluate.py --model models/pocket --build BUILD --out results.json [--tokens 4096 8192] [--tasks needle qa]

Every document is read once with full attention; its questions are then asked separately, greedily, in bfloat16, under
full attention and under a streaming window (sink 1, window 511) for the question's and the answer's tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import export
from documents import Generator, Window
from families import Material, Question, merge
from language import Language, load_tasks
from model import Pocket, attention_backend, linear, rms_norm, rotary, before_attention, after_attention
from tokenizer import BOS

ONE_QUESTION = ("needle", "passkey", "number", "cwe", "fwe")  # a document of these allows no more
STREAMING = (1, 511)


# Samples

@dataclass(slots=True)
class Asked:
    question: list[int]  # header, question and "Answer:"
    answer: list[int]  # without the terminator
    text: str
    values: tuple[str, ...] = ()


@dataclass(slots=True)
class Exam:
    task: str
    tokens: int
    context: np.ndarray  # (T,) uint16, BOS first
    asked: list[Asked] = field(default_factory=list)


class Examiner:
    """Makes evaluation documents by the parameters in tasks.json."""

    def __init__(self, build: Path, seed: int, new_wordings: bool = False) -> None:
        self.generator = Generator(build / "corpus.npz", build / "tokenizer.json", "held_out", seed, stretch=0)
        self.language: Language = self.generator.language
        self.language.new_wordings = new_wordings
        self.encode, self.rng = self.generator.encoder, self.generator.rng
        self.header = self.encode(self.language.prompt["header"])

    def exam(self, task: str, tokens: int, questions: int, depth: float | None = None) -> Exam:
        if task in ("cwe", "fwe"):
            return self.list_exam(task, tokens)
        if task == "recite":
            return self.recite_exam(tokens, questions)
        material = self.material(task, tokens)
        asked = [self.asked(q) for q in material.questions[:questions]]
        facts = [self.generator.writer.fact(f) for f in material.facts]
        depths = [depth] if depth is not None else sorted(self.rng.random() for _ in facts)
        room = tokens - 1 - max(len(a.question) + len(a.answer) for a in asked) - sum(len(f[0]) for f in facts)
        window, length = self.text(room)
        length += sum(len(f[0]) for f in facts)
        context, _ = self.generator.lay_out(window, [*zip(depths, facts)], [], length)
        return Exam(task, tokens, np.concatenate([[BOS], context]).astype(np.uint16), asked)

    def text(self, room: int) -> tuple[Window, int]:
        """A stretch of book that ends with a sentence, and its length."""
        window = self.generator.haystack.window(room, self.rng)
        return window, int(window.stops[-1])

    def material(self, task: str, tokens: int) -> Material:
        spec, families = self.language.tasks[task], self.generator.families

        def count(least: int, sizes: Any = spec.get("facts", spec.get("lines"))) -> int:
            return min(sizes["max"], max(least, tokens // sizes["tokens_per_fact"]))

        match task:
            case "needle":
                return families.magic(1)
            case "multikey":
                return families.magic(count(1))
            case "multivalue":
                values = spec["values_per_key"]
                return families.magic(count(values), tuple(spec["other_values_per_key"]), asked_repeats=values)
            case "multiquery":
                keys = spec["keys_per_question"]
                return families.magic(count(keys), keys=(keys, keys))
            case "kv":
                return families.kv(count(1))
            case "vt":
                hops = spec["hops"]
                return families.vt(count(hops + 1) // (hops + 1) * (hops + 1), (hops, hops), ends_only=True)
            case "qa":
                facts = count(2)
                halves = [families.person(facts - facts // 2, reverse=0), families.code(facts // 2)]
                return merge(halves, self.rng)
            case "freq":
                return families.freq(count(spec["lists"]), spec["lists"], spec["words_per_line"], spec["vocabulary"],
                                     spec["winner_share"])
            case _:
                return families.single(task)

    def asked(self, question: Question) -> Asked:
        text = self.language.prompt["question"].format(question=question.text)
        answer = self.encode(self.language.prompt["answer"].format(answer=question.answer))
        return Asked(self.header + self.encode(text), answer, question.answer, question.answers)

    def list_exam(self, task: str, tokens: int) -> Exam:
        make = self.generator.families.common_words if task == "cwe" else self.generator.families.frequent_words
        items = tokens // (6 if task == "cwe" else 3)
        while True:
            intro, listed, question = make(items)
            asked, body = self.asked(question), self.encode(intro + " ".join(listed))
            room = tokens - 1 - len(asked.question) - len(asked.answer)
            if len(body) <= room:
                return Exam(task, tokens, np.array([BOS, *body], dtype=np.uint16), [asked])
            items = int(items * 0.995 * room / len(body))

    def recite_exam(self, tokens: int, questions: int) -> Exam:
        room = tokens - 1 - len(self.header) - 160
        window, length = self.text(room)
        exam = Exam("recite", tokens, np.concatenate([[BOS], window.tokens[:length]]).astype(np.uint16))
        whole = window.tokens[:length].tobytes()
        shape = self.language.wordings(self.language.families["recite"], "questions")[0]
        before, after = (self.encode(t) for t in self.language.prompt["question"].format(question=shape).split(" {words}"))
        for _ in range(20 * questions):
            passage = window.passage(self.rng.random() * length * 0.98, 24, 70)
            cut = passage and window.opening(*passage, self.rng.randint(6, 10))
            if not cut or passage[1] > length or passage[1] - cut < 10:
                continue
            first = load_tasks()["tasks"]["recite"]["prefix_tokens"]
            if np.any((window.stops > cut) & (window.stops <= cut + first)):
                continue  # the model may rightly end with the sentence, before it was scored
            opening, answer = window.tokens[passage[0] : cut], window.tokens[cut : passage[1]].tolist()
            if whole.count(opening.tobytes()) == 1 and len(exam.asked) < questions:
                question = [*self.header, *before, *opening.tolist(), *after]
                exam.asked.append(Asked(question, answer, self.encode.decode(answer)))
        return exam


# Reading and answering

Cache = list[tuple[Tensor, Tensor]]  # for each layer keys and values, (T, Hkv, head)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q (heads, R, head), k and v (heads, S, head), mask (R, S): outputs (heads, R, head) and their log-sum-exp."""
    if q.is_cuda and mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q[None], k[None], v[None], 0.0, False, False)[:2]
        return out[0].float(), lse[0]
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])  # (heads, R, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.clamp(min=-1e30)[..., None]).exp() @ v.float(), lse


class Reader:
    """A model with a cache: reads a document once, then answers many questions about it side by side."""

    def __init__(self, model: Pocket) -> None:
        self.model, self.shape = model, model.shape
        self.device = model.embedding.device
        self.cache: Cache = []
        self.length = 0

    def _before(self, x: Tensor, layer: Any, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = rotary(positions.flatten(), self.shape)
        return before_attention(x, layer.norm1, layer.q, layer.k, layer.v, cos, sin, self.shape.epsilon, self.shape.head)

    def _after(self, x: Tensor, attended: Tensor, layer: Any) -> Tensor:
        return after_attention(x, attended, layer.o, layer.norm2, layer.gate, layer.up, layer.down, self.shape.epsilon, 0.0)

    def read(self, tokens: np.ndarray) -> Tensor:
        """Reads tokens (T,), keeps their keys and values, and returns the last hidden states (T, d)."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        positions = torch.arange(len(ids), device=self.device)
        x = F.embedding(ids, self.model.embedding)
        self.cache, self.length = [], len(ids)
        for layer in self.model.layers:
            q, k, v = self._before(x, layer, positions)  # (T, heads, head)
            self.cache.append((k, v))
            with attention_backend(self.device):
                heads = [t.transpose(0, 1)[None] for t in (q, k, v)]  # (1, heads, T, head)
                attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            x = self._after(x, attended[0].transpose(0, 1).flatten(1), layer)
        return x

    def _mixed(self, q: Tensor, places: Tensor, document: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor],
               window: tuple[int, int] | None) -> Tensor:
        """Attention of questions' tokens over the document and over their own question.

        q (Q, n, Hq, head) at places (Q, n) after the document, own keys and values (Q, S, Hkv, head): (Q * n, Hq * head).
        """
        count, n, _, head = q.shape
        groups = self.shape.kv_heads
        rows = q.view(count, n, groups, -1, head).permute(2, 0, 1, 3, 4)  # (Hkv, Q, n, G, head)
        flat = rows.reshape(groups, -1, head)  # (Hkv, Q * n * G, head)
        k, v = (t.transpose(0, 1) for t in document)  # (Hkv, T, head)
        mask = None
        if window:  # the sink and the window's part of the document
            sink, recent = window
            first = max(sink, self.length - recent)
            kept = torch.cat([torch.arange(sink), torch.arange(first, self.length)]).to(self.device)
            k, v = k[:, kept], v[:, kept]
            oldest = (self.length + places.flatten() - recent + 1).repeat_interleave(rows.shape[3])  # (Q * n * G,)
            mask = (kept[None] < sink) | (kept[None] >= oldest[:, None])
        far, far_lse = attend(flat.contiguous(), k.contiguous(), v.contiguous(), mask)
        order = torch.arange(own[0].shape[1], device=self.device)  # (S,)
        seen = order <= places[..., None]  # (Q, n, S)
        if window:
            seen &= order > places[..., None] - window[1]
        scores = torch.einsum("gqnhd,qsgd->gqnhs", rows.float(), own[0].float()) / math.sqrt(head)
        scores = scores.masked_fill(~seen[None, :, :, None], -math.inf)
        near_lse = scores.logsumexp(-1)  # (Hkv, Q, n, G)
        near = torch.einsum("gqnhs,qsgd->gqnhd", (scores - near_lse[..., None]).exp(), own[1].float())
        far, far_lse = far.view_as(near), far_lse.view_as(near_lse)
        share = torch.sigmoid(far_lse - near_lse)[..., None]  # two states merge by their log-sum-exp
        return (near + share * (far - near)).permute(1, 2, 0, 3, 4).reshape(count * n, -1).to(q.dtype)

    def extend(self, tokens: Tensor, places: Tensor, own: list[tuple[Tensor, Tensor]],
               window: tuple[int, int] | None) -> Tensor:
        """Reads tokens (Q, n) at places (Q, n) after the document, writes their keys and values into `own`, and returns
        hidden states (Q, n, d)."""
        count, n = tokens.shape
        rows = torch.arange(count, device=self.device)[:, None]
        x = F.embedding(tokens.flatten(), self.model.embedding)
        for layer, document, (keys, values) in zip(self.model.layers, self.cache, own):
            q, k, v = self._before(x, layer, places + self.length)
            keys[rows, places], values[rows, places] = (t.view(count, n, *t.shape[1:]) for t in (k, v))
            attended = self._mixed(q.view(count, n, *q.shape[1:]), places, document, (keys, values), window)
            x = self._after(x, attended, layer)
        return x.view(count, n, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(rms_norm(hidden, self.model.norm, self.shape.epsilon), self.model.embedding).float()

    def buffers(self, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
        shape = (count, size, self.shape.kv_heads, self.shape.head)
        kind = self.model.embedding.dtype
        return [tuple(torch.zeros(shape, dtype=kind, device=self.device) for _ in "kv") for _ in self.cache]

    def answer(self, questions: list[list[int]], most: int, window: tuple[int, int] | None = None) -> list[list[int]]:
        """`most` greedy tokens after each question."""
        lengths = torch.tensor([len(q) for q in questions], device=self.device)
        longest = int(lengths.max())
        own = self.buffers(len(questions), longest + most)
        tokens = torch.tensor([q + [0] * (longest - len(q)) for q in questions], device=self.device)
        places = torch.arange(longest, device=self.device).expand_as(tokens)
        hidden = self.extend(tokens, places, own, window)
        last = self.logits(hidden[torch.arange(len(questions)), lengths - 1])
        answers = [last.argmax(-1)]
        for step in range(most - 1):
            hidden = self.extend(answers[-1][:, None], (lengths + step)[:, None], own, window)
            answers.append(self.logits(hidden[:, 0]).argmax(-1))
        return torch.stack(answers, dim=1).tolist()


# Scoring

def score(task: str, asked: Asked, given: list[int], decode: Any) -> float:
    """By the task's `match`: contains, exact, recall of the values, or the first tokens."""
    spec = load_tasks()["tasks"][task]
    if spec["match"] == "prefix":
        first = spec["prefix_tokens"]
        return float(given[:first] == asked.answer[:first])
    text = decode(given).split("\n")[0].strip()
    match spec["match"]:
        case "recall":
            return len({t.strip() for t in text.split(",")} & set(asked.values)) / len(asked.values)
        case "contains":
            return float(asked.text in text)
        case _:
            return float(text == asked.text)


@dataclass(frozen=True)
class Job:
    task: str
    tokens: int
    questions: int
    depth: float | None
    seed: int
    new_wordings: bool


examiner: Examiner


def start_worker(build: Path) -> None:
    global examiner
    examiner = Examiner(build, 0)


def run_job(job: Job) -> Exam:
    examiner.rng.seed(job.seed)
    examiner.language.new_wordings = job.new_wordings
    return examiner.exam(job.task, job.tokens, job.questions, job.depth)


def jobs(tasks: list[str], lengths: list[int], counts: dict[int, int], share: float, new_wordings: bool) -> list[Job]:
    made = []
    for tokens in lengths:
        for task in tasks:
            wanted = max(1, int(counts[tokens] * (share if task in ("passkey", "number", "cwe", "fwe") else 1)))
            each = 1 if task in ONE_QUESTION else 4 if task in ("freq", "vt") else 2 if task == "multivalue" else 5
            if each == 5 and tokens <= 32768:
                each = 10
            documents = -(-wanted // each)
            for i in range(documents):
                depth = (i + 0.5) / documents if task in ("needle", "passkey", "number") else None
                made.append(Job(task, tokens, each, depth, zlib.crc32(f"{task} {tokens} {i}".encode()), new_wordings))
    return made


def text_loss(reader: Reader, build: Path, windows: int = 64, length: int = 2048) -> float:
    """Mean loss in nats a token on held-out books."""
    tokens = np.load(build / "corpus.npz")["held_out"]
    total = 0.0
    for start in np.linspace(0, len(tokens) - length - 1, windows).astype(int):
        ids = np.concatenate([[BOS], tokens[start : start + length]])
        logits = reader.logits(reader.read(ids[:-1]))
        total += F.cross_entropy(logits, torch.from_numpy(ids[1:].astype(np.int64)).to(logits.device)).item()
    return total / windows


def echo_loss(reader: Reader, build: Path, tokens: int, documents: int) -> dict[str, Any]:
    """A passage of held-out text comes back at the end of the text, unannounced: nats a token from its ninth token on,
    with full attention and with the window."""
    generator = Generator(build / "corpus.npz", build / "tokenizer.json", "held_out", 7)
    sums = {"full": 0.0, "streaming": 0.0}
    for _ in range(documents):
        window = generator.haystack.window(tokens - 129, generator.rng)
        start = int(window.starts[generator.rng.randrange(len(window.starts) * 7 // 10)])
        again = torch.from_numpy(window.tokens[start : start + 128].astype(np.int64)).to(reader.device)[None]  # (1, 128)
        reader.read(np.concatenate([[BOS], window.tokens]))
        places = torch.arange(128, device=reader.device)[None]
        for name, kept in (("full", None), ("streaming", STREAMING)):
            logits = reader.logits(reader.extend(again, places, reader.buffers(1, 128), kept))[0]
            sums[name] += F.cross_entropy(logits[8:-1], again[0, 9:]).item() / documents
    return {"task": "echo (nats a token)", "tokens": tokens, "n": documents, "documents": documents,
            **{name: round(value, 3) for name, value in sums.items()}}


Cells = dict[tuple[str, int], dict[str, list[float]]]


def summary(cells: Cells, documents: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """One line for each task and length: questions, documents, scores in percent; the window's with its own count."""
    return [{"task": task, "tokens": tokens, "n": len(c["full"]), "documents": documents[task, tokens],
             **{name: round(100 * sum(v) / len(v), 1) for name, v in c.items() if v},
             "n_streaming": len(c["streaming"])} for (task, tokens), c in cells.items()]


def keep(path: Path, results: list[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in results) + "\n]\n", encoding="utf-8")


def next_cell(exam: Exam, todo: list[Job], documents: dict[tuple[str, int], int]) -> bool:
    """Whether this was the last document of its task and length."""
    return documents[exam.task, exam.tokens] == sum((j.task, j.tokens) == (exam.task, exam.tokens) for j in todo)


@torch.no_grad()
def evaluate(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = Pocket().to(arguments.device)
    export.load(model, arguments.model / "model.safetensors")
    reader = Reader(model.to(torch.float32 if arguments.device == "cpu" else torch.bfloat16))
    decode = Examiner(arguments.build, 0).encode.decode
    counts = {t: arguments.n if t <= 32768 else arguments.n * 6 // 10 if t <= 65536 else arguments.n * 4 // 10
              for t in arguments.tokens}
    todo = jobs(arguments.tasks, arguments.tokens, counts, 0.5, arguments.new_wordings)
    cells: Cells = {}
    documents: dict[tuple[str, int], int] = {}
    begin = time.monotonic()
    with multiprocessing.get_context("fork").Pool(arguments.workers, start_worker, (arguments.build,)) as pool:
        for exam in pool.imap(run_job, todo):
            cell = cells.setdefault((exam.task, exam.tokens), {"full": [], "streaming": []})
            documents[exam.task, exam.tokens] = documents.get((exam.task, exam.tokens), 0) + 1
            reader.read(exam.context)
            most = max(len(a.answer) for a in exam.asked) + 2
            most = min(most, load_tasks()["tasks"][exam.task].get("prefix_tokens", most))
            modes = [("full", None), ("streaming", STREAMING)] if documents[exam.task, exam.tokens] % 2 else [("full", None)]
            for name, window in modes:  # the window on every other document: its answers need no fine figure
                given = reader.answer([a.question for a in exam.asked], most, window)
                for asked, tokens in zip(exam.asked, given):
                    cell[name].append(score(exam.task, asked, tokens, decode))
                    if arguments.show and name == "full" and cell[name][-1] < 1:
                        print(exam.task, exam.tokens, "wanted", repr(asked.text), "got", repr(decode(tokens)), flush=True)
            if next_cell(exam, todo, documents):
                keep(arguments.out, summary(cells, documents))
    results = summary(cells, documents)
    if arguments.text:
        loss = round(text_loss(reader, arguments.build), 3)
        results.append({"task": "text (nats a token)", "tokens": 2048, "n": 64, "full": loss})
        results += [echo_loss(reader, arguments.build, t, 20) for t in arguments.tokens]
    print(f"{time.monotonic() - begin:.0f} s")
    return results


def table(results: list[dict[str, Any]], column: str) -> str:
    """A Markdown table, tasks by lengths, `score (n)`."""
    lengths = sorted({r["tokens"] for r in results})
    cells = {(r["task"], r["tokens"]): r for r in results if column in r}
    lines = ["| task | " + " | ".join(f"{t // 1024}k" for t in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for task in dict.fromkeys(r["task"] for r in results):
        row = [f"{c[column]} ({c['n']})" if (c := cells.get((task, t))) else "" for t in lengths]
        lines.append(f"| {task} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    every = [name for name, task in load_tasks()["tasks"].items() if name != "echo" and "ruler" not in task]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True, help="folder that tokenizer.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--tasks", nargs="+", default=every, choices=every)
    parser.add_argument("--n", type=int, default=100, help="questions a cell up to 32k; 60 %% of it at 64k, 40 %% at 128k")
    parser.add_argument("--new-wordings", action="store_true", help="facts and questions in wordings never trained on")
    parser.add_argument("--text", action="store_true", help="also the loss on held-out text and on passages that come back")
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    arguments = parser.parse_args()
    results = evaluate(arguments)
    keep(arguments.out, results)
    for column in ("full", "streaming"):
        print(f"\n{column}\n{table(results, column)}")


if __name__ == "__main__":
    main()
