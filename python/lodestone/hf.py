# SPDX-License-Identifier: Apache-2.0
"""The attention methods for models of transformers (5.x), on the CPU.

    attached = lodestone.hf.attach(model, "kmeans:probes=16,window=255")
    document = attached.read(tokenizer(text, return_tensors="pt").input_ids)
    tokens = document.ask(tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids, max_new_tokens=32)

A document is prefilled with the model's own SDPA attention and indexed once. Questions and answers then attend sparsely in every
layer. After each answer the cache is cut back to the document. Models with sliding-window or linear layers are refused.

How it works: `attach` registers an attention function and a mask function named "lodestone". The index lives in the cache's
layer (`LodestoneLayer`), which marks the key tensor that it returns, so that the attention function finds it.
"""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from . import InputError, Selector, finish

__all__ = ["Attached", "HfDocument", "LodestoneLayer", "attach"]

_NAME = "lodestone"
_MARK = "_lodestone_layer"


class LodestoneLayer(DynamicLayer):
    """A cache layer whose rows lie in one buffer that doubles when it is full: appending copies new rows alone."""

    def __init__(self, selector: Selector | None = None) -> None:
        super().__init__()
        self.selector = selector
        self.indexed = 0  # tokens of the document; 0 = still reading, attention is dense
        self._k: torch.Tensor | None = None  # [B, Hkv, capacity, d]
        self._v: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        tokens = old + key_states.shape[-2]
        self._reserve(tokens, key_states, value_states)
        assert self._k is not None and self._v is not None
        self._k[:, :, old:tokens] = key_states
        self._v[:, :, old:tokens] = value_states
        self.keys, self.values = self._k[:, :, :tokens], self._v[:, :, :tokens]
        setattr(self.keys, _MARK, self)
        return self.keys, self.values

    def _reserve(self, tokens: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._k is not None and tokens <= self._k.shape[2]:
            return
        capacity = max(256, 2 * tokens if self._k is not None else tokens + 256)
        old = self.get_seq_length()
        for name, like in (("_k", k), ("_v", v)):
            grown = torch.empty((*like.shape[:2], capacity, like.shape[-1]), dtype=like.dtype, device=like.device)
            before = getattr(self, name)
            if before is not None:
                grown[:, :, :old] = before[:, :, :old]
            setattr(self, name, grown)

    def cut(self, tokens: int) -> None:
        """Back to the first `tokens` rows; their memory stays for reuse."""
        if self._k is None or self._v is None or tokens >= self.get_seq_length():
            return
        self.keys, self.values = self._k[:, :, :tokens], self._v[:, :, :tokens]
        if self.selector is not None:
            self.selector.roll_back(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        self.cut(self.get_seq_length() - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise InputError("lodestone: expected greedy decoding or sampling, found beam search, which reorders the cache")

    def index(self) -> None:
        """Declares the rows so far the document and indexes them."""
        self.indexed = self.get_seq_length()
        if self.selector is not None:
            if self.keys.shape[0] != 1:
                raise InputError(f"lodestone: expected one sequence to index, found a batch of {self.keys.shape[0]}")
            self.selector.build(self.keys[0], self.values[0])


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, T, d], key and value [B, Hkv, S, d] -> [B, T, Hq, d]."""
    layer: LodestoneLayer | None = getattr(key, _MARK, None)
    selector = layer.selector if layer is not None else None
    if layer is None or selector is None or layer.indexed == 0:
        if selector is not None and selector.wants_prompt and query.shape[0] == 1:
            tokens = query.shape[2]
            selector.observe(_rows(query), _rows(key[:, :, -tokens:]), _rows(value[:, :, -tokens:]), key.shape[2] - tokens)
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    if query.shape[0] != 1:
        raise InputError(f"lodestone: expected one sequence after an indexed document, found a batch of {query.shape[0]}")
    output_rows: np.ndarray = selector.attend(_rows(query), key.shape[2] - query.shape[2], key[0], value[0])
    return torch.from_numpy(output_rows).to(query.dtype)[None], None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[1, H, T, d] -> float32 [T, H, d], contiguous."""
    return x[0].transpose(0, 1).to(torch.float32).contiguous().detach()


def _inverse_frequencies(model: PreTrainedModel, head_dim: int) -> tuple[np.ndarray | None, float]:
    """RoPE's radians per position [d/2] of full-attention layers, and the attention scaling; None when heads turn in part."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    for prefix in ("full_attention_", ""):
        frequencies = getattr(rotary, prefix + "inv_freq", None)
        if frequencies is not None:
            scaling = float(getattr(rotary, prefix + "attention_scaling", 1.0))
            if 2 * frequencies.numel() == head_dim:
                return frequencies.detach().to(torch.float32).cpu().numpy(), scaling
            break
    warnings.warn("lodestone: RoPE turns only a part of each head here, so methods take keys as they are stored", stacklevel=3)
    return None, 1.0


class HfDocument:
    """A prefilled and indexed prompt of one sequence."""

    def __init__(self, attached: Attached, input_ids: torch.Tensor, cache: Cache) -> None:
        self.attached = attached
        self.input_ids = input_ids  # [1, tokens]
        self.cache = cache

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[1])

    def ask(self, question_ids: torch.Tensor, max_new_tokens: int = 64, **generate: Any) -> torch.Tensor:
        """Generates after the document and the question [1, n]; returns the new tokens [m] and rolls the cache back."""
        if question_ids.ndim != 2 or question_ids.shape[0] != 1 or question_ids.shape[1] == 0:
            raise InputError(f"ask: expected question ids [1, n], n > 0, found {list(question_ids.shape)}")
        if generate.get("num_beams", 1) != 1:
            raise InputError("lodestone: expected greedy decoding or sampling, found beam search, which reorders the cache")
        ids = torch.cat([self.input_ids, question_ids], dim=1)
        try:
            generate.setdefault("do_sample", False)
            output = self.attached.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                **{self.attached.cache_argument: self.cache},
                **generate,
            )
        finally:
            self.roll_back()
        return output[0, ids.shape[1] :]

    def roll_back(self) -> None:
        """Cuts the cache back to the document."""
        surplus = self.cache.get_seq_length() - self.tokens
        if surplus > 0:
            self.cache.crop(-surplus)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes tokens, keys and values (safetensors, whole or not at all); indexes are built again by Attached.load."""
        from safetensors.torch import save_file

        tensors = {"input_ids": self.input_ids.contiguous()}
        for i, layer in enumerate(self.cache.layers):
            if not isinstance(layer, LodestoneLayer):
                raise InputError("save: expected a model of full-attention layers alone; others keep a state that is not saved")
            tensors[f"layers.{i}.keys"] = layer.keys.contiguous()
            tensors[f"layers.{i}.values"] = layer.values.contiguous()
        temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
        try:
            save_file(tensors, temporary, metadata={"spec": self.attached.spec})
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)


class Attached:
    """A model whose documents are asked under a spec."""

    def __init__(self, model: PreTrainedModel, spec: str) -> None:
        self.model = model
        self.spec = spec
        config = model.config.get_text_config(decoder=True)
        self._query_heads = int(config.num_attention_heads)
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or self._query_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._query_heads)
        if next(model.parameters()).device.type != "cpu":
            raise InputError("attach: expected a model on the CPU, found one on another device")
        self._frequencies, self._attention_scaling = _inverse_frequencies(model, self._head_dim)
        names = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"  # as this transformers calls it
        self._selector(0)  # a wrong spec is an error now, not after the prefill
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)

    def _selector(self, layer: int) -> Selector | None:
        if self.spec == "full":
            return None
        return Selector(
            self.spec,
            self._query_heads,
            self._kv_heads,
            self._head_dim,
            layer=layer,
            inverse_frequencies=self._frequencies,
            attention_scaling=self._attention_scaling,
        )

    def new_cache(self) -> Cache:
        """A cache whose full-attention layers can be indexed."""
        cache = DynamicCache(config=self.model.config)
        if len(cache.layers) == 0:
            cache.layers = [DynamicLayer() for _ in range(self.model.config.num_hidden_layers)]
        full = 0
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                selector = self._selector(i)
                if selector is not None and full < selector.dense_layers:
                    selector = None
                cache.layers[i] = LodestoneLayer(selector)
                full += 1
        if full != len(cache.layers):
            raise InputError(
                f"attach: expected a model of full-attention layers alone, found {len(cache.layers) - full} others of {len(cache.layers)}"
            )
        return cache

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, chunk: int = 512) -> HfDocument:
        """Prefills ids [1, tokens] with dense attention in chunks, and indexes them."""
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise InputError(f"read: expected ids [1, tokens] of one sequence, found {list(input_ids.shape)}")
        cache = self.new_cache()
        for part in input_ids.split(chunk, dim=1):
            self.model(input_ids=part, use_cache=True, logits_to_keep=1, **{self.cache_argument: cache})
        self._index(cache)
        return HfDocument(self, input_ids, cache)

    def load(self, path: str | os.PathLike[str]) -> HfDocument:
        """Opens what HfDocument.save wrote for this model, and indexes it."""
        from safetensors.torch import load_file

        tensors = load_file(path)
        cache = self.new_cache()
        for i, layer in enumerate(cache.layers):
            if f"layers.{i}.keys" not in tensors or not isinstance(layer, LodestoneLayer):
                raise InputError(f"load: {os.fspath(path)}: expected keys of layer {i} for this model, found none")
            if layer.selector is not None and layer.selector.wants_prompt:
                warnings.warn(f"lodestone: '{self.spec}' learns from the prefill's queries, which the file does not hold", stacklevel=2)
            layer.update(tensors[f"layers.{i}.keys"], tensors[f"layers.{i}.values"])
        self._index(cache)
        return HfDocument(self, tensors["input_ids"], cache)

    def _index(self, cache: Cache) -> None:
        layers = [layer for layer in cache.layers if isinstance(layer, LodestoneLayer)]
        for layer in layers:
            layer.index()
        sparse = [(layer, layer.selector) for layer in layers if layer.selector is not None]
        if sparse:
            finish([selector for _, selector in sparse], [layer.keys[0] for layer, _ in sparse], [layer.values[0] for layer, _ in sparse])


def attach(model: PreTrainedModel, spec: str) -> Attached:
    """Makes `model` attend by `spec` ('kmeans:probes=16', 'full', ...) after documents that Attached.read has indexed.

    The model computes as before everywhere else: without an indexed cache its attention is SDPA.
    """
    return Attached(model, spec)
