# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny random model of each family, as a folder and as a GGUF file, and what transformers computes with it.

    python3 tests/golden/make_family_goldens.py     (needs torch, transformers, safetensors, gguf; run once, outputs are committed)

families/NAME/: config.json, model.safetensors, model.gguf (the same weights under GGUF's names, in GGUF's order of rows) and
golden.safetensors with ids [T], logits [T, V] and hidden [L + 1, T, D] (the last one is normalised, as transformers gives it).
"""
import json
import math
import pathlib

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent / "families"
TOKENS = 40
SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1, pad_token_id=None)
TURNING = 4  # dimensions of the partial head: divisors are for its pairs
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5], "long_factor": [1.25, 4.0]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0}

# Name: transformers' class, GGUF's architecture, what differs from SHAPE.
CASES = {
    "llama": ("Llama", "llama", dict(tie_word_embeddings=True, rope_parameters={
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32})),
    "mistral-window": ("Mistral", None, dict(sliding_window=8, head_dim=12)),
    "ministral3": ("Ministral3", "mistral3", dict(head_dim=12, rope_parameters=YARN)),
    "qwen2": ("Qwen2", "qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", None, dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": ("Qwen3", "qwen3", dict(head_dim=12)),
    "gemma3": ("Gemma3Text", "gemma3", dict(num_hidden_layers=7, sliding_window=8, head_dim=12, query_pre_attn_scalar=12,
                                            rope_parameters={
                                                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                                                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})),
    "phi3": ("Phi3", "phi3", dict(tie_word_embeddings=False, sliding_window=8)),
    "phi3-longrope": ("Phi3", "phi3", dict(tie_word_embeddings=True, num_key_value_heads=4,
                                           original_max_position_embeddings=16, rope_parameters=LONG)),
    "smollm3": ("SmolLM3", "smollm3", dict(num_hidden_layers=4, tie_word_embeddings=True)),
    "granite": ("Granite", "granite", dict(embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2,
                                           logits_scaling=2.0, tie_word_embeddings=True)),
}
PAIRS = {"llama", "mistral3", "smollm3", "granite"}  # their files have the rows of q and k in pairs
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"}


def gguf_name(name: str, architecture: str) -> str:
    names = {**NAMES, **GEMMA_NAMES} if architecture == "gemma3" else NAMES
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[stem]}.{kind}"


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head in the order 0, d/2, 1, d/2 + 1, ..."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(config, d: int) -> np.ndarray:
    p = config.rope_parameters
    inverse = 1.0 / p["rope_theta"] ** (np.arange(0, d, 2) / d)
    wave = 2 * math.pi / inverse
    low, high = (p["original_max_position_embeddings"] / p[k] for k in ("low_freq_factor", "high_freq_factor"))
    smooth = (p["original_max_position_embeddings"] / wave - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    blend = 1 / ((1 - smooth) / p["factor"] + smooth)
    return np.where(wave < high, 1.0, np.where(wave > low, p["factor"], blend)).astype(np.float32)


def add_rope(writer: gguf.GGUFWriter, config, architecture: str, d: int) -> None:
    p = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(p["rope_theta"])
    writer.add_rope_dimension_count(int(d * p.get("partial_rotary_factor", 1.0)))
    if p["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config, d))
    elif p["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(p["original_max_position_embeddings"])
        factor = config.max_position_embeddings / p["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(p["original_max_position_embeddings"])))
        writer.add_tensor("rope_factors_long.weight", np.array(p["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(p["short_factor"], dtype=np.float32))
    elif p["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(p["rope_type"]))
        writer.add_rope_scaling_factor(p["factor"])
        if p["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(p["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_log_mul(p["mscale_all_dim"])
    if architecture == "mistral3":
        writer.add_float32("mistral3.attention.temperature_scale", p["llama_4_scaling_beta"])


def write_gguf(path: pathlib.Path, model, config, architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(d)
    writer.add_value_length(d)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture in ("gemma3", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    add_rope(writer, config, architecture, d)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if architecture in PAIRS and ("q_proj" in name or "k_proj" in name):
            weight = in_pairs(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in name:
            weight = weight + 1
        writer.add_tensor(gguf_name(name, architecture), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(name: str, family: str, architecture: str | None, overrides: dict, seed: int) -> None:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **overrides})
    model = getattr(transformers, f"{family.replace('Text', '')}ForCausalLM")(config).eval()
    with torch.no_grad():
        plus_one = 0.0 if family.startswith("Gemma") else 1.0
        for weight in model.parameters():  # larger than a usual initialisation, so that attention is far from uniform
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.2) + (weight.ndim == 1) * plus_one)
    folder = HERE / name
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    save_file({"ids": ids[0], "logits": out.logits[0].float().contiguous(),
               "hidden": torch.stack([h[0].float() for h in out.hidden_states])}, folder / "golden.safetensors")
    if architecture is not None:
        write_gguf(folder / "model.gguf", model, config, architecture)
    print(name, json.loads((folder / "config.json").read_text()).get("rope_parameters"))


if __name__ == "__main__":
    for number, (name, (family, architecture, overrides)) in enumerate(CASES.items()):
        make(name, family, architecture, overrides, number)
