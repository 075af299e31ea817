# SPDX-License-Identifier: Apache-2.0
"""Makes tiny random models of Gemma 4's text part, as folders and as GGUF files, and what such a model computes.

    python3 tests/golden/make_gemma4_goldens.py     [NAME...]

needs numpy, safetensors, gguf; run once for each new case, outputs are committed

What they compute is not transformers' own output, as in make_family_goldens.py: it is a float64 calculation in NumPy, written
from the published description (transformers' models/gemma4 and llama.cpp's converter), layer by layer and without a cache.
families/NAME/ has the same files as there.
"""
import json
import math
import pathlib
import sys

import gguf
import numpy as np
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent / "families"
TOKENS = 40
FULL, WINDOW = "full_attention", "sliding_attention"
SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
    max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True, sliding_window=8,
    hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=5.0, attention_k_eq_v=False, num_kv_shared_layers=0,
    use_double_wide_mlp=False, enable_moe_block=False, hidden_size_per_layer_input=0, vocab_size_per_layer_input=64,
    rope_parameters={FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                     WINDOW: {"rope_type": "default", "rope_theta": 10000.0}})
CASES = {
    # As the small ones: numbers for each layer, and last layers that attend to the rows of earlier ones.
    "gemma4": dict(layer_types=[WINDOW, WINDOW, FULL, WINDOW, FULL, WINDOW, FULL], num_kv_shared_layers=3, use_double_wide_mlp=True,
                   hidden_size_per_layer_input=12),
    # As the large ones: fewer heads in full attention, whose values are its keys, and experts beside the feed-forward.
    "gemma4-moe": dict(layer_types=[WINDOW, FULL, WINDOW, FULL], attention_k_eq_v=True, num_global_key_value_heads=1,
                       enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=16),
}


class Model:
    def __init__(self, config: dict, seed: int):
        self.c, self.rng, self.w = config, np.random.default_rng(seed), {}
        c = config
        self.layers, self.types = len(c["layer_types"]), c["layer_types"]
        self.first_shared = self.layers - c["num_kv_shared_layers"]
        self.matrix("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"])
        self.gain("model.norm.weight", c["hidden_size"])
        width = c["hidden_size_per_layer_input"]
        if width:
            self.matrix("model.embed_tokens_per_layer.weight", c["vocab_size_per_layer_input"], self.layers * width)
            self.matrix("model.per_layer_model_projection.weight", self.layers * width, c["hidden_size"])
            self.gain("model.per_layer_projection_norm.weight", width)
        for i in range(self.layers):
            self.make_layer(i)

    def matrix(self, name: str, *shape: int) -> None:
        self.w[name] = (self.rng.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)

    def gain(self, name: str, n: int) -> None:
        self.w[name] = self.rng.uniform(0.5, 1.5, n).astype(np.float32)

    def heads(self, i: int) -> tuple[int, int]:
        """KV heads and their size."""
        c = self.c
        if self.types[i] == WINDOW:
            return c["num_key_value_heads"], c["head_dim"]
        return (c["num_global_key_value_heads"] if c["attention_k_eq_v"] else c["num_key_value_heads"]), c["global_head_dim"]

    def source(self, i: int) -> int:
        if i < self.first_shared:
            return i
        return max(j for j in range(self.first_shared) if self.types[j] == self.types[i])

    def make_layer(self, i: int) -> None:
        c, at, d = self.c, f"model.layers.{i}.", self.c["hidden_size"]
        kv, size = self.heads(i)
        for norm in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            self.gain(f"{at}{norm}.weight", d)
        self.matrix(f"{at}self_attn.q_proj.weight", c["num_attention_heads"] * size, d)
        self.gain(f"{at}self_attn.q_norm.weight", size)
        if self.source(i) == i:
            self.matrix(f"{at}self_attn.k_proj.weight", kv * size, d)
            self.gain(f"{at}self_attn.k_norm.weight", size)
            if not (c["attention_k_eq_v"] and self.types[i] == FULL):
                self.matrix(f"{at}self_attn.v_proj.weight", kv * size, d)
        self.matrix(f"{at}self_attn.o_proj.weight", d, c["num_attention_heads"] * size)
        wide = c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and i >= self.first_shared else 1)
        self.matrix(f"{at}mlp.gate_proj.weight", wide, d)
        self.matrix(f"{at}mlp.up_proj.weight", wide, d)
        self.matrix(f"{at}mlp.down_proj.weight", d, wide)
        self.w[f"{at}layer_scalar"] = self.rng.uniform(0.6, 1.2, 1).astype(np.float32)
        if c["hidden_size_per_layer_input"]:
            self.matrix(f"{at}per_layer_input_gate.weight", c["hidden_size_per_layer_input"], d)
            self.matrix(f"{at}per_layer_projection.weight", d, c["hidden_size_per_layer_input"])
            self.gain(f"{at}post_per_layer_input_norm.weight", d)
        if c["enable_moe_block"]:
            experts, f = c["num_experts"], c["moe_intermediate_size"]
            for norm in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
                self.gain(f"{at}{norm}.weight", d)
            self.matrix(f"{at}router.proj.weight", experts, d)
            self.w[f"{at}router.proj.weight"] *= 8  # so that experts differ
            self.gain(f"{at}router.scale", d)
            self.gain(f"{at}router.per_expert_scale", experts)
            self.matrix(f"{at}experts.gate_up_proj", experts, 2 * f, d)
            self.matrix(f"{at}experts.down_proj", experts, d, f)

    # ---- What it computes, in float64.

    def of(self, name: str) -> np.ndarray:
        return self.w[name].astype(np.float64)

    def norm(self, x: np.ndarray, gain: str = "") -> np.ndarray:
        out = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return out * self.of(gain) if gain else out

    @staticmethod
    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def turn(self, x: np.ndarray, kind: str) -> np.ndarray:
        """x [T, heads, d]: pairs (i, i + d/2)."""
        d, p = x.shape[-1], self.c["rope_parameters"][kind]
        turning = int(p.get("partial_rotary_factor", 1.0) * d // 2)
        frequency = np.zeros(d // 2)
        frequency[:turning] = p["rope_theta"] ** (-2.0 * np.arange(turning) / d)
        angle = np.arange(len(x))[:, None, None] * frequency
        a, b = x[..., : d // 2], x[..., d // 2:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    def attention(self, i: int, h: np.ndarray, rows: dict[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        c, at, kind, t = self.c, f"model.layers.{i}.self_attn.", self.types[i], len(h)
        kv, size = self.heads(i)
        q = self.turn(self.norm((h @ self.of(f"{at}q_proj.weight").T).reshape(t, -1, size), f"{at}q_norm.weight"), kind)
        if self.source(i) == i:
            made = (h @ self.of(f"{at}k_proj.weight").T).reshape(t, kv, size)
            v = (h @ self.of(f"{at}v_proj.weight").T).reshape(t, kv, size) if f"{at}v_proj.weight" in self.w else made
            rows[i] = self.turn(self.norm(made, f"{at}k_norm.weight"), kind), self.norm(v)
        k, v = rows[self.source(i)]
        out = np.empty_like(q)
        seen = np.tril(np.ones((t, t), dtype=bool))
        if kind == WINDOW:
            seen &= ~np.tril(np.ones((t, t), dtype=bool), -c["sliding_window"])
        for head in range(c["num_attention_heads"]):
            own = head * kv // c["num_attention_heads"]
            scores = np.where(seen, q[:, head] @ k[:, own].T, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, own]
        return out.reshape(t, -1) @ self.of(f"{at}o_proj.weight").T

    def experts(self, i: int, x: np.ndarray) -> np.ndarray:
        c, at = self.c, f"model.layers.{i}."
        logits = self.norm(x, f"{at}router.scale") / math.sqrt(c["hidden_size"]) @ self.of(f"{at}router.proj.weight").T
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        h, out = self.norm(x, f"{at}pre_feedforward_layernorm_2.weight"), np.zeros_like(x)
        gate_up, down = self.of(f"{at}experts.gate_up_proj"), self.of(f"{at}experts.down_proj")
        for t, row in enumerate(shares):
            best = np.argsort(-row, kind="stable")[: c["top_k_experts"]]
            for e in best:
                gate, up = np.split(gate_up[e] @ h[t], 2)
                weight = row[e] / row[best].sum() * self.of(f"{at}router.per_expert_scale")[e]
                out[t] += weight * (down[e] @ (self.gelu(gate) * up))
        return self.norm(out, f"{at}post_feedforward_layernorm_2.weight")

    def run(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        c, d = self.c, self.c["hidden_size"]
        x = self.of("model.embed_tokens.weight")[ids] * math.sqrt(d)
        width = c["hidden_size_per_layer_input"]
        if width:
            made = (x @ self.of("model.per_layer_model_projection.weight").T / math.sqrt(d)).reshape(len(ids), self.layers, width)
            own = self.of("model.embed_tokens_per_layer.weight")[ids].reshape(made.shape) * math.sqrt(width)
            inputs = (self.norm(made, "model.per_layer_projection_norm.weight") + own) / math.sqrt(2)
        hidden, rows = [x], {}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            x = x + self.norm(self.attention(i, self.norm(x, f"{at}input_layernorm.weight"), rows), f"{at}post_attention_layernorm.weight")
            h = self.norm(x, f"{at}pre_feedforward_layernorm.weight")
            out = (self.gelu(h @ self.of(f"{at}mlp.gate_proj.weight").T) * (h @ self.of(f"{at}mlp.up_proj.weight").T)) \
                @ self.of(f"{at}mlp.down_proj.weight").T
            if c["enable_moe_block"]:
                out = self.norm(out, f"{at}post_feedforward_layernorm_1.weight") + self.experts(i, x)
            x = x + self.norm(out, f"{at}post_feedforward_layernorm.weight")
            if width:
                gated = self.gelu(x @ self.of(f"{at}per_layer_input_gate.weight").T) * inputs[:, i]
                x = x + self.norm(gated @ self.of(f"{at}per_layer_projection.weight").T, f"{at}post_per_layer_input_norm.weight")
            x = x * self.of(f"{at}layer_scalar")
            hidden.append(x)
        hidden[-1] = self.norm(x, "model.norm.weight")
        logits = hidden[-1] @ self.of("model.embed_tokens.weight").T
        cap = c["final_logit_softcapping"]
        return cap * np.tanh(logits / cap), np.stack(hidden)


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight", "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight", "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight", "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight"}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def write_gguf(path: pathlib.Path, model: Model) -> None:
    c, types = model.c, model.types
    w = gguf.GGUFWriter(path, "gemma4")
    w.add_block_count(model.layers)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    wide = [c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and i >= model.first_shared else 1) for i in range(model.layers)]
    w.add_feed_forward_length(wide if c["use_double_wide_mlp"] else wide[0])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv([model.heads(i)[0] for i in range(model.layers)] if c["attention_k_eq_v"] else c["num_key_value_heads"])
    w.add_key_length(c["global_head_dim"])
    w.add_value_length(c["global_head_dim"])
    w.add_uint32("gemma4.attention.key_length_swa", c["head_dim"])
    w.add_uint32("gemma4.attention.value_length_swa", c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_sliding_window(c["sliding_window"])
    w.add_array("gemma4.attention.sliding_window_pattern", [kind == WINDOW for kind in types])
    w.add_uint32("gemma4.attention.shared_kv_layers", c["num_kv_shared_layers"])
    w.add_uint32("gemma4.embedding_length_per_layer_input", c["hidden_size_per_layer_input"])
    w.add_float32("gemma4.final_logit_softcapping", c["final_logit_softcapping"])
    rope = c["rope_parameters"]
    w.add_rope_freq_base(rope[FULL]["rope_theta"])
    w.add_float32("gemma4.rope.freq_base_swa", rope[WINDOW]["rope_theta"])
    w.add_rope_dimension_count(c["global_head_dim"])
    w.add_uint32("gemma4.rope.dimension_count_swa", c["head_dim"])
    half = c["global_head_dim"] // 2
    turning = int(half * rope[FULL]["partial_rotary_factor"])
    w.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32))
    if c["enable_moe_block"]:
        w.add_expert_count(c["num_experts"])
        w.add_expert_used_count(c["top_k_experts"])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    for name, tensor in model.w.items():
        w.add_tensor(gguf_name(name), np.ascontiguousarray(tensor))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def make(name: str) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": len(CASES[name]["layer_types"]),
              **SHAPE, **CASES[name]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = Model(config, seed=len(name))
    save_file(model.w, folder / "model.safetensors")
    write_gguf(folder / "model.gguf", model)
    ids = np.random.default_rng(1).integers(2, config["vocab_size"], TOKENS)
    logits, hidden = model.run(ids)
    save_file({"ids": ids.astype(np.int64), "logits": logits.astype(np.float32), "hidden": hidden.astype(np.float32)},
              folder / "golden.safetensors")
    print(f"{name}: logits from {logits.min():.2f} to {logits.max():.2f}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
