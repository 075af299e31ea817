# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness on models of transformers under an attention spec.

    python -m lodestone.lm_eval run --model lodestone --model_args "pretrained=DIR,attn=kmeans:probes=16;window=255" --tasks ...

It is the harness's own command line and its own `hf` model, with `attn` (in a spec, ';' stands for ',') and `sparse_tokens`:
the last so many tokens of a prompt (64), and all that is generated, attend by the spec; those before attend densely and are
indexed, prompt by prompt. Requests come one at a time (batch_size=1).
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM, stop_sequences_criteria

from . import InputError
from .hf import attach

__all__ = ["LodestoneLM"]


@register_model("lodestone")
class LodestoneLM(HFLM):
    """HFLM whose attention is a spec's."""

    def __init__(self, pretrained: Any, attn: str = "full", sparse_tokens: int = 64, batch_size: int | str = 1, **kwargs: Any) -> None:
        if str(batch_size) != "1":
            raise InputError(f"lm_eval: expected batch_size=1, found {batch_size}: an index belongs to one prompt")
        if int(sparse_tokens) < 1:
            raise InputError(f"lm_eval: expected sparse_tokens of 1 or more, found {sparse_tokens}")
        kwargs.setdefault("device", "cpu")
        super().__init__(pretrained=pretrained, batch_size=1, **kwargs)
        self._attached = attach(self.model, attn.replace(";", ","))
        self._sparse_tokens = int(sparse_tokens)

    def _model_call(self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self._attached.logits(inps, self._sparse_tokens)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> torch.Tensor:
        tail = min(self._sparse_tokens, context.shape[1] - 1)
        if generation_kwargs.get("temperature", 0.0) == 0.0:
            generation_kwargs.pop("temperature", None)
            generation_kwargs["do_sample"] = False
        generation_kwargs.pop("attention_mask", None)
        document = self._attached.read(context[:, : context.shape[1] - tail])
        new = document.ask(
            context[:, context.shape[1] - tail :],
            max_new_tokens=max_length - context.shape[1],
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], 1),
            pad_token_id=self.tokenizer.pad_token_id,
            **generation_kwargs,
        )
        return torch.cat([context[0], new])[None]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
