# SPDX-License-Identifier: Apache-2.0
"""Index a long document once, then ask it many questions fast: attention as vector retrieval over the KV cache.

    import lodestone

    model = lodestone.Model("models/pocket")
    document = lodestone.Document.read(model, text, specs=["kmeans:probes=48"])
    answer = document.ask("What is the profession of Clara Whitaker?")
    print(answer.text, answer.work.density)

`attend`, `attend_causal`, `merge`, `top_k` and `Selector` work on arrays of NumPy, PyTorch (CPU) or anything with DLPack.
`lodestone.hf` brings the methods to models of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from ._core import (
    InputError,
    RunError,
    Selector,
    Work,
    _Document,
    _Model,
    _forget_threads,
    attend,
    attend_causal,
    finish,
    merge,
    methods,
    top_k,
)
from ._core import Stream as _Stream

__all__ = [
    "Answer", "ArrayLike", "Document", "InputError", "Model", "RunError", "Selector", "Work",
    "attend", "attend_causal", "finish", "merge", "methods", "pipeline", "top_k",
]
__version__ = "0.1.0"

# Threads do not survive a fork; the child makes its own when it needs them.
os.register_at_fork(after_in_child=_forget_threads)

Progress = Callable[[int, int, int, int], None]


@runtime_checkable
class ArrayLike(Protocol):
    """An array of NumPy, PyTorch, JAX or CuPy in the CPU's memory: anything with DLPack's two methods."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class Model:
    """A frozen model: config, tokenizer, weights, threads. Shared by any number of documents."""

    def __init__(self, path: str | os.PathLike[str], device: str = "cpu", threads: int = 0) -> None:
        """path: a Hugging Face folder or a .gguf file; threads: 0 = one per core. InputError says what is wrong."""
        self._model = _Model.load(os.fspath(path), device, threads)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Token ids of a text; special tokens inside it stay text."""
        return self._model.encode(text, bos)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._model.decode(list(tokens))

    @property
    def fingerprint(self) -> str:
        """Of weights, config and RoPE: documents of another model are refused."""
        return self._model.fingerprint

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes


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
        return self._stream.text

    @property
    def tokens(self) -> list[int]:
        """Generated token ids, a stop's own included."""
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

    def __repr__(self) -> str:
        return f"Answer({self.text!r})"


class Document:
    """A text that was read once: tokens, keys, values and indexes. It does not change."""

    def __init__(self, document: _Document) -> None:
        self._document = document

    @classmethod
    def read(
        cls,
        model: Model,
        text: str,
        specs: Sequence[str] = (),
        progress: Progress | None = None,
        kv_type: str = "f16",
        max_tokens: int = 0,
        seed: int = 0,
    ) -> Document:
        """Reads a text with full attention and indexes it for `specs`.

        progress(tokens_done, tokens, layers_indexed, layers) is called between chunks. kv_type: f32, f16, bf16 or q8.
        max_tokens: document, question and answer together, 0 = the model's own limit.
        """
        return cls(_Document.read(model._model, text, list(specs), kv_type, max_tokens, seed, progress))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model, specs: Sequence[str] = ()) -> Document:
        """Opens a .lode file; keys and values are mapped, not read. Builds indexes of `specs` that it lacks."""
        return cls(_Document.load(os.fspath(path), model._model, list(specs)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a .lode file, whole or not at all."""
        self._document.save(os.fspath(path))

    def ask(
        self,
        question: str,
        attention: str = "auto",
        max_new_tokens: int = 128,
        stream: bool = False,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
        template: str | None = None,
    ) -> Answer:
        """Asks a question. `stream=True` returns at once; iterate over the answer.

        attention: one of `methods`, 'full', or 'auto' (the first method that the document is indexed for, else full).
        template: a text with {question} in it; None = the question form of the shipped model, which ends at a line's end.
        """
        answer = Answer(
            _Stream(self._document, question, attention, max_new_tokens, list(stop), temperature, seed, template)
        )
        if not stream:
            answer.text  # noqa: B018 - waits
        return answer

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self._document.tokens

    @property
    def text(self) -> str:
        return self._document.text

    @property
    def methods(self) -> list[str]:
        """Specs that it is indexed for."""
        return self._document.methods

    @property
    def kv_bytes(self) -> int:
        return self._document.kv_bytes

    @property
    def index_bytes(self) -> int:
        return self._document.index_bytes


def pipeline(model: Model, attention: str = "full") -> Callable[..., dict[str, list[str]]]:
    """A function of (context, questions=[...]) that reads the context once and answers each question."""

    def run(context: str, questions: Sequence[str], max_new_tokens: int = 128) -> dict[str, list[str]]:
        specs = [] if attention == "full" else [attention]
        document = Document.read(model, context, specs=specs)
        answers = [document.ask(q, attention=attention, max_new_tokens=max_new_tokens, stream=True) for q in questions]
        return {"answers": [answer.text for answer in answers]}

    return run
