# SPDX-License-Identifier: Apache-2.0
"""A KV connector of vLLM that serves `.lode` documents, and saves prompts as such. Written against vLLM 0.32.

    LLM(MODEL, kv_transfer_config={
        "kv_connector": "LodestoneConnector", "kv_connector_module_path": "lodestone.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"model": MODEL, "documents": ["book.lode"], "save": "folder"}})

A prompt that begins with a document's tokens takes their keys and values from its file, whole blocks of them, and vLLM computes
the rest. With `save`, each prompt that no document begins becomes one, FOLDER/HASH.lode; `specs` names the methods it is then
indexed for. The model is the same folder on both sides: full-attention layers, keys after RoPE, one GPU or the CPU.

Rows go into vLLM's cache by its backend's own function, so that every layout is right, and come out of it from where that function
puts numbers which tell their own place.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from . import Document, InputError, Model

__all__ = ["LodestoneConnector"]


@dataclass
class Load:
    """Rows [begin, end) of a document into a request's blocks."""

    path: str
    begin: int
    end: int
    blocks: list[int]


@dataclass
class Save:
    """A prompt that is complete after this step."""

    tokens: list[int]
    blocks: list[int]


@dataclass
class Work(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class _Prompt:
    """A request whose prompt is being computed, and is to be saved."""

    tokens: list[int]
    blocks: list[int]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    differ = np.nonzero(np.asarray(a[:n]) != np.asarray(b[:n]))[0]
    return int(differ[0]) if len(differ) else n


def slots_of(blocks: list[int], block_size: int, begin: int, end: int) -> torch.Tensor:
    """Where rows [begin, end) of a request lie in the paged cache, int64 [end - begin]."""
    rows = torch.arange(begin, end)
    return torch.tensor(blocks, dtype=torch.int64)[rows // block_size] * block_size + rows % block_size


def layer_index(name: str) -> int:
    """Of "model.layers.3.self_attn.attn"."""
    found = re.search(r"layers\.(\d+)\.", name)
    if found is None:
        raise InputError(f"lodestone.vllm: expected a layer's name with its number, found '{name}'")
    return int(found.group(1))


def document_rows(document: Document, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, Hkv, d] of a layer, in the document's type."""
    heads = document.kv(layer)
    bf16 = document.kv_type == "bf16"

    def together(which: int) -> torch.Tensor:
        rows = torch.from_numpy(np.stack([head[which][begin:end] for head in heads], axis=1))
        return rows.view(torch.bfloat16) if bf16 else rows

    return together(0), together(1)


def _write(layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows [tokens, Hkv, d] to their slots, as vLLM's backend itself writes them."""
    keys, values = (x.to(device=cache.device, dtype=cache.dtype).contiguous() for x in (keys, values))
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(cache.device))


def _places(layer: Any, cache: torch.Tensor, heads: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys and values [block size, Hkv, d] lie in a block, as indices into it [block size, Hkv, d] each.

    Found by having numbers written, digit by digit, which every type of a cache holds exactly (16 values a digit): each backend, and on the CPU each
    kind of processor, has a layout of its own.
    """
    block_size, count = cache.shape[2], cache.shape[2] * heads * d
    slots = torch.arange(block_size)
    number = torch.arange(1, 2 * count + 1).view(2, block_size, heads, d)  # 0 = nothing was written here
    found = torch.zeros(cache[0].numel(), dtype=torch.int64)
    for digit in range(6):
        part = number // 16**digit % 16
        scratch = torch.zeros_like(cache[:1])
        _write(layer, part[0], part[1], scratch, slots)
        found += scratch.flatten().to(torch.float64).round().long().cpu() * 16**digit
    at = torch.full((2 * count + 1,), -1, dtype=torch.int64)
    at[found.clamp(0, 2 * count)] = torch.arange(found.numel())
    if bool((at[1:] < 0).any()):
        raise InputError(
            "lodestone.vllm: expected a KV cache that holds every number of keys and values once, as it is, found another kind, "
            f"of shape {list(cache.shape)} and {cache.dtype}; it can be served to, but not saved from"
        )
    places = at[1:].view(2, block_size, heads, d).to(cache.device)
    return places[0], places[1]


def read_rows(layer: Any, cache: torch.Tensor, blocks: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's keys and values [tokens, Hkv, d] from a paged cache [blocks, Hkv, block size, 2 d] of any layout within a block.

    InputError for one that does not hold the numbers as they are.
    """
    heads, d = cache.shape[1], cache.shape[3] // 2
    chosen = cache[torch.tensor(blocks, dtype=torch.int64, device=cache.device)].flatten(1)
    keys, values = (chosen[:, at.flatten()].view(-1, heads, d)[:tokens] for at in _places(layer, cache, heads, d))
    return keys, values


def _on_host(rows: torch.Tensor) -> np.ndarray:
    """Rows [tokens, Hkv, d] as [Hkv, tokens, d], float32 where the cache holds that, else float16."""
    kept = torch.float32 if rows.dtype == torch.float32 else torch.float16
    return rows.to(kept).cpu().transpose(0, 1).contiguous().numpy()


class LodestoneConnector(KVConnectorBase_V1):
    """Both sides of the connector: the scheduler's, which finds documents, and the worker's, which moves rows."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        given = vllm_config.kv_transfer_config.get_from_extra_config
        path = given("model", None)
        if path is None:
            raise InputError("lodestone.vllm: expected 'model', a model's folder, in kv_connector_extra_config, found none")
        self._block_size = int(vllm_config.cache_config.block_size)
        self._save_folder: str | None = given("save", None)
        self._specs: list[str] = list(given("specs", []))
        self._model = Model(path)
        self._documents = {name: Document.load(name, self._model) for name in given("documents", [])}
        self._tokens = {name: document.token_ids for name, document in self._documents.items()}
        self._matched: dict[str, tuple[str, int, int]] = {}  # request: document, begin, end
        self._loads: list[Load] = []
        self._prompts: dict[str, _Prompt] = {}
        self._layers: dict[str, Any] = {}

    # ---- The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        prompt = list(request.prompt_token_ids or [])
        matches = {name: common_prefix(prompt, tokens) for name, tokens in self._tokens.items()}
        if not matches:
            return 0, False
        name = max(matches, key=lambda n: matches[n])
        # vLLM computes at least the prompt's last token, and counts in whole blocks.
        end = min(matches[name], len(prompt) - 1) // self._block_size * self._block_size
        if end <= num_computed_tokens:
            return 0, False
        self._matched[request.request_id] = (name, num_computed_tokens, end)
        return end - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        match = self._matched.pop(request.request_id, None)
        if match is not None and num_external_tokens > 0:
            name, begin, _ = match
            self._loads.append(Load(name, begin, begin + num_external_tokens, list(blocks.get_block_ids()[0])))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work = Work(loads=self._loads)
        self._loads = []
        if self._save_folder is None:
            return work
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids or [])
            if max((common_prefix(tokens, known) for known in self._tokens.values()), default=0) < self._block_size:
                self._prompts[new.req_id] = _Prompt(tokens, list(new.block_ids[0]))
                self._finish(new.req_id, new.num_computed_tokens + scheduled[new.req_id], work)
        cached = scheduler_output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            if request not in self._prompts:
                continue
            blocks = list((cached.new_block_ids[i] or ([],))[0])
            prompt = self._prompts[request]
            prompt.blocks = blocks if request in cached.resumed_req_ids else prompt.blocks + blocks
            self._finish(request, cached.num_computed_tokens[i] + scheduled[request], work)
        return work

    def _finish(self, request: str, computed: int, work: Work) -> None:
        """Hands over a prompt that this step completes."""
        prompt = self._prompts[request]
        if computed >= len(prompt.tokens):
            work.saves.append(Save(prompt.tokens, prompt.blocks))
            del self._prompts[request]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._prompts.pop(request.request_id, None)
        self._matched.pop(request.request_id, None)
        return False, None

    # ---- The worker's side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._layers = {
            name: layer for name, layer in forward_context.no_compile_layers.items() if getattr(layer, "kv_cache", None) is not None
        }
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        for load in work.loads:
            slots = slots_of(load.blocks, self._block_size, load.begin, load.end)
            for name, layer in self._layers.items():
                keys, values = document_rows(self._documents[load.path], layer_index(name), load.begin, load.end)
                _write(layer, keys, values, layer.kv_cache, slots)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return  # the cache holds the prompt in wait_for_save, which comes after the last layer

    def wait_for_save(self) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        for save in work.saves:
            blocks = save.blocks[: -(-len(save.tokens) // self._block_size)]
            keys, values = [], []
            for name in sorted(self._layers, key=layer_index):
                layer = self._layers[name]
                k, v = read_rows(layer, layer.kv_cache, blocks, len(save.tokens))
                keys.append(_on_host(k))
                values.append(_on_host(v))
            document = Document.from_keys(self._model, save.tokens, keys, values, specs=self._specs)
            name = hashlib.sha256(np.asarray(save.tokens, np.int32).tobytes()).hexdigest()[:32]
            assert self._save_folder is not None
            os.makedirs(self._save_folder, exist_ok=True)
            document.save(os.path.join(self._save_folder, name + ".lode"), overwrite=True)
