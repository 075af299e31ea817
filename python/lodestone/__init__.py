# SPDX-License-Identifier: Apache-2.0
"""Index a long document once, then ask it many questions fast: attention as vector retrieval over the KV cache.

    import lodestone

    model = lodestone.Model("models/pocket")
    document = lodestone.Document.read(model, text, specs=["kmeans:probes=48"])
    answer = document.ask("What is the profession of Clara Whitaker?")
    print(answer.text, answer.work.density)

`attend`, `attend_causal`, `plan`, `merge` and `top_k` work on arrays of NumPy, PyTorch, JAX, CuPy or anything with DLPack, in the CPU's
memory or on a GPU (`lodestone.cuda`), `Selector` on those in the CPU's memory.
`register_method` adds a method that is written in Python. `lodestone.hf` brings the methods to models of transformers,
`lodestone.evaluate` scores them as `lodestone eval` does, `lodestone.lm_eval` brings the methods to lm-evaluation-harness, and
`lodestone.vllm` brings documents to vLLM.

Letters in shapes: S cached tokens, T new tokens, B query tokens of a step, L layers, Hq query heads, Hkv KV heads, d head dimension, V vocabulary.
"""

from __future__ import annotations

import atexit
import numbers
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as _Many
from typing import TYPE_CHECKING, Any, Protocol, Union, runtime_checkable

from ._core import (
    Citation,
    CudaArray,
    Estimate,
    InputError,
    MethodEstimate,
    Plan,
    RunError,
    Selector,
    Work,
    _Document,
    _forget_threads,
    _Model,
    _register_method,
    _Sequence,
    attend,
    attend_causal,
    finish,
    merge,
    methods,
    plan,
    top_k,
)
from ._core import Stream as _Stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Answer", "ArrayLike", "Citation", "CudaArray", "Document", "Estimate", "InputError", "MethodEstimate", "Model", "Plan", "PythonMethod",
    "RunError", "Selector", "Sequence", "Work", "attend", "attend_causal", "finish", "merge", "methods", "pipeline", "plan",
    "register_method", "top_k",
]
__version__ = "0.2.0"

# Threads do not survive a fork; the child makes its own when it needs them.
os.register_at_fork(after_in_child=_forget_threads)

Progress = Callable[[int, int, int, int], None]


@runtime_checkable
class ArrayLike(Protocol):
    """An array of NumPy, PyTorch, JAX or CuPy: anything with DLPack's two methods."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...


class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...


class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


# CUDA's handle, or a stream of PyTorch, CuPy or whoever has the protocol of CUDA's Python packages.
StreamLike = Union[int, _TorchStream, _CupyStream, _CudaStream]


def _many(texts: _Many[str]) -> list[str]:
    """A lone text is one of them, not a list of its letters."""
    return [texts] if isinstance(texts, str) else list(texts)


_models: weakref.WeakSet[_Model] = weakref.WeakSet()


@atexit.register
def _end_models() -> None:
    """A thread that is in a method's Python code when the interpreter ends takes the process down with it."""
    for model in list(_models):
        model.end()


def _expect_whole(who: str, what: str, value: int, end: int) -> None:
    """A whole number of 0 or more, below `end`."""
    if not isinstance(value, numbers.Integral) or not 0 <= value < end:
        raise InputError(f"{who}: expected {what} from 0 to {end - 1}, found {value!r}")


def _expect_text(who: str, expected: str, found: object) -> None:
    """InputError for what is no str, or cannot be written in UTF-8."""
    if not isinstance(found, str):
        raise InputError(f"{who}: expected {expected} as str, found {type(found).__name__}")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{who}: expected {expected} of whole characters, found half a surrogate pair at character {error.start}") from None


class Model:
    """A frozen model: config, tokenizer, weights, threads. Shared by any number of documents."""

    def __init__(self, path: str | os.PathLike[str], device: str = "cpu", threads: int = 0) -> None:
        """path: a Hugging Face folder or a .gguf file; device: 'cpu', or 'cuda' in a package built with CUDA, where documents then
        lie and are asked; threads: 0 = one per core. InputError says what is wrong, RunError when the GPU's memory is too small.
        """
        self._model = _Model.load(os.fspath(path), device, threads)
        _models.add(self._model)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Token ids of a text; special tokens inside it stay text."""
        return self._model.encode(text, bos)

    def decode(self, tokens: _Many[int]) -> str:
        """The text of token ids, special tokens left out. InputError for ids that the model does not have."""
        return self._model.decode(list(tokens))

    def estimate(
        self, tokens: int, specs: _Many[str] = (), question: int = 64, kv_type: str = "f16", folder: str | os.PathLike[str] = "."
    ) -> Estimate:
        """What a document of so many tokens would take, measured on this machine for a few seconds.

        specs: attention specs to measure; question: tokens of a question; kv_type: f32, f16, bf16, q8 or q4; folder: where its file
        would lie. InputError for unknown specs.
        """
        return self._model.estimate(tokens, _many(specs), question, kv_type, os.fspath(folder))

    @property
    def device(self) -> str:
        """'cpu' or 'cuda': where its documents lie and are asked."""
        return self._model.device

    @property
    def fingerprint(self) -> str:
        """Of weights, config and RoPE: documents of another model are refused."""
        return self._model.fingerprint

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return self._model.weight_bytes

    @property
    def shape(self) -> dict[str, int]:
        """layers (L), query_heads (Hq), kv_heads (Hkv), head_dim (d), vocab (V), max_positions (tokens)."""
        return {name: getattr(self._model, name) for name in ("layers", "query_heads", "kv_heads", "head_dim", "vocab", "max_positions")}

    @property
    def eos(self) -> list[int]:
        """Token ids that end a text."""
        return self._model.eos


class Answer:
    """An answer. Iterating gives its text piece by piece as it is generated; `text` waits for all of it."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def cancel(self) -> None:
        """Ends the answer at the next token."""
        self._stream.cancel()

    @property
    def text(self) -> str:
        """All of it, without the stop and the blanks around it; waits until the answer has ended, and raises what made it fail."""
        return self._stream.text

    @property
    def thoughts(self) -> str:
        """What a model that thinks before it answers wrote between its marks; empty for others. Waits."""
        return self._stream.thoughts

    @property
    def tokens(self) -> list[int]:
        """Generated token ids, thoughts and a stop's own included."""
        return self._stream.tokens

    @property
    def work(self) -> Work:
        """Bytes and keys that the sparse part read."""
        return self._stream.work

    @property
    def ending(self) -> str:
        """Why it ended: stop, length, room or cancelled."""
        return self._stream.ending

    @property
    def attention(self) -> str:
        """The spec that it attends by."""
        return self._stream.attention

    @property
    def seconds(self) -> float:
        """Of question and answer."""
        return self._stream.seconds

    @property
    def sources(self) -> list[Citation]:
        """The passages that the answer rests on, heaviest first, at most 3.

        Of an answer that was not asked for with sources=True they are found by giving it once more.
        """
        return self._stream.sources(3)

    @property
    def accepted(self) -> float:
        """Of an exact answer: the share of drafted tokens that full attention accepted."""
        return self._stream.accepted

    def __repr__(self) -> str:
        return f"Answer({self.text!r})"


class Document:
    """A text that was read once: tokens, keys, values and indexes. It does not change."""

    def __init__(self, document: _Document) -> None:
        self._document = document

    @property
    def _eos(self) -> list[int]:
        return self._document.eos

    @classmethod
    def read(
        cls,
        model: Model,
        text: str,
        specs: _Many[str] = (),
        progress: Progress | None = None,
        kv_type: str = "f16",
        max_tokens: int = 0,
        seed: int = 0,
        chat: bool | None = None,
        system: str | None = None,
        document_role: str = "user",
        think: str | None = None,
    ) -> Document:
        """Reads a text with full attention and indexes it for `specs`; 'auto' among them measures methods on the text itself.

        progress(tokens_done, tokens, layers_indexed, layers) is called between chunks. kv_type: f32, f16, bf16, q8 or q4.
        max_tokens: document, question and answer together, 0 = the model's own limit. seed: of methods that draw numbers.
        chat: put the text into the model's chat template, which the document and its file then keep: None = where the model has
        one, True = refuse a model without, False = never (a chat model then often answers nothing). As `lodestone index --chat`.
        Inside of the template: system, the system message; document_role, whose message the text belongs to, 'user' or 'system';
        think, for templates that say in front of the text whether and how much the model thinks: on, off, low, medium or high.
        What the program would remark (a missing BOS token, say) is a warning.
        InputError when the text is empty or longer, a spec is unknown, or model and template settings do not fit;
        KeyboardInterrupt on Ctrl-C.
        """
        _expect_text("read", "a text", text)
        _expect_whole("read", "a seed", seed, 2**64)
        made = _Document.read(model._model, text, _many(specs), kv_type, max_tokens, seed, progress, chat, system, document_role, think)
        for remark in made.remarks:
            warnings.warn(remark, stacklevel=2)
        return cls(made)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model | None = None, specs: _Many[str] = ()) -> Document:
        """Opens a .lode file; keys and values are mapped, not read. Builds indexes of `specs` that it lacks.

        A text that was indexed in a chat template is asked in it.

        model: None = the one that the file names, loaded anew. InputError when the file is of another model, or not whole.
        """
        if model is None:
            model = Model(_Document.model_path(os.fspath(path)))
        return cls(_Document.load(os.fspath(path), model._model, _many(specs)))

    @classmethod
    def from_keys(
        cls,
        model: Model,
        tokens: _Many[int],
        keys: _Many[ArrayLike],
        values: _Many[ArrayLike],
        text: str = "",
        specs: _Many[str] = (),
        max_tokens: int = 0,
        seed: int = 0,
    ) -> Document:
        """A document whose keys and values another engine has computed.

        keys, values: of each layer [Hkv, S, d], float32, float16 or bfloat16 (one type in all), keys after RoPE at positions
        0 ... S - 1. They are copied. InputError for specs that learn from the prefill.
        """
        made = _Document.from_keys(model._model, list(tokens), text, list(keys), list(values), _many(specs), max_tokens, seed)
        return cls(made)

    def kv(self, layer: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Keys and values of a layer, a pair [S, d] for each KV head, read-only and without a copy.

        float32 or float16 as kv_type says; bf16 comes as uint16 (torch: `.view(torch.bfloat16)`). InputError for quantised ones,
        and for documents on a GPU.
        """
        return self._document.kv(layer)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Writes a .lode file, whole or not at all.

        InputError for a file that is there already, unless `overwrite`, and for a path that cannot be written; RunError when the
        disk is full.
        """
        self._document.save(os.fspath(path), overwrite)

    def ask(
        self,
        question: str,
        attention: str | None = None,
        max_new_tokens: int = 128,
        stream: bool = False,
        stop: _Many[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
        template: str | None = None,
        exact: bool = False,
        sources: bool = False,
        max_thought_tokens: int | None = None,
        chat: bool | None = None,
        think: str | None = None,
        after: Answer | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> Answer:
        """Asks a question. `stream=True` returns at once; iterate over the answer.

        max_new_tokens: of the answer at most; stop: texts that end it, left out; temperature: 0 = the likeliest token always;
        at others tokens are drawn, from the top_k likeliest (0 = all) that together have a share of top_p; seed: of the draws.
        attention: one of `methods`, 'full', or 'auto': the cheapest method that was measured on the document and found good, else
        full. None = 'auto' where methods were measured, else the first that the document is indexed for, else full.
        chat: a document that was read in a chat template is asked in it, and answers end with the turn: None = there, True = refuse
        a document without, False = outside of it. think: tells that template whether the model thinks, or how much: on, off, low,
        medium or high; None = as the document was read.
        template: outside of a chat template: a text with {question} in it; None = the question form of the shipped model, whose
        answers end at a line's end. A document that was read without the template that its model has is warned of, unless this is given.
        exact: tokens are drafted by `attention` and verified by full attention: greedy answers are those of `full`.
        sources: find the passages that the answer rests on (Answer.sources) while it is given, which costs time at each token;
        else they are found when they are first asked for.
        max_thought_tokens: of a model that thinks before it answers: behind so many its thoughts are ended; None = no such bound.
        after: the answer that this question goes on from; the model is shown it, and what was asked and answered before it, as in
        `lodestone chat`. Waits for that answer.
        InputError when the question is empty, the document is not indexed for `attention`, it has no room for question and answer, or
        a setting does not fit the template that it was read in.
        """
        _expect_text("ask", "a question", question)
        if after is not None and not isinstance(after, Answer):
            raise InputError(f"ask: expected an Answer to go on from as after=, found {type(after).__name__}")
        if max_thought_tokens is not None and max_thought_tokens < 0:
            raise InputError(f"ask: expected max_thought_tokens of 0 or more, or None, found {max_thought_tokens}")
        _expect_whole("ask", "a seed", seed, 2**64)
        _expect_whole("ask", "top_k", top_k, 2**31)
        answer = Answer(
            _Stream(
                self._document,
                question,
                attention,
                max_new_tokens,
                _many(stop),
                temperature,
                top_k,
                top_p,
                seed,
                template,
                exact,
                sources,
                max_thought_tokens,
                chat,
                think,
                None if after is None else after._stream,
            )
        )
        if answer._stream.remark:
            warnings.warn(answer._stream.remark, stacklevel=2)
        if not stream:
            answer.text  # noqa: B018 - waits
        return answer

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self._document.tokens

    @property
    def token_ids(self) -> list[int]:
        """[S]"""
        return self._document.token_ids

    @property
    def text(self) -> str:
        """What the tokens were made from; may be empty."""
        return self._document.text

    @property
    def chat(self) -> bool:
        """Whether it was read in a chat template, which questions go on in."""
        return self._document.chat

    @property
    def kv_type(self) -> str:
        """f32, f16, bf16, q8 or q4."""
        return self._document.kv_type

    @property
    def max_tokens(self) -> int:
        """Room for document, question and answer together, in tokens."""
        return self._document.max_tokens

    @property
    def fingerprint(self) -> str:
        """Of model, tokens, KV type and seed: equal documents give equal answers."""
        return self._document.fingerprint

    @property
    def methods(self) -> list[str]:
        """Specs that it is indexed for."""
        return self._document.methods

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return self._document.kv_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of all indexes."""
        return self._document.index_bytes


class Sequence:
    """A branch of a document that is fed token by token: its own keys behind the document's, which it shares."""

    def __init__(self, document: Document, attention: str | None = None, max_tokens: int = 0) -> None:
        """attention: as in `ask`; max_tokens: of its own, 0 = what the document has room for.

        InputError for another method.
        """
        self._sequence = _Sequence(document._document, attention, max_tokens)
        self._eos = document._eos

    def forward(self, tokens: _Many[int]) -> NDArray[np.float32]:
        """Appends tokens and gives their logits, float32 [T, V]. InputError when there is no room, or for ids outside of [0, V)."""
        return self._sequence.forward(list(tokens))

    def generate(self, prompt: _Many[int], max_new_tokens: int = 128) -> Iterator[int]:
        """Appends a prompt and yields greedy tokens, as they come, up to an end-of-text token, which is left out."""
        logits = self.forward(prompt)[-1]
        for left in range(max_new_tokens, 0, -1):
            token = int(logits.argmax())
            if token in self._eos:
                return
            yield token
            if left > 1:
                logits = self.forward([token])[-1]

    def roll_back(self, tokens: int) -> None:
        """Back to so many tokens, the document's included. InputError when they are fewer than the document's, or more than there are."""
        self._sequence.roll_back(tokens)

    @property
    def tokens(self) -> int:
        """How many tokens it has, the document's included."""
        return self._sequence.tokens

    @property
    def own_tokens(self) -> list[int]:
        """Token ids behind the document."""
        return self._sequence.own_tokens

    @property
    def attention(self) -> str:
        """The spec that it attends by."""
        return self._sequence.attention


class PythonMethod(Protocol):
    """A method for register_method: one object for each layer."""

    def build(self, keys: list[NDArray[np.float32]]) -> object:
        """The document is complete: keys [S, d] of each KV head, after RoPE; copies that may be kept."""

    def select(self, head: int, queries: NDArray[np.float32], begin: int, end: int) -> NDArray[np.int64] | NDArray[np.int32]:
        """The rows of [begin, end) that a token's queries [Hq / Hkv, d] of a KV head attend to, besides sink and window."""
        ...


def register_method(
    name: str, make: Callable[..., PythonMethod], options: Mapping[str, str] | None = None, source: str = "a Python program"
) -> None:
    """Adds an attention method that is written in Python; specs name it as any other, with sink, window and dense_layers.

    make(layer=, query_heads=, kv_heads=, head_dim=, **given) makes the object of one layer; `given` holds those of `options`
    (name: meaning) that a spec sets, as text. Register before documents are read.
    """
    _register_method(name, make, dict(options or {}), source)


def pipeline(model: Any, tokenizer: Any = None, attention: str = "full") -> Callable[..., dict[str, Any]]:
    """A function of (context, questions=[...]) or (context, question="...") that reads the context once and answers each.

    model: a lodestone.Model, or one of transformers together with its tokenizer.
    """
    if not isinstance(model, Model):
        from . import hf

        if tokenizer is None:
            found = type(model).__name__
            raise InputError(f"pipeline: expected a lodestone.Model, or a model of transformers and its tokenizer, found {found} alone")
        return hf.pipeline(model, tokenizer, attention)

    def run(context: str, questions: _Many[str] = (), question: str | None = None, max_new_tokens: int = 128) -> dict[str, Any]:
        asked = [question] if question is not None else _many(questions)
        if not asked:
            raise InputError("pipeline: expected question='...' or questions=[...], found neither")
        document = Document.read(model, context, specs=[] if attention == "full" else [attention])
        streams = [document.ask(q, attention=attention, max_new_tokens=max_new_tokens, stream=True) for q in asked]
        answers = [answer.text for answer in streams]
        return {"answer": answers[0]} if question is not None else {"answers": answers}

    return run
