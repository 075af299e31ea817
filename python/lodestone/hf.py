# SPDX-License-Identifier: Apache-2.0
"""The attention methods for models of transformers (5.x), on the CPU and on a GPU.

    attached = lodestone.hf.attach(model, "kmeans:probes=16,window=255")
    document = attached.read(tokenizer(text, return_tensors="pt").input_ids)
    tokens = document.ask(tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids, max_new_tokens=32)

A document is prefilled with dense attention and indexed once. Questions and answers then attend sparsely in every full-attention
layer. Layers with a sliding window (Gemma 3, gpt-oss) or a recurrent state (Qwen3.5) stay as they are. After each answer
the cache goes back to the document: rows are cut off, and the other layers' states are put back as they were.

Dense attention is SDPA, or while a document is read `lodestone.attend_causal`: on a GPU in 16 bits, where that is faster, and for the
attention sinks of gpt-oss, which SDPA does not know. Everything else of gpt-oss takes the model's own eager attention.

On a GPU (`model.to("cuda")`, in a package that was built with CUDA) indexes lie on it and keys are chosen there, in PyTorch's stream.
An indexed layer's keys and values move from the cache into the blocks that our kernels read, and later ones go there at once.

How it works: `attach` registers an attention function and a mask function named "lodestone". The index lives in the cache's
layer (`LodestoneLayer`), which marks the key tensor that it returns, so that the attention function finds it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from . import InputError, RunError, Selector, _many, attend_causal, finish
from . import cuda as _cuda

__all__ = ["Attached", "HfDocument", "LodestoneLayer", "attach", "pipeline"]

_NAME = "lodestone"
_WITH_SINKS = ("gpt_oss",)  # model types whose attention has sinks, which SDPA does not know
# What a config says that no key and no value depends on.
_OF_NO_KEYS = re.compile(r"_|attn_implementation|dtype|torch_dtype|transformers_version|architectures|use_cache|output_|return_dict|.*_token_id|id2label|label2id|problem_type|chunk_size")
_MARK = "_lodestone_layer"
_SEEN = "_lodestone_is_causal"


class LodestoneLayer(DynamicLayer):
    """A cache layer whose rows lie in one buffer that doubles when it is full: appending copies new rows alone.

    Once they are indexed on a GPU the selector holds them, and what update() returns are the new rows alone: all_rows() has the others.
    """

    keys: torch.Tensor  # [B, Hkv, S, d]; S = 0 where the selector holds them
    values: torch.Tensor

    def __init__(self, selector: Selector | None = None, tokens: int = 0, config: Any = None, scale: float = 1.0) -> None:
        super().__init__()
        self.selector = selector
        self.scale = scale  # of the selector's scores
        self._config = config  # which names the model's attention
        self.attended = False  # whether our attention has met its rows
        self._expected = tokens  # of the document that will be read; 0 = unknown
        self.indexed = 0  # tokens of the document; 0 = still reading, attention is dense
        self.held = 0  # tokens whose rows the selector holds; 0 = rows lie in the buffer
        self._k: torch.Tensor | None = None  # [B, Hkv, capacity, d]
        self._v: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.selector is not None and key_states.shape[-1] != value_states.shape[-1]:
            raise InputError(
                f"lodestone: expected keys and values of one size, found {key_states.shape[-1]} and {value_states.shape[-1]}: "
                "the methods do not know latent attention (MLA)"
            )
        if self.selector is not None and key_states.dtype == torch.float64:
            raise InputError("lodestone: expected a model in float32, float16 or bfloat16, found float64")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        if old > 0 and key_states.shape[0] != self.keys.shape[0]:
            raise InputError(
                f"lodestone: expected {self.keys.shape[0]} sequence(s) as in the cache, found {key_states.shape[0]}: "
                "beam search and several sequences after one document are not for this cache; ask one question after another"
            )
        tokens = old + key_states.shape[-2]
        if self.held > 0:
            _check_attention("ask", self._config)
            keys, values = self._alike(key_states), self._alike(value_states)
            self.held = tokens  # attention brings them to the selector
        else:
            self._reserve(tokens, key_states, value_states)
            assert self._k is not None and self._v is not None
            self._k[:, :, old:tokens] = key_states
            self._v[:, :, old:tokens] = value_states
            keys, values = self.keys, self.values = self._k[:, :, :tokens], self._v[:, :, :tokens]
        mark = weakref.ref(self)  # no cycle: a dropped document gives its memory back at once
        for rows in (keys, values):
            setattr(rows, _MARK, mark)
        return keys, values

    def _alike(self, rows: torch.Tensor) -> torch.Tensor:
        """In the type of the document's rows, which autocast may have made another; the numbers of a row side by side."""
        if rows.dtype != self.keys.dtype:
            rows = rows.to(self.keys.dtype)
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def get_seq_length(self) -> int:
        """Tokens so far, wherever their rows lie."""
        return self.held or (self.keys.shape[2] if self.is_initialized and self.keys.ndim == 4 else 0)

    def _reserve(self, tokens: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._k is not None and tokens <= self._k.shape[2]:
            return
        capacity = max(256, self._expected + 256, 2 * tokens if self._k is not None else tokens + 256)
        old = self.get_seq_length()
        grown = []  # both before either is taken: there may be memory for one alone
        dtype = torch.promote_types(k.dtype, v.dtype)  # autocast may make them differ
        for like, before in ((k, self._k), (v, self._v)):
            rows = torch.empty((*like.shape[:2], capacity, like.shape[-1]), dtype=dtype if before is None else before.dtype, device=like.device)
            if before is not None:
                rows[:, :, :old] = before[:, :, :old]
                _let_go(before)
            grown.append(rows)
        self._k, self._v = grown

    def cut(self, tokens: int) -> None:
        """Back to the first `tokens` tokens; the buffer's memory stays for reuse."""
        tokens = max(0, tokens)
        if tokens >= self.get_seq_length():
            return
        if self.selector is not None:
            self.selector.roll_back(tokens)
        self.held = min(self.held, tokens)
        self.keys, self.values = self.keys[:, :, :tokens], self.values[:, :, :tokens]

    def crop(self, tokens: int) -> None:
        """transformers' own word for it: -n takes n rows away; a positive n, of its first 5.x versions alone, is what stays."""
        self.cut(tokens if tokens > 0 else self.get_seq_length() + tokens)

    def reset(self) -> None:
        """Forgets all tokens; those that come next are read densely until index()."""
        self.cut(0)
        self._drop_buffer()
        self.indexed = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise InputError("lodestone: expected greedy decoding or sampling, found beam search, which reorders the cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise InputError("lodestone: expected one sequence, found a kind of generation that repeats the cache for several")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise InputError("lodestone: expected one sequence, found a kind of generation that takes some of several out of the cache")

    def index(self, leave: bool = True) -> None:
        """Declares the rows so far the document and indexes them; on a GPU the selector alone keeps them, if `leave`."""
        if self.held > 0:
            raise InputError("lodestone: expected rows in the cache to index, found them indexed already; reset() the layer and read them again")
        if self.selector is not None:
            if self.keys.shape[0] != 1:
                raise InputError(f"lodestone: expected one sequence to index, found a batch of {self.keys.shape[0]}")
            self.selector.build(self.keys[0], self.values[0], stream=_stream(self.keys))
        self.indexed = self.get_seq_length()
        if self.selector is not None and self.keys.is_cuda and leave:
            self._drop_buffer()
            self.held = self.indexed

    def _drop_buffer(self) -> None:
        if self._k is None or self._v is None:
            return
        _let_go(self._k)
        _let_go(self._v)
        self._k = self._v = None
        self._expected = 0
        self.keys, self.values = (rows.new_empty((*rows.shape[:2], 0, rows.shape[3])) for rows in (self.keys, self.values))

    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, S, d] of all tokens in the CPU's memory: a copy, or on the CPU a view."""
        if self.held == 0:
            return self.keys.cpu(), self.values.cpu()
        assert self.selector is not None
        keys, values = (torch.from_numpy(rows).view(self.keys.dtype) for rows in self.selector.rows(stream=_stream(self.keys)))
        return keys[None], values[None]


def _let_go(rows: torch.Tensor) -> None:
    """Before memory of a GPU goes that this stream still reads, of which the stream that made it does not know."""
    if rows.is_cuda:
        rows.record_stream(torch.cuda.current_stream(rows.device))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query [B, Hq, T, d], key and value [B, Hkv, S, d] -> [B, T, Hq, d]; the weights too where the model's own attention ran."""
    mark: Callable[[], LodestoneLayer | None] | None = getattr(key, _MARK, None)
    layer = None if mark is None else mark()
    selector = layer.selector if layer is not None else None
    sinks: torch.Tensor | None = kwargs.get("s_aux")  # [Hq]
    if selector is not None and kwargs.get("softcap") is not None:  # before the prefill, not after it
        raise InputError("lodestone: expected plain softmax attention, found 'softcap', which sparse attention here does not know")
    begin = key.shape[2] - query.shape[2]
    if layer is not None:
        layer.attended = True
        if selector is not None and key.is_cuda and getattr(value, _MARK, None) is None:
            raise InputError("lodestone: expected attention to the values in the cache, found it to others, which the selector does not have")
    if layer is None or selector is None or layer.indexed == 0:
        if layer is not None and selector is not None and selector.wants_prompt and query.shape[0] == 1:
            selector.observe(_queries(query, scaling, layer), _rows(key[:, :, begin:]), _rows(value[:, :, begin:]), begin, stream=_stream(query))
        reads = layer is not None and query.shape[0] == 1 and not query.requires_grad and kwargs.get("softcap") is None
        if reads and (sinks is not None or _on_matrix_unit(query)) and _is_causal(attention_mask):
            output = _with_sinks(sinks, query, attend_causal, _rows(query), key[0], value[0], scaling)
            return output.to(query.dtype)[None], None
        if sinks is not None:
            return _eager(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    if query.shape[0] != 1:
        raise InputError(f"lodestone: expected one sequence after an indexed document, found a batch of {query.shape[0]}")
    if not _is_causal(attention_mask):
        raise InputError("lodestone: expected every token to see all tokens up to itself and no more, found another mask")
    first = layer.get_seq_length() - key.shape[2]
    begin += first
    if sinks is not None:
        attend = functools.partial(selector.attend, return_lse=True, first=first)
        output = _with_sinks(sinks, query, attend, _queries(query, scaling, layer), begin, key[0], value[0])
    elif query.device.type == "cpu":
        output = torch.from_numpy(selector.attend(_queries(query, scaling, layer), begin, key[0], value[0]))
    else:
        rows = _queries(query, scaling, layer, query.dtype if query.dtype in (torch.float16, torch.bfloat16) else torch.float32)
        output = torch.empty_like(rows)
        selector.attend(rows, begin, key[0], value[0], first=first, stream=_stream(query), out=output)
    return output.to(query.dtype)[None], None


def _on_matrix_unit(query: torch.Tensor) -> bool:
    """Whether our own kernel reads a chunk of a document faster than SDPA, which copies keys for every query head there."""
    few = 8  # tokens
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and query.shape[2] > few


def _with_sinks(sinks: torch.Tensor | None, query: torch.Tensor, attend: Callable[..., Any], *args: Any) -> torch.Tensor:
    """What `attend(*args)` gives, float32 [T, Hq, d], with exp(sink) of each head [Hq] added to its softmax's denominator."""
    if query.device.type == "cpu":
        output, lse = map(torch.from_numpy, attend(*args))
    else:
        output = torch.empty(query.shape[2], query.shape[1], query.shape[3], dtype=torch.float32, device=query.device)
        lse = torch.empty(output.shape[:2], dtype=torch.float32, device=query.device)
        attend(*args, stream=_stream(query), out=(output, lse))
    if sinks is None:
        return output
    # exp(lse) / (exp(lse) + exp(sink)); exp(lse) is the denominator without it.
    return output * torch.sigmoid(lse - sinks.detach())[..., None]


def _eager(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention in the model's own file, which adds its mask to the scores; here the mask is SDPA's: bool, and none is causal."""
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    found: tuple[torch.Tensor, torch.Tensor] = sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, mask, **kwargs
    )
    return found


def _check_attention(who: str, config: Any) -> None:
    """InputError where a model's attention is not ours any more: it would attend to what it finds in the cache, and nobody would know."""
    found = config._attn_implementation
    if found != _NAME:
        raise InputError(f"{who}: expected the attention that attach() gave the model, found '{found}'; call attach() again")


def _stream(x: torch.Tensor) -> torch.cuda.Stream | None:
    """The stream in which PyTorch computes with it; None on the CPU."""
    return None if x.device.type == "cpu" else torch.cuda.current_stream(x.device)


def _is_causal(mask: torch.Tensor | None) -> bool:
    """Whether each query sees all keys up to its own and no more; asked once for all layers of a step, since a GPU must be waited for."""
    if mask is None:
        return True
    version = None if mask.is_inference() else mask._version  # such tensors do not count how often they were written to
    known, causal = getattr(mask, _SEEN, (None, False))
    if version is None or version != known:
        seen = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        causal = torch.equal(seen, torch.ones_like(seen).tril(seen.shape[1] - seen.shape[0]))
        setattr(mask, _SEEN, (version, causal))
    return causal


def _rows(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[1, H, T, d] -> [T, H, d] of this type, contiguous."""
    rows = x[0].transpose(0, 1)
    if rows.dtype != dtype:
        rows = rows.to(dtype, memory_format=torch.contiguous_format)
    rows = rows.contiguous()  # of other strides `to` makes a copy where it converts alone
    return rows.detach() if rows.requires_grad else rows


def _queries(query: torch.Tensor, scaling: float | None, layer: LodestoneLayer, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As _rows, so that the selector's scale makes the scores that `scaling` would: OPT scales queries itself, and asks for 1.

    What is scaled here is float32, whatever `dtype` says.
    """
    wanted = query.shape[3] ** -0.5 if scaling is None else scaling
    return _rows(query, dtype) if wanted == layer.scale else _rows(query) * (wanted / layer.scale)


def _copy(value: Any) -> Any:
    """Tensors of a cache layer's state, copied; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


def _state(layer: Any) -> dict[str, Any]:
    """What a layer of another kind holds: a window's rows, or a recurrent state, with its counters."""
    return {name: _copy(value) for name, value in vars(layer).items()}


def _rope(model: PreTrainedModel) -> tuple[np.ndarray | None, float]:
    """RoPE's radians per position of full-attention layers, and the attention scaling; None without RoPE."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    for prefix in ("full_attention_", ""):
        frequencies = getattr(rotary, prefix + "inv_freq", None)
        if frequencies is not None:
            scaling = float(getattr(rotary, prefix + "attention_scaling", 1.0))
            return frequencies.detach().to(torch.float32).cpu().numpy(), scaling
    return None, 1.0


class HfDocument:
    """A prefilled and indexed prompt of one sequence."""

    def __init__(self, attached: Attached, input_ids: torch.Tensor, cache: Cache) -> None:
        self.attached = attached
        self.input_ids = input_ids  # [1, tokens]
        self.cache = cache
        self._states = {i: _state(layer) for i, layer in enumerate(cache.layers) if not isinstance(layer, LodestoneLayer)}
        self._turn = threading.RLock()  # one cache, one question at a time
        self._settle()

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return int(self.input_ids.shape[1])

    @torch.inference_mode(False)
    @torch.no_grad()
    def ask(self, question_ids: torch.Tensor, max_new_tokens: int | None = None, **generate: Any) -> torch.Tensor:
        """Generates after the document and the question [1, n]; returns the new tokens [m] and rolls the cache back.

        `generate` takes what transformers' generate() takes, for one sequence; without a generation_config of its own the answer is
        greedy and has at most 128 tokens, unless max_length says the end. Threads take turns. InputError for ids that the model does not have, and for beam search,
        drafts and whatever reads the document once more.
        """
        question_ids = self.attached.ids_here("ask", "question ids [1, n], n > 0", question_ids)
        self.attached.check_attention("ask")
        if question_ids.device != self.input_ids.device:
            raise InputError(
                f"ask: expected the model on {self.input_ids.device}, where it read the document, found it on {question_ids.device}: "
                "read() it again, or save() it before the model moves and load() it then"
            )
        for name in ("input_ids", "inputs", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values"):
            if name in generate:
                raise InputError(f"ask: expected what generate() takes besides ids, mask and cache, found '{name}'")
        own_config = generate.get("generation_config")
        config = own_config or self.attached.model.generation_config

        def wanted(name: str) -> Any:
            return generate[name] if generate.get(name) is not None else getattr(config, name, None)

        if wanted("use_cache") is False:
            raise InputError("ask: expected use_cache=True, found False: the document lies in the cache")
        if (wanted("num_beams") or 1) != 1:
            raise InputError("lodestone: expected greedy decoding or sampling, found beam search, which reorders the cache")
        if (wanted("num_return_sequences") or 1) != 1:
            raise InputError("ask: expected num_return_sequences=1, found more: ask again for each, with another seed where it samples")
        if any(wanted(name) for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")):
            raise InputError("ask: expected generation without drafts, found assisted generation, which reads the document once more")
        ids = torch.cat([self.input_ids, question_ids.to(self.input_ids.dtype)], dim=1)
        if own_config is None:
            generate.setdefault("do_sample", False)
            if max_new_tokens is None and generate.get("max_length") is None:
                max_new_tokens = 128
        if max_new_tokens is not None:
            generate["max_new_tokens"] = max_new_tokens
        with self._turn:
            try:
                output = self.attached.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    **{self.attached.cache_argument: self.cache},
                    **generate,
                )
                tokens: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
                if self.cache.get_seq_length() > tokens.shape[1]:
                    raise InputError("ask: expected a kind of generation that goes on behind the cache, found one that reads all again")
            finally:
                self.roll_back()
                self._settle()
        return tokens[0, ids.shape[1] :]

    def _settle(self) -> None:
        """Waits for GPUs: whoever asks next may do so in another stream, and finds all of the cache written."""
        for device in {layer.keys.device for layer in self.cache.layers if isinstance(layer, LodestoneLayer) and layer.indexed > 0}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    @torch.inference_mode(False)
    @torch.no_grad()
    def roll_back(self) -> None:
        """Puts the cache back to the document: full-attention layers are cut, the others get the state that they had."""
        with self._turn:
            for i, layer in enumerate(self.cache.layers):
                if isinstance(layer, LodestoneLayer):
                    layer.cut(self.tokens)
                else:
                    layer.__dict__.clear()
                    layer.__dict__.update({name: _copy(value) for name, value in self._states[i].items()})

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Writes tokens, keys, values and the other layers' states (safetensors, whole or not at all).

        Indexes are built again by Attached.load. InputError for a file that is there already, unless `overwrite`.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not overwrite and os.path.exists(path):
            raise InputError(f"{os.fspath(path)}: this file exists already; overwrite=True replaces it")
        with self._turn:
            self.roll_back()
            tensors = {"input_ids": self.input_ids.cpu().contiguous()}
            plain: dict[str, Any] = {}  # what is no tensor
            for i, layer in enumerate(self.cache.layers):
                if isinstance(layer, LodestoneLayer):
                    keys, values = layer.all_rows()  # one layer after the other: a GPU need not have room for a copy of all
                    tensors[f"layers.{i}.keys"], tensors[f"layers.{i}.values"] = keys.contiguous(), values.contiguous()
                else:
                    _flatten(f"layers.{i}", self._states[i], tensors, plain)
        sums = json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()})
        about = {"spec": self.attached.spec, "model": self.attached.fingerprint, "state": json.dumps(plain), "checksums": sums}
        temporary = f"{os.fspath(path)}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            save_file(tensors, temporary, metadata=about)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"save: {os.fspath(path)}: cannot be written: {error}") from error
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)


def _checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the numbers as they lie in a file."""
    flat = tensor.contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() > 0 else 0


def _flatten(name: str, value: Any, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
    """Names every tensor and every plain value of a nested state; devices and types follow from the tensors."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.cpu().contiguous()
    elif isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}.{key}", item, tensors, plain)
    elif isinstance(value, (bool, int, float, str)) or value is None:
        plain[name] = value


def _fill(name: str, value: Any, like: torch.Tensor, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> Any:
    """The reverse of _flatten, over the state of a fresh layer."""
    if isinstance(value, dict):
        return {key: _fill(f"{name}.{key}", item, like, tensors, plain) for key, item in value.items()}
    if name in tensors:
        return tensors[name].to(like.device)
    if name.rpartition(".")[2] in ("device", "dtype"):
        return getattr(like, name.rpartition(".")[2])
    return plain.get(name, value)


def _check_device(device: torch.device) -> None:
    if device.type == "cpu" or (device.type == "cuda" and torch.version.cuda is not None and _cuda.device_count() > 0):
        return
    if device.type == "cuda":
        raise InputError(f"attach: expected a package built with CUDA for a model on {device}, found one that computes on the CPU alone")
    raise InputError(f"attach: expected a model on the CPU or on an NVIDIA GPU, found one on {device}")


class Attached:
    """A model whose documents are asked under a spec."""

    def __init__(self, model: PreTrainedModel, spec: str) -> None:
        if not hasattr(model, "set_attn_implementation"):
            raise InputError(f"attach: expected a model of transformers, found {type(model).__name__}")
        self.model: Any = model  # transformers' own types do not know generate()
        self.spec = spec
        config = model.config.get_text_config(decoder=True)
        if not getattr(model, "_supports_sdpa", True) and config.model_type not in _WITH_SINKS:
            raise InputError(f"attach: expected a model that can attend by SDPA, found {config.model_type}, whose attention is another")
        if not model.can_generate():
            raise InputError(f"attach: expected a model that generates text, found {type(model).__name__}")
        _check_device(next(model.parameters()).device)
        modules = self._attentions()
        self._scales = {int(m.layer_idx): float(m.scaling) for m in modules if isinstance(getattr(m, "scaling", None), float)}
        # Before the names in the config, which are one number for layers that may differ (Gemma 4).
        self._head_dims = {int(m.layer_idx): int(m.head_dim) for m in modules if isinstance(getattr(m, "head_dim", None), int)}
        self._groups = {
            int(m.layer_idx): int(m.num_key_value_groups) for m in modules if isinstance(getattr(m, "num_key_value_groups", None), int)
        }
        if getattr(config, "num_attention_heads", None) is None:
            raise InputError(f"attach: expected a model with attention, found {config.model_type}, whose config names no heads")
        self._query_heads = int(config.num_attention_heads)
        self._config = config
        names = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"  # as this transformers calls it
        self._takes_positions = "position_ids" in names
        layers = _full_layers(self.new_cache())  # a wrong spec is an error now, not after the prefill
        frequencies, _ = _rope(model)
        if spec != "full" and frequencies is not None and any(2 * len(frequencies) != self._shape(layer)[1] for layer in layers):
            warnings.warn("lodestone: RoPE turns only a part of each head here, so methods take keys as they are stored", stacklevel=3)
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        before = config._attn_implementation
        self._before = "sdpa" if before == _NAME else before
        model.set_attn_implementation(_NAME)
        if config._attn_implementation != _NAME:  # transformers has said so in a warning alone
            raise InputError(f"attach: expected a model whose attention can be replaced, found {config.model_type}, whose code attends by itself")

    def detach(self) -> None:
        """Gives the model the attention back that it had; its documents cannot be asked then until it is attached again."""
        self.model.set_attn_implementation(self._before)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of weights (a sample of each) and of what the config says of RoPE, windows and norms: keys of another model are refused."""
        digest = hashlib.sha256()
        config = {name: value for name, value in self._config.to_dict().items() if not _OF_NO_KEYS.match(name)}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for tensor in self.model.parameters():
            digest.update(str(list(tensor.shape)).encode())
            flat = tensor.detach().flatten()
            digest.update(flat[:: max(1, flat.numel() // 1024)].to(torch.float32).cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    def ids_here(self, who: str, expected: str, ids: Any) -> torch.Tensor:
        """These token ids [1, n] where the model's embeddings are. InputError unless the model can take them."""
        if not isinstance(ids, torch.Tensor):
            raise InputError(f"{who}: expected a tensor of {expected}, found {type(ids).__name__}")
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
            raise InputError(f"{who}: expected {expected}, found {list(ids.shape)}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"{who}: expected {expected} as int64 or int32, found {ids.dtype}")
        embeddings = self.model.get_input_embeddings()
        here = getattr(embeddings, "weight", next(self.model.parameters())).device
        if ids.device not in (here, torch.device("cpu")):
            raise InputError(f"{who}: expected {expected} on {here}, as the model, or on the CPU, found them on {ids.device}")
        vocab = getattr(embeddings, "num_embeddings", None)
        if int(ids.min()) < 0 or (vocab is not None and int(ids.max()) >= vocab):
            raise InputError(f"{who}: expected token ids from 0 to {(vocab or 0) - 1}, found {int(ids.min())} to {int(ids.max())}")
        return ids.to(here)

    def check_attention(self, who: str) -> None:
        """InputError where the model's attention is not ours any more."""
        _check_attention(who, self._config)

    def _selector(self, layer: int) -> Selector | None:
        if self.spec == "full":
            return None
        kv_heads, head_dim = self._shape(layer)
        frequencies, scaling = _rope(self.model)
        if frequencies is not None and 2 * len(frequencies) != head_dim:
            frequencies, scaling = None, 1.0
        return Selector(
            self.spec,
            self._query_heads,
            kv_heads,
            head_dim,
            layer=layer,
            scale=self._scale(layer),
            inverse_frequencies=frequencies,
            attention_scaling=scaling,
        )

    def _scale(self, layer: int) -> float:
        """Of a layer's scores, by its own word."""
        return self._scales.get(layer) or self._shape(layer)[1] ** -0.5

    def _shape(self, layer: int) -> tuple[int, int]:
        """KV heads and head dimension of a layer."""
        group, head_dim = self._groups.get(layer), self._head_dims.get(layer)
        kv_heads = getattr(self._config, "num_key_value_heads", None) or self._query_heads if group is None else self._query_heads // group
        if head_dim is None:
            head_dim = getattr(self._config, "head_dim", None) or self._config.hidden_size // self._query_heads
        return int(kv_heads), int(head_dim)

    def _device_of(self, layer: int) -> torch.device:
        """Where a layer computes: where its weights are, or with the embeddings where they are offloaded."""
        for module in self.model.get_decoder().modules():
            if getattr(module, "layer_idx", None) == layer:
                for parameter in module.parameters():
                    if parameter.device.type != "meta":
                        return torch.device(parameter.device)
        return torch.device(self.model.get_input_embeddings().weight.device)

    def _attentions(self) -> list[Any]:
        """The modules that say which layer they are of."""
        return [module for module in self.model.get_decoder().modules() if hasattr(module, "layer_idx")]

    def _keys_move(self) -> bool:
        """Whether layers attend to another's keys on another device, to which transformers copies what the cache returned: all must be there."""
        modules = self._attentions()
        if not any(getattr(module, "is_kv_shared_layer", False) for module in modules):
            return False
        return len({self._device_of(int(module.layer_idx)) for module in modules}) > 1

    def new_cache(self, tokens: int = 0) -> Cache:
        """A cache whose full-attention layers can be indexed, with room for so many; the other layers are transformers' own."""
        cache = DynamicCache(config=self.model.config)
        if len(cache.layers) == 0:
            cache.layers = [DynamicLayer() for _ in range(self.model.config.num_hidden_layers)]
        full = 0
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                selector = self._selector(i)
                if selector is not None and full < selector.dense_layers:
                    selector = None
                cache.layers[i] = LodestoneLayer(selector, tokens, self._config, self._scale(i))
                full += 1
        if full == 0:
            raise InputError(f"attach: expected a model with full-attention layers, found none among {len(cache.layers)}")
        return cache

    @torch.inference_mode(False)  # whose tensors could not be written to outside of it
    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, chunk: int | None = None) -> HfDocument:
        """Prefills ids [1, tokens] with dense attention in chunks of so many tokens (512, on a GPU 1,024), and indexes them.

        InputError for other shapes, and ids that the model does not have.
        """
        input_ids = self.ids_here("read", "ids [1, tokens] of one sequence", input_ids)
        if chunk is None:
            chunk = 512 if input_ids.device.type == "cpu" else 1024
        if chunk < 1:
            raise InputError(f"read: expected a chunk of 1 token or more, found {chunk}")
        cache = self.new_cache(input_ids.shape[1])
        for part in input_ids.split(chunk, dim=1):
            self._forward(part, cache, logits_to_keep=1)
            self._expect_attended(cache)
        self._index(cache)
        return HfDocument(self, input_ids, cache)

    def _forward(self, input_ids: torch.Tensor, cache: Cache, **more: Any) -> Any:
        """One pass over ids [1, T] behind what is in the cache. Some models (Bamba) count positions from 0 where nobody says them."""
        if self._takes_positions:
            begin = cache.get_seq_length()
            more["position_ids"] = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)[None]
        return self.model(input_ids=input_ids, use_cache=True, **{self.cache_argument: cache}, **more)

    def _expect_attended(self, cache: Cache) -> None:
        """InputError where layers that a model has filled were not attended to by us: its own code would be dense, or see new rows alone."""
        for layer in _filled(cache):
            if layer.selector is not None and not layer.attended:
                raise InputError(
                    f"attach: expected a model whose attention can be replaced, found {self._config.model_type}, whose code attends by itself"
                )

    @torch.inference_mode(False)
    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor, sparse_tokens: int) -> torch.Tensor:
        """Logits [1, T, V] of ids [1, T] whose last `sparse_tokens` attend by the spec, the ones before densely.

        InputError for other shapes, ids that the model does not have, and sparse_tokens below 1.
        """
        input_ids = self.ids_here("logits", "ids [1, T]", input_ids)
        self.check_attention("logits")
        if sparse_tokens < 1:
            raise InputError(f"logits: expected sparse_tokens of 1 or more, found {sparse_tokens}")
        dense = input_ids.shape[1] - sparse_tokens
        if dense < 1:
            return self.model(input_ids=input_ids).logits
        cache = self.new_cache(dense)
        first = self._forward(input_ids[:, :dense], cache).logits
        self._expect_attended(cache)
        self._index(cache)
        last = self._forward(input_ids[:, dense:], cache).logits
        return torch.cat([first, last], dim=1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, path: str | os.PathLike[str]) -> HfDocument:
        """Opens what HfDocument.save wrote for this model, and indexes it. InputError for a file of another model, or not whole."""
        from safetensors import SafetensorError, safe_open

        where = os.fspath(path)
        try:
            with safe_open(where, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
                about = file.metadata() or {}
            plain = json.loads(about.get("state", "{}"))
            sums = json.loads(about.get("checksums", "{}"))  # files of earlier versions have none
        except (OSError, SafetensorError, ValueError) as error:
            raise InputError(f"load: {where}: expected a document as HfDocument.save writes it, found: {error}") from error
        for name in sums:
            if name not in tensors or _checksum(tensors[name]) != sums[name]:
                raise InputError(f"load: {where}: '{name}' is damaged (its checksum differs): copy the file again, or read the text again")
        cache = self.new_cache()
        if "input_ids" not in tensors or any(f"layers.{i}.keys" not in tensors for i in _full_layers(cache)):
            raise InputError(f"load: {where}: expected the tokens and keys of this model's {len(cache.layers)} layers, found others")
        if about.get("model") != self.fingerprint:
            raise InputError(f"load: {where}: expected a document of this model, found keys of another: weights or RoPE differ")
        input_ids = self.ids_here(f"load: {where}", "the document's ids [1, tokens]", tensors["input_ids"])
        tried = self.new_cache()
        self._forward(input_ids[:, :1], tried)
        self._expect_attended(tried)
        for i, layer in enumerate(cache.layers):
            if not isinstance(layer, LodestoneLayer):
                state = {name: None for name in _names(f"layers.{i}.", tensors, plain)} | vars(layer)
                like = torch.empty(0, dtype=tensors[f"layers.{_full_layers(cache)[0]}.keys"].dtype, device=self._device_of(i))
                layer.__dict__.update({name: _fill(f"layers.{i}.{name}", value, like, tensors, plain) for name, value in state.items()})
                continue
            if layer.selector is not None and layer.selector.wants_prompt:
                warnings.warn(f"lodestone: '{self.spec}' learns from the prefill's queries, which the file does not hold", stacklevel=2)
            keys, values = tensors[f"layers.{i}.keys"], tensors.get(f"layers.{i}.values")
            kv_heads, head_dim = self._shape(i)
            expected = [1, kv_heads, tensors["input_ids"].shape[1], head_dim]
            if list(keys.shape) != expected:
                raise InputError(f"load: {where}: expected keys {expected} in layer {i}, found {list(keys.shape)}")
            if values is None or list(values.shape) != expected:
                raise InputError(f"load: {where}: expected values as many as keys in layer {i}, found others")
            if keys.dtype != self.model.dtype:
                raise InputError(f"load: {where}: expected keys of {self.model.dtype}, as the model is loaded, found {keys.dtype}")
            layer.update(keys.to(self._device_of(i)), values.to(self._device_of(i)))
        self._index(cache)
        return HfDocument(self, input_ids, cache)

    def _index(self, cache: Cache) -> None:
        layers = _filled(cache)
        if len(layers) == 0:
            raise InputError("lodestone: expected a model that fills the cache which it is given, found one that leaves it empty")
        leave = not self._keys_move()
        for layer in layers:
            if layer.keys.is_cuda:
                torch.cuda.empty_cache()  # PyTorch keeps what the last layer's rows had; this one's blocks need it
            layer.index(leave)
        sparse = [(layer, layer.selector) for layer in layers if layer.selector is not None]
        if sparse:
            selectors, keys, values = zip(*((selector, layer.keys[0], layer.values[0]) for layer, selector in sparse))
            finish(selectors, keys, values, stream=_stream(keys[0]))


def _filled(cache: Cache) -> list[LodestoneLayer]:
    """Its layers but for those that use another's keys (Gemma 4) and leave their own place empty."""
    return [layer for layer in cache.layers if isinstance(layer, LodestoneLayer) and layer.get_seq_length() > 0]


def _full_layers(cache: Cache) -> list[int]:
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, LodestoneLayer)]


def _names(prefix: str, *tables: dict[str, Any]) -> set[str]:
    """The attributes of one layer that a file tells of."""
    return {name[len(prefix) :].partition(".")[0] for table in tables for name in table if name.startswith(prefix)}


def attach(model: PreTrainedModel, spec: str) -> Attached:
    """Makes `model` attend by `spec` ('kmeans:probes=16', 'full', ...) after documents that Attached.read has indexed.

    The model computes as before everywhere else: without a document its attention is SDPA, or its own where it has sinks (gpt-oss).
    InputError for an unknown spec, a model on a device that we do not compute on, and attention that neither SDPA nor we can
    compute (soft caps); a warning where RoPE turns only a part of each head.
    """
    return Attached(model, spec)


def pipeline(model: PreTrainedModel, tokenizer: Any, attention: str = "full") -> Callable[..., dict[str, Any]]:
    """A function in kvpress's call shape: (context, question="...") or (context, questions=[...]).

    The context is read once, inside the tokenizer's chat template where it has one; answers are greedy.
    """
    attached = attach(model, attention)

    def run(context: str, questions: Sequence[str] = (), question: str | None = None, max_new_tokens: int = 50) -> dict[str, Any]:
        asked = [question] if question is not None else _many(questions)
        if not asked:
            raise InputError("pipeline: expected question='...' or questions=[...], found neither")
        before, between, after = _frame(tokenizer)
        document = attached.read(_encode(tokenizer, before, context))
        answers = []
        for text in asked:
            new = document.ask(_encode(tokenizer, between, text, after), max_new_tokens=max_new_tokens)
            answers.append(tokenizer.decode(new, skip_special_tokens=True).strip())
        return {"answer": answers[0]} if question is not None else {"answers": answers}

    return run


def _frame(tokenizer: Any) -> tuple[str, str, str]:
    """What stands before a context, between it and a question, and behind the question."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.bos_token or "", "\n\nQuestion: ", "\nAnswer:"
    marks = "<lodestone-context>", "<lodestone-question>"
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": marks[0] + "\n\n" + marks[1]}], tokenize=False, add_generation_prompt=True
    )
    before, _, rest = text.partition(marks[0])
    between, _, after = rest.partition(marks[1])
    return before, between, after


def _encode(tokenizer: Any, *parts: str) -> torch.Tensor:
    """Ids [1, n] of the template's parts and, every second one, a text of others, in which nothing is a special token."""
    ids: list[int] = []
    for i, part in enumerate(parts):
        ids += tokenizer(part, add_special_tokens=False, split_special_tokens=i % 2 == 1).input_ids
    return torch.tensor([ids])
