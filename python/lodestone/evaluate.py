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
from ._core import _files_hash, _interval, _read_samples, _Records, _Sample
from .hf import Attached, HfDocument, attach

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Row", "evaluate", "samples", "table"]


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


def samples(
    path: str | os.PathLike[str],
    format: str = "auto",
    limit: int = 0,
    prompts: str | os.PathLike[str] = "",
    tokens_of: Callable[[str], int] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[_Sample]:
    """Samples of a file, at most `limit` of each task and length (0 = all).

    format: auto, own, ruler, infinitebench, longbench, prefixqa or needle; prompts: a file of prompts by task; tokens_of: how many
    tokens a text has, for data sets that tell lengths in characters; note: told which samples of a published data set are bad, and so
    left out. InputError names file and line.
    """
    read, remarks = _read_samples(os.fspath(path), format, limit, os.fspath(prompts), tokens_of)
    for remark in remarks:
        note(remark)
    return read


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    samples: _Many[_Sample],
    specs: _Many[str],
    records: str | os.PathLike[str] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Asks every sample under full attention and each spec, greedily; rows by task and length, `full` first in each.

    A context is read once for each spec, densely; questions about it are asked one after another, and their tokens attend by the spec, as
    those of the answers do. Texts go to the model verbatim, without a chat template. records: a file of answers; those that it holds are
    not asked for again. note: is told how far the work is, and which samples are left out since they fill the model's context.
    InputError for unknown specs, and for a file with answers of another model, type of weights, device or tokenizer.
    """
    methods = [_Method(model, tokenizer, spec) for spec in dict.fromkeys(["full", *specs])]
    kept = _Records("" if records is None else os.fspath(records), json.dumps(_settings(methods[0])))
    contexts = [group for of in _by_context(samples) for group in _questions(methods[0], of, note)]
    done, start = 0, time.monotonic()
    for questions in contexts:
        for method in methods:
            _answer(method, questions, kept)
        done += 1
        left = (time.monotonic() - start) / done * (len(contexts) - done)
        note(f"{done} of {len(contexts)} contexts, about {left:.0f} s left")
    return list(_rows([question.sample for questions in contexts for question in questions], methods, kept))


class _Method:
    """A model under one spec, and what its answers depend on."""

    def __init__(self, model: Any, tokenizer: Any, spec: str) -> None:
        import transformers

        self.attached: Attached = attach(model, spec)
        self.tokenizer, self.spec, self.files = tokenizer, spec, _files_hash(spec)
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        pad = tokenizer.pad_token_id
        if pad is None:
            pad = ends[0] if isinstance(ends, list) else ends
        self.greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=ends, pad_token_id=pad)

    def encode(self, text: str) -> list[int]:
        """Token ids [n] of a text that goes on."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids


def _settings(full: _Method) -> dict[str, Any]:
    """What answers depend on besides sample and spec."""
    parameter = next(full.attached.model.parameters())
    inner = getattr(full.tokenizer, "backend_tokenizer", None)
    words = inner.to_str() if inner is not None else json.dumps(full.tokenizer.get_vocab(), sort_keys=True)
    return {
        "lodestone": "answers of lodestone.evaluate",
        "model": full.attached.fingerprint,
        "dtype": str(parameter.dtype),
        "device": parameter.device.type,
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "eos": full.greedy.eos_token_id,
    }


class _Question(NamedTuple):
    sample: _Sample
    context: torch.Tensor  # [1, tokens]: what all questions about the context begin with
    ids: torch.Tensor  # [1, n]: the rest
    most_new: int


def _questions(method: _Method, of: list[_Sample], note: Callable[[str], None]) -> Iterator[list[_Question]]:
    """The questions about one context, with its tokens as far as all of them begin alike: a tokenizer may join context and question, so
    each is encoded with it. Questions that have no token in common are contexts of their own."""
    most = getattr(method.attached.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize

    def tokens_of(text: str) -> int:
        return len(method.tokenizer(text, add_special_tokens=False).input_ids)

    encoded = []
    for sample in of:
        ids = method.encode(sample.context + sample.question)
        if len(ids) < 2:
            note(f"left out: {sample.id}, which has neither a context nor a question")
        elif len(ids) >= most:
            note(f"left out: {sample.id}, {len(ids)} tokens, which the model's {most} leave no room to answer")
        else:
            encoded.append((sample, ids, min(sample.most_new(tokens_of), most - len(ids))))
    shared = min([len(ids) - 1 for _, ids, _ in encoded], default=0)
    first = method.encode(of[0].context)
    for _, ids, _ in encoded:
        shared = min(shared, next((i for i, (a, b) in enumerate(zip(ids, first)) if a != b), min(len(ids), len(first))))

    def split(begin: int, parts: list[tuple[_Sample, list[int], int]]) -> list[_Question]:
        return [_Question(sample, torch.tensor([ids[:begin]]), torch.tensor([ids[begin:]]), new) for sample, ids, new in parts]

    if shared > 0:
        yield split(shared, encoded)
    else:
        yield from (split(1, [part]) for part in encoded)


def _by_context(samples: _Many[_Sample]) -> list[list[_Sample]]:
    groups: dict[int, list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.context_key, []).append(sample)
    return list(groups.values())


def _answer(method: _Method, questions: list[_Question], kept: _Records) -> None:
    """Asks what is not known yet."""
    left = [question for question in questions if kept.find(question.sample, method.spec, method.files) is None]
    if not left:
        return
    document = method.attached.read(left[0].context)
    model = method.attached.model
    own = model.generation_config
    model.generation_config = method.greedy  # what the model would add, such as penalties, would count the document's words, too
    try:
        _ask(method, document, left, kept)
    finally:
        model.generation_config = own


def _ask(method: _Method, document: HfDocument, questions: list[_Question], kept: _Records) -> None:
    for question in questions:
        begin = question.context.shape[1] + question.ids.shape[1]
        on_a_line = question.sample.max_new == 0  # samples that say no length are answered on one line
        stops = [_line_end(method.tokenizer, begin)] if on_a_line else []
        start = time.monotonic()
        new = document.ask(question.ids, max_new_tokens=question.most_new, stopping_criteria=stops)
        seconds = time.monotonic() - start
        text: str = method.tokenizer.decode(new, skip_special_tokens=True)
        if on_a_line:
            text = text.partition("\n")[0]
        kept.add(question.sample, method.spec, text, new.tolist(), seconds, method.files)


def _line_end(tokenizer: Any, begin: int) -> Callable[..., torch.Tensor]:
    """For generate(): whether the text behind `begin` tokens holds an end of a line."""

    def ended(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        text: str = tokenizer.decode(ids[0, begin:], skip_special_tokens=True)
        return torch.tensor(["\n" in text], device=ids.device)

    return ended


def _rows(asked: list[_Sample], methods: list[_Method], kept: _Records) -> Iterator[Row]:
    groups: dict[tuple[str, int], list[_Sample]] = {}
    for sample in asked:
        groups.setdefault((sample.task, sample.tokens), []).append(sample)
    for (task, tokens), of in groups.items():
        full = [answer for sample in of if (answer := kept.find(sample, "full", ""))]
        for method in methods:
            own = [answer for sample in of if (answer := kept.find(sample, method.spec, method.files))]
            mean, low, high = _interval([100 * (a[1] - b[1]) for a, b in zip(own, full)], [sample.context_key for sample in of])
            yield Row(
                method.spec, task, tokens, len(of), sum(100 * score for _, score, _ in own) / len(own), mean, low, high,
                sum(a[0] == b[0] for a, b in zip(own, full)) / len(own), sum(seconds for _, _, seconds in own),
            )  # fmt: skip


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

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    flags = _arguments()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(flags.model)
        of = samples(flags.samples, flags.format, flags.limit, flags.prompts, lambda text: len(tokenizer(text).input_ids), note)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(flags.model, dtype=flags.dtype)
        model = model.to(flags.device).eval()
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever transformers has to say
        why = str(error).strip().partition("\n")[0]
        expected = "expected the folder or name of a model that transformers loads (config.json, a tokenizer, weights)"
        raise InputError(f"{flags.model}: {expected}, found none: {why}") from error
    rows = evaluate(model, tokenizer, of, flags.attention, flags.output, note)
    if flags.json:
        print(json.dumps({"model": flags.model, "protocol": "context-dense", "results": [row._asdict() for row in rows]}))
    else:
        print(table(rows))


if __name__ == "__main__":
    try:
        _main()
    except (InputError, RunError) as error:
        print(f"lodestone.evaluate: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
