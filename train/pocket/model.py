# SPDX-License-Identifier: Apache-2.0
"""The Llama architecture, small, over flattened micro-batches.

All that is not attention sees (N, d) with N = B * T, so one compilation serves every document length; only the
attention call between the two compiled halves of a layer looks at (B, T).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 4096
    width: int = 384
    layers: int = 6
    query_heads: int = 8
    kv_heads: int = 2
    head: int = 64
    hidden: int = 832
    theta: float = 500_000.0
    epsilon: float = 1e-5
    positions: int = 131_072

    def hugging_face(self) -> dict[str, Any]:
        """config.json of the same model."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head, "max_position_embeddings": self.positions,
            "rope_theta": self.theta, "rope_scaling": None, "rms_norm_eps": self.epsilon, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True,
            "initializer_range": 0.02, "pretraining_tp": 1, "use_cache": True, "bos_token_id": 0, "eos_token_id": 1,
        }


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, in) times a master weight (out, in), in the type of x."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """(N, d) in, (N, d) out, computed in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    return (y * gain.float()).to(x.dtype)


def rotary(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin for positions (N,): each (N, head / 2), float32."""
    frequency = shape.theta ** (-torch.arange(0, shape.head, 2, device=positions.device).float() / shape.head)
    angle = positions.float()[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotate_half: x (N, heads, head) with its first half paired to its second."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # (N, 1, head / 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, keys = shape.query_heads * shape.head, shape.kv_heads * shape.head

        def weight(rows: int, columns: int, scale: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * scale)

        self.norm1, self.norm2 = nn.Parameter(torch.ones(shape.width)), nn.Parameter(torch.ones(shape.width))
        self.q, self.k, self.v = weight(queries, shape.width), weight(keys, shape.width), weight(keys, shape.width)
        self.o = weight(shape.width, queries, 0.0)  # zero, as down: a layer begins as the identity
        self.gate, self.up = weight(shape.hidden, shape.width), weight(shape.hidden, shape.width)
        self.down = weight(shape.width, shape.hidden, 0.0)


def before_attention(x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
                     epsilon: float, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, d) to rotated queries (N, Hq, head), keys and values (N, Hkv, head)."""
    y = rms_norm(x, norm, epsilon)
    queries, keys, values = (linear(y, w).unflatten(-1, (-1, head)) for w in (q, k, v))
    return rotate(queries, cos, sin), rotate(keys, cos, sin), values


def after_attention(x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
                    epsilon: float, dropout: float) -> Tensor:
    """x (N, d) and the heads' outputs (N, Hq * head) to the layer's output (N, d)."""
    x = x + F.dropout(linear(attended, o), dropout)
    y = rms_norm(x, norm, epsilon)
    return x + F.dropout(linear(F.silu(linear(y, gate)) * linear(y, up), down), dropout)


def token_losses(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x (N, d), targets (N,): cross entropy (N,) in float32 and whether the likeliest token is right (N,)."""
    logits = linear(rms_norm(x, norm, epsilon), embedding).float()  # (N, vocabulary)
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def attention_backend(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN's attention first: half as fast again as FlashAttention 2 on long documents."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


class Pocket(nn.Module):
    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.before: Callable[..., Any] = before_attention
        self.after: Callable[..., Any] = after_attention
        self.losses: Callable[..., Any] = token_losses

    def compile(self) -> None:
        """Compiles the halves of a layer and the loss: the same code for all layers and lengths."""
        self.before, self.after, self.losses = (
            torch.compile(f, dynamic=False) for f in (before_attention, after_attention, token_losses))

    def hidden(self, tokens: Tensor, positions: Tensor, dropout: float = 0.0) -> Tensor:
        """tokens and positions (B, T) to the last layer's output (B * T, d), in bfloat16."""
        batch, length = tokens.shape
        s = self.shape
        cos, sin = rotary(positions.flatten(), s)
        x = F.embedding(tokens.flatten(), self.embedding).bfloat16()
        for layer in self.layers:
            q, k, v = self.before(x, layer.norm1, layer.q, layer.k, layer.v, cos, sin, s.epsilon, s.head)
            q, k, v = (t.view(batch, length, -1, s.head).transpose(1, 2) for t in (q, k, v))  # (B, heads, T, head)
            with attention_backend(x.device):
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended = attended.transpose(1, 2).reshape(batch * length, -1)
            x = self.after(x, attended, layer.o, layer.norm2, layer.gate, layer.up, layer.down, s.epsilon, dropout)
        return x

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        """tokens, positions, targets (B, T): losses and hits, each (B * T,)."""
        x = self.hidden(tokens, positions, dropout)
        return self.losses(x, self.norm, self.embedding, targets.flatten(), self.shape.epsilon)

    def hugging_face_names(self) -> dict[str, str]:
        """Own parameter names to Hugging Face's."""
        names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
        own = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
               **{p: f"self_attn.{p}_proj" for p in "qkvo"}, **{p: f"mlp.{p}_proj" for p in ("gate", "up", "down")}}
        for i in range(self.shape.layers):
            names |= {f"layers.{i}.{short}": f"model.layers.{i}.{long}.weight" for short, long in own.items()}
        return names


def describe(shape: Shape) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(shape).items())
