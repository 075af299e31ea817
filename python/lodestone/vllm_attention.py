# SPDX-License-Identifier: Apache-2.0
"""Attention of vLLM's decode by retrieval: long contexts are indexed once, and each generated token reads what a method chooses.

    LLM(MODEL, enforce_eager=True, attention_backend="CUSTOM",
        additional_config={"lodestone": {"attention": "kmeans:probes=32", "min_tokens": 4096}})

vLLM finds the backend by the package's entry point (vllm.general_plugins), on the CPU, which knows no other name, in the place of
its own. Prompts, requests below `min_tokens` and layers with a window, sinks or a soft cap go through vLLM's own backend, which is
the base of this one and owns the cache. A request's keys and values are copied out of it once, to where a method indexes them, and
then token by token. Written against vLLM 0.32 and tried on its CPU wheel; on a GPU untried.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.dlpack
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from . import InputError, Selector
from .vllm import layer_index, read_rows

__all__ = ["LodestoneAttentionBackend"]


def _platforms_own() -> Any:
    """The backend that vLLM would take."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend


_Base: Any = _platforms_own()
_BaseImpl: Any = _Base.get_impl_cls()
_BaseBuilder: Any = _Base.get_builder_cls()


@dataclass(frozen=True)
class Options:
    """additional_config["lodestone"] of vLLM's configuration."""

    attention: str
    min_tokens: int = 4096  # of a context; shorter ones are attended to whole
    max_requests: int = 64  # whose indexes are kept

    @classmethod
    def of(cls, vllm_config: Any) -> Options | None:
        """InputError for names that there are not; None where nothing is asked for."""
        given = dict((vllm_config.additional_config or {}).get("lodestone") or {})
        if not given:
            return None
        unknown = set(given) - {"attention", "min_tokens", "max_requests"}
        if unknown or "attention" not in given:
            raise InputError(
                "lodestone.vllm_attention: expected 'attention', and perhaps 'min_tokens' and 'max_requests', in "
                f"additional_config['lodestone'], found {sorted(given)}"
            )
        return cls(**given)


@dataclass
class Decoded:
    """A request of a step that attends by retrieval."""

    number: int  # no other request has it
    token: int  # its place among the step's tokens
    tokens: int  # of its context, that token included
    blocks: list[int]  # of vLLM's cache


@dataclass
class Step:
    decoded: list[Decoded]
    whole: bool  # the step has no other tokens
    live: set[int] = field(default_factory=set)


class Requests:
    """Which requests of a step were in the one before: vLLM names them to a backend by nothing but their blocks.

    A request goes on where its context has one token more and its blocks begin with those it had. Blocks that a prompt is written
    into end the requests that had them.
    """

    def __init__(self, most: int, block_size: int) -> None:
        self._most, self._block_size = most, block_size
        self._known: OrderedDict[int, tuple[list[int], int]] = OrderedDict()  # number: blocks, tokens
        self._numbers = itertools.count()

    def follow(self, blocks: list[int], tokens: int) -> int:
        blocks = blocks[: -(-tokens // self._block_size)]
        for number, (had, count) in self._known.items():
            if count == tokens - 1 and blocks[: len(had)] == had:
                break
        else:
            number = next(self._numbers)
        self._known[number] = (blocks, tokens)
        self._known.move_to_end(number)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return number

    def written(self, blocks: set[int]) -> None:
        for number, (had, _) in list(self._known.items()):
            if not blocks.isdisjoint(had):
                del self._known[number]

    def live(self) -> set[int]:
        return set(self._known)


def step_of(requests: Requests, starts: list[int], tokens: list[int], blocks: torch.Tensor, min_tokens: int, block_size: int) -> Step:
    """Of a batch's first tokens [requests + 1], contexts' lengths [requests] and blocks [requests, most]."""
    decoded = []
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    for i, count in enumerate(counts):
        if count > 1:
            first, last = (tokens[i] - count) // block_size, -(-tokens[i] // block_size)
            requests.written(set(blocks[i, first:last].tolist()))
    for i, count in enumerate(counts):
        if count == 1 and tokens[i] >= min_tokens:
            own = blocks[i, : -(-tokens[i] // block_size)].tolist()
            decoded.append(Decoded(requests.follow(own, tokens[i]), starts[i], tokens[i], own))
    return Step(decoded, len(decoded) == sum(count > 0 for count in counts), requests.live())


class LodestoneMetadataBuilder(_BaseBuilder):  # type: ignore[misc]
    """vLLM's own metadata, and which requests attend by retrieval."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._options = Options.of(vllm_config)
        self._block_size = int(kv_cache_spec.block_size)
        self._requests = Requests(self._options.max_requests if self._options else 0, self._block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.lodestone = None
        if self._options is not None and common_attn_metadata.causal is True:
            metadata.lodestone = step_of(
                self._requests,
                common_attn_metadata.query_start_loc_cpu.tolist(),
                common_attn_metadata.seq_lens.tolist(),
                common_attn_metadata.block_table_tensor,
                self._options.min_tokens,
                self._block_size,
            )
        return metadata


class Context:
    """A request's keys and values in one layer, [Hkv, room, d], and a method's index over them."""

    def __init__(self, selector: Selector, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [tokens, Hkv, d], those of the token that is decoded last."""
        self._selector, self._tokens = selector, 0
        self._k = self._v = keys.new_empty(keys.shape[1], 0, keys.shape[2])
        self.append(keys[:-1], values[:-1])
        selector.build(self._k[:, : self._tokens], self._v[:, : self._tokens], stream=self._stream())
        self.append(keys[-1:], values[-1:])

    @property
    def tokens(self) -> int:
        return self._tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """[tokens, Hkv, d]"""
        end = self._tokens + keys.shape[0]
        if end > self._k.shape[1]:
            self._k, self._v = (self._grown(x, end) for x in (self._k, self._v))
        self._k[:, self._tokens : end] = keys.transpose(0, 1)
        self._v[:, self._tokens : end] = values.transpose(0, 1)
        self._tokens = end

    def _grown(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        grown = x.new_empty(x.shape[0], tokens + tokens // 8 + 256, x.shape[2])
        grown[:, : self._tokens] = x[:, : self._tokens]
        return grown

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self._k.device) if self._k.is_cuda else None

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Of the last token, [Hq, d] in float32."""
        q = query.float()[None].contiguous()
        k, v = self._k[:, : self._tokens], self._v[:, : self._tokens]
        output = self._selector.attend(q, self._tokens - 1, k, v, stream=self._stream())
        return torch.utils.dlpack.from_dlpack(output)[0]


class LodestoneAttentionImpl(_BaseImpl):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = Options.of(get_current_vllm_config())
        self._contexts: dict[int, Context] = {}
        self._sparse: bool | None = None  # whether this layer attends by retrieval; known with its number

    def _is_plain(self) -> bool:
        """Nothing but keys before a token and their softmax."""
        return (
            self.sliding_window in (None, -1, (-1, -1))
            and self.alibi_slopes is None
            and not self.logits_soft_cap
            and getattr(self, "sinks", None) is None
            and self.attn_type == AttentionType.DECODER
            and getattr(self, "kv_sharing_target_layer_name", None) is None
            and not str(self.kv_cache_dtype).startswith("fp8")
        )

    def _selector(self, layer: Any) -> Selector:
        assert self._options is not None
        selector = Selector(
            self._options.attention, self.num_heads, self.num_kv_heads, self.head_size, layer_index(layer.layer_name), self.scale
        )
        if selector.wants_prompt:
            raise InputError(
                "lodestone.vllm_attention: expected a method that needs keys alone, such as kmeans, quest or topk, found "
                f"'{self._options.attention}', which listens to the prompt's queries"
            )
        return selector

    def _is_sparse(self, layer: Any) -> bool:
        if self._sparse is None:
            self._sparse = (
                self._options is not None and self._is_plain() and layer_index(layer.layer_name) >= self._selector(layer).dense_layers
            )
        return self._sparse

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        step: Step | None = getattr(attn_metadata, "lodestone", None)
        if step is None or not step.decoded or not self._is_sparse(layer):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if not step.whole:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        self._contexts = {number: context for number, context in self._contexts.items() if number in step.live}
        for request in step.decoded:
            attended = self._context(layer, request, key, value, kv_cache).attend(query[request.token])
            output[request.token].copy_(attended.reshape(output[request.token].shape))
        return output

    def _context(self, layer: Any, request: Decoded, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> Context:
        """With the token's own key and value."""
        context = self._contexts.get(request.number)
        if context is not None and context.tokens == request.tokens - 1:
            own = slice(request.token, request.token + 1)
            context.append(key[own], value[own])
            return context
        keys, values = read_rows(layer, kv_cache, request.blocks, request.tokens)
        context = self._contexts[request.number] = Context(self._selector(layer), keys, values)
        return context


class LodestoneAttentionBackend(_Base):  # type: ignore[misc]
    """The platform's own backend, but for decoded tokens of long contexts."""

    @staticmethod
    def get_impl_cls() -> type:
        return LodestoneAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        return LodestoneMetadataBuilder
