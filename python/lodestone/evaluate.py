# SPDX-License-Identifier: Apache-2.0
"""`lodestone eval` for models that transformers runs: the same samples, the same scores, other people's models.

    lodestone tasks needle qa --tokens 8k --count 100 --haystack BOOKS -m MODEL -o samples.jsonl
    python -m lodestone.evaluate -m MODEL --samples samples.jsonl -a kmeans:probes=16 -o answers.jsonl

reads every sample file and published data set that `lodestone eval` reads, asks each question under full attention and under each
spec, and prints the scores beside each other. With -o, a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as _Many
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import InputError, RunError
from ._core import _interval, _read_samples, _Sample
from .hf import Attached, attach

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Row", "evaluate", "samples", "table"]

_MARGIN = 8  # tokens of an answer beyond the expected one: enough to see that the model goes on


class Row(NamedTuple):
    """One spec on one task and length."""

    attention: str
    task: str
    tokens: int  # the length that was asked for; 0: not known
    n: int
    score: float  # percent
    difference: float  # of the score from full attention's on the same samples, percent points
    low: float | None  # its 95 % interval by document; None: of fewer than 3 documents
    high: float | None
    agreement: float  # share of answers that are full attention's, token by token
    seconds: float  # of questions and answers


class _Answer(NamedTuple):
    tokens: list[int]
    score: float
    seconds: float


def samples(
    path: str | os.PathLike[str],
    format: str = "auto",
    limit: int = 0,
    prompts: str | os.PathLike[str] = "",
    tokens_of: Callable[[str], int] | None = None,
) -> list[_Sample]:
    """Samples of a file, at most `limit` of each task and length (0 = all).

    format: auto, own, ruler, infinitebench, longbench, prefixqa or needle; prompts: a file of prompts by task; tokens_of: how many
    tokens a text has, for data sets that tell lengths in characters. InputError names file and line.
    """
    return _read_samples(os.fspath(path), format, limit, os.fspath(prompts), tokens_of)


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    samples: _Many[_Sample],
    specs: _Many[str],
    records: str | os.PathLike[str] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Asks every sample under full attention and each spec, greedily; rows by task and length, `full` first in each.

    A context is read once for each spec, densely, and questions about it are asked one after another. records: a file of answers;
    those that it holds are not asked for again. note: is told how far the work is, and which samples are longer than the model's
    context, which are left out. InputError for unknown specs, and for a file of another model's answers.
    """
    attached = {spec: attach(model, spec) for spec in dict.fromkeys(["full", *specs])}
    kept = _Records(records, attached["full"].fingerprint)
    fitting = [group for group in map(_Questions(model, tokenizer, note), _by_context(samples)) if group]
    done, start = 0, time.monotonic()
    for questions in fitting:
        for spec, method in attached.items():
            _answer(method, spec, tokenizer, questions, kept)
        done += 1
        left = (time.monotonic() - start) / done * (len(fitting) - done)
        note(f"{done} of {len(fitting)} contexts, about {left:.0f} s left")
    return list(_rows([question.sample for questions in fitting for question in questions], list(attached), kept))


class _Question(NamedTuple):
    sample: _Sample
    context: torch.Tensor  # [1, tokens]: what all questions about the context begin with
    ids: torch.Tensor  # [1, n]: the rest
    most_new: int


class _Questions:
    """Tokens of a context's questions. A tokenizer may join context and question, so each is encoded with it."""

    def __init__(self, model: Any, tokenizer: Any, note: Callable[[str], None]) -> None:
        self._tokenizer, self._note = tokenizer, note
        self._most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize

    def __call__(self, of: list[_Sample]) -> list[_Question]:
        encoded = []
        for sample in of:
            ids, new = self._encode(sample.context + sample.question), self._most_new(sample)
            if len(ids) + new > self._most:
                self._note(f"left out: {sample.id}, {len(ids)} tokens and {new} of the answer, more than the model's {self._most}")
            elif len(ids) < 2:
                self._note(f"left out: {sample.id}, which has neither a context nor a question")
            else:
                encoded.append((sample, ids, new))
        if not encoded:
            return []
        shared = [len(ids) - 1 for _, ids, _ in encoded]
        first = self._encode(of[0].context)
        for _, ids, _ in encoded:
            shared.append(next((i for i, (a, b) in enumerate(zip(ids, first)) if a != b), min(len(ids), len(first))))
        begin = max(1, min(shared))
        return [_Question(sample, torch.tensor([ids[:begin]]), torch.tensor([ids[begin:]]), new) for sample, ids, new in encoded]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text).input_ids
        if ids and ids[-1] == self._tokenizer.eos_token_id:  # some tokenizers end a text, which here goes on
            ids = ids[:-1]
        return ids

    def _most_new(self, sample: _Sample) -> int:
        if sample.max_new > 0:
            return sample.max_new
        lengths = [len(self._tokenizer(" " + answer, add_special_tokens=False).input_ids) for answer in sample.answers]
        return _MARGIN + (sum(n + 2 for n in lengths) if sample.wants_all else max(lengths))


def _by_context(samples: _Many[_Sample]) -> list[list[_Sample]]:
    groups: dict[int, list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.context_key, []).append(sample)
    return list(groups.values())


def _answer(attached: Attached, spec: str, tokenizer: Any, questions: list[_Question], kept: _Records) -> None:
    left = [question for question in questions if kept.find(question.sample, spec) is None]
    if not left:
        return
    document = attached.read(left[0].context)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for question in left:
        begin = question.context.shape[1] + question.ids.shape[1]
        # Samples that say no length are answered on one line.
        line = {} if question.sample.max_new > 0 else {"stopping_criteria": [_line_end(tokenizer, begin)]}
        start = time.monotonic()
        new = document.ask(question.ids, max_new_tokens=question.most_new, pad_token_id=pad, **line)
        seconds = time.monotonic() - start
        text: str = tokenizer.decode(new, skip_special_tokens=True)
        if line:
            text = text.partition("\n")[0]
        kept.add(question.sample, spec, text, _Answer(new.tolist(), question.sample.score(text), seconds))


def _line_end(tokenizer: Any, begin: int) -> Callable[..., torch.Tensor]:
    """For generate(): whether the text behind `begin` tokens holds an end of a line."""

    def ended(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        text: str = tokenizer.decode(ids[0, begin:], skip_special_tokens=True)
        return torch.tensor(["\n" in text], device=ids.device)

    return ended


class _Records:
    """Answers by sample and spec, also as JSON lines in a file when one is named."""

    def __init__(self, path: str | os.PathLike[str] | None, model: str) -> None:
        self._path = None if path is None else os.fspath(path)
        self._answers: dict[tuple[str, str], tuple[str, _Answer]] = {}
        settings = {"lodestone": "answers of lodestone.evaluate", "model": model}
        if self._path is None:
            return
        try:
            with open(self._path, encoding="utf-8") as file:
                lines = file.read().split("\n")
        except FileNotFoundError:
            self._append(settings)
            return
        if self._parse(lines[0]) != settings:
            raise InputError(f"{self._path}: expected answers of this model by lodestone.evaluate, found another file; name another one")
        if lines[-1]:  # cut short: it is asked for again, behind a whole line
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n")
        for record in filter(None, map(self._parse, lines[1:])):
            answer = _Answer(record["output_ids"], record["score"], record["seconds"])
            self._answers[record["id"], record["attention"]] = record["sample"], answer

    def find(self, sample: _Sample, spec: str) -> _Answer | None:
        """None where there is none. InputError where the file answers another sample of that id."""
        known = self._answers.get((sample.id, spec))
        if known is not None and known[0] != self._hash(sample):
            raise InputError(f"{self._path}: expected answers to these samples, found one to another sample named '{sample.id}'")
        return None if known is None else known[1]

    def add(self, sample: _Sample, spec: str, text: str, answer: _Answer) -> None:
        """RunError when the file cannot take it."""
        self._answers[sample.id, spec] = self._hash(sample), answer
        self._append({
            "id": sample.id, "attention": spec, "task": sample.task, "tokens": sample.tokens, "sample": self._hash(sample),
            "output": text, "output_ids": answer.tokens, "score": answer.score, "seconds": answer.seconds,
        })

    def _append(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error}") from error

    @staticmethod
    def _parse(line: str) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            return None

    @staticmethod
    def _hash(sample: _Sample) -> str:
        parts = [sample.context, sample.question, *sample.answers]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _rows(asked: list[_Sample], specs: list[str], kept: _Records) -> Iterator[Row]:
    groups: dict[tuple[str, int], list[_Sample]] = {}
    for sample in asked:
        groups.setdefault((sample.task, sample.tokens), []).append(sample)
    for (task, tokens), of in groups.items():
        full = [kept.find(sample, "full") for sample in of]
        for spec in specs:
            pairs = [(a, b) for a, b in zip((kept.find(sample, spec) for sample in of), full) if a is not None and b is not None]
            mean, low, high = _interval([100 * (a.score - b.score) for a, b in pairs], [sample.context_key for sample in of])
            yield Row(
                spec, task, tokens, len(of), sum(100 * a.score for a, _ in pairs) / len(pairs), mean, low, high,
                sum(a.tokens == b.tokens for a, b in pairs) / len(pairs), sum(a.seconds for a, _ in pairs),
            )


def table(rows: _Many[Row]) -> str:
    """Rows as text, a table for each task and length."""
    lines: list[str] = []
    group = None
    width = max([len(row.attention) for row in rows], default=0)
    for row in rows:
        if group != (row.task, row.tokens):
            group = row.task, row.tokens
            length = f", {row.tokens} tokens" if row.tokens > 0 else ""
            lines += ["", f"{row.task}{length}: {row.n} samples"]
            lines.append(f"{'attention':{width}}   score   difference (95 %)          agreement   s an answer")
        interval = f" [{row.low:+.1f}, {row.high:+.1f}]" if row.low is not None and row.high is not None else ""
        change = f"{row.difference:+.1f}{interval}"
        lines.append(f"{row.attention:{width}}  {row.score:6.1f}   {change:25} {row.agreement:9.3f}   {row.seconds / row.n:11.2f}")
    return "\n".join(lines[1:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lodestone.evaluate", description="Scores a model of transformers under attention specs.")
    parser.add_argument("-m", "--model", required=True, help="folder or name of a model that transformers loads")
    parser.add_argument("--samples", required=True, help="samples as `lodestone tasks` writes them, or a published data set")
    parser.add_argument("-a", "--attention", action="append", required=True, help="attention spec; may be repeated")
    parser.add_argument("--format", default="auto", help="auto, own, ruler, infinitebench, longbench, prefixqa or needle")
    parser.add_argument("--prompts", default="", help="file of prompt templates by task, such as LongBench's dataset2prompt.json")
    parser.add_argument("--limit", type=int, default=0, help="samples of each task and length at most; 0 = all")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto (as they are stored), float32, bfloat16 or float16")
    parser.add_argument("-o", "--output", help="file for every answer as a JSON line; what it holds is not asked for again")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return parser.parse_args()


def _main() -> None:
    import transformers

    flags = _arguments()
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags.model)
    of = samples(flags.samples, flags.format, flags.limit, flags.prompts, lambda text: len(tokenizer(text).input_ids))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(flags.model, dtype=flags.dtype)
    model = model.to(flags.device).eval()
    rows = evaluate(model, tokenizer, of, flags.attention, flags.output, lambda line: print(line, file=sys.stderr, flush=True))
    if flags.json:
        print(json.dumps({"model": flags.model, "protocol": "context-dense", "results": [row._asdict() for row in rows]}))
    else:
        print(table(rows))


if __name__ == "__main__":
    try:
        _main()
    except (InputError, RunError) as error:
        sys.exit(f"lodestone.evaluate: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
