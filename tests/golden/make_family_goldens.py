# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny random model of each family, as a folder and as a GGUF file, and what transformers computes with it.

    python3 tests/golden/make_family_goldens.py     [NAME...]

needs torch, transformers, safetensors, gguf; run once for each new case, outputs are committed

families/NAME/: config.json, model.safetensors, model.gguf (the same weights under GGUF's names, in GGUF's order of rows) and
golden.safetensors with ids [T], logits [T, V] and hidden [L + 1, T, D] (the last one is normalised, as transformers gives it). Some have other.gguf, too: the same model as another version of llama.cpp's
converter, or one that is told so, writes it.
"""
import json
import math
import pathlib
import sys

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_numpy
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
    "mixtral": ("Mixtral", "llama", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": ("Qwen3Moe", "qwen3moe", dict(head_dim=12, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
                                               norm_topk_prob=True)),
    "qwen3-moe-mixed": ("Qwen3Moe", None, dict(head_dim=12, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
                                               norm_topk_prob=False, num_hidden_layers=3, mlp_only_layers=[1])),
    "gpt-oss": ("GptOss", None, dict(head_dim=12, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
                                          swiglu_limit=1.5, rope_parameters={
                                              "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                                              "beta_slow": 1.0, "original_max_position_embeddings": 16, "truncate": False})),
}
HYBRID = dict(num_hidden_layers=4, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=12)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20)
# Its experts are rounded to MXFP4, and lie so in both files; GGUF has no key for the limit.
LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, n_shared_experts=2,
              moe_intermediate_size=24, first_k_dense_replace=1, num_hidden_layers=3, rms_norm_eps=1e-6)
CASES["gpt-oss-mxfp4"] = ("GptOss", "gpt-oss", {**CASES["gpt-oss"][2], "swiglu_limit": 7.0})
CASES["qwen3-next"] = ("Qwen3Next", "qwen3next", {**HYBRID, **EXPERTS})
CASES["qwen35"] = ("Qwen3_5Text", "qwen35", HYBRID)
CASES["qwen35-moe"] = ("Qwen3_5MoeText", "qwen35moe", {**HYBRID, **EXPERTS})
CASES["gemma3-seeing"] = ("Gemma3Text", None, CASES["gemma3"][2])  # wrapped as a model that sees
CASES["deepseek-v2"] = ("DeepseekV2", "deepseek2", {**LATENT, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2,
                                                     "routed_scaling_factor": 1.5})
CASES["deepseek-v3"] = ("DeepseekV3", "deepseek2", {
    **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}})
GLM = dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=24, routed_scaling_factor=1.5,
           num_hidden_layers=3, norm_topk_prob=True)
CASES["glm4-lite"] = ("Glm4MoeLite", "deepseek2", {**{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}, **GLM,
                                                   "q_lora_rank": 24})
CASES["glm4-moe"] = ("Glm4Moe", "glm4moe", {**GLM, "head_dim": 12, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
                                            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                "partial_rotary_factor": 0.5}})
CASES["qwen3-vl"] = ("Qwen3VL", "qwen3vl", dict(head_dim=12, rope_parameters={
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2], "mrope_interleaved": True}))
CASES["glm4"] = ("Glm4", "glm4", dict(head_dim=12, attention_bias=True, tie_word_embeddings=False, rope_parameters={
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}))
CASES["glm"] = ("Glm", "chatglm", dict(head_dim=16, attention_bias=True, tie_word_embeddings=False))
EYES = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4, spatial_merge_size=1,
            num_position_embeddings=16, deepstack_visual_indexes=[0])
# A matrix of q, k and v; a layer that drafts tokens, and a list of recurrent layers; a gate of one column; no word on gating.
OTHERS = {"qwen2", "qwen35", "qwen35-moe", "glm4-lite"}
EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
PAIRS = {"llama", "mistral3", "smollm3", "granite"}  # their files have the rows of q and k in pairs
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}
HYBRIDS = {"qwen3next", "qwen35", "qwen35moe"}  # their files have norms with 1 added
GEMMA_NAMES = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"}
GLM_NAMES = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


def gguf_name(name: str, architecture: str) -> str:
    own = {"gemma3": GEMMA_NAMES, "glm4": GLM_NAMES, **dict.fromkeys(("gpt-oss", "glm4moe", *HYBRIDS), {"post_attention_layernorm": "post_attention_norm"})}
    names = {**NAMES, **own.get(architecture, {})}
    for ending, known in {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.items():
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{known}"
    stem, kind = (name, "weight") if name.endswith("sinks") else name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[stem]}.{kind}"


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head in the order 0, d/2, 1, d/2 + 1, ..."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GGUF's tensors [E, out, in] of a folder's one for each expert; the others stay."""
    rest, stacks = {}, {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if "experts" not in parts or not parts[parts.index("experts") + 1].isdigit():
            rest[name] = tensor
            continue
        at = parts.index("experts")
        stacks.setdefault(f"blk.{parts[2]}.ffn_{EXPERT_NAMES[parts[at + 2]]}_exps.weight", {})[int(parts[at + 1])] = tensor
    return {**rest, **{name: np.stack([experts[i] for i in sorted(experts)]) for name, experts in stacks.items()}}


def gpt_oss_experts(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Folders have columns for rows, and gate and up in turn."""
    blk, bias = f"blk.{name.split('.')[2]}.ffn_", name.endswith("_bias")
    kind = "bias" if bias else "weight"
    rows = tensor if bias else tensor.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"{blk}down_exps.{kind}": rows}
    return {f"{blk}gate_exps.{kind}": rows[:, ::2], f"{blk}up_exps.{kind}": rows[:, 1::2]}


def mxfp4_rows(rows: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(np.ascontiguousarray(rows, dtype=np.float32), gguf.GGMLQuantizationType.MXFP4)


def round_experts(model) -> None:
    for name, weight in model.named_parameters():
        if "experts" in name and "bias" not in name:
            rows = mxfp4_rows(weight.numpy().swapaxes(1, 2))
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4).swapaxes(1, 2).copy()))


def save_blocks(folder: pathlib.Path) -> None:
    """Experts as published folders have them: exponents apart, neighbours in a byte."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if "experts" in n and "bias" not in n]:
        rows = mxfp4_rows(tensors.pop(name).swapaxes(1, 2))
        blocks = rows.reshape(*rows.shape[:2], -1, 17)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        tensors[f"{name}_blocks"] = np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
        tensors[f"{name}_scales"] = np.ascontiguousarray(blocks[..., 0])
    save_numpy(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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
            writer.add_rope_scaling_yarn_log_mul(p.get("mscale_all_dim", 0.0) * (0.1 if architecture == "deepseek2" else 1.0))
    if architecture == "mistral3":
        writer.add_float32("mistral3.attention.temperature_scale", p["llama_4_scaling_beta"])


def tiled(x: np.ndarray, config, axis: int) -> np.ndarray:
    """Value heads by their number within a key head first, as GGUF files of Qwen3.5 have them."""
    keys, shared = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    heads = x.reshape(*x.shape[:axis], keys, shared, -1, *x.shape[axis + 1:])
    return np.ascontiguousarray(heads.swapaxes(axis, axis + 1)).reshape(x.shape)


def hybrid_tensors(name: str, x: np.ndarray, config, architecture: str) -> dict[str, np.ndarray]:
    """What GGUF files hold of a tensor of a recurrent layer, by their names."""
    qk = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if name.endswith("A_log"):
        x = -np.exp(x)
    if "conv1d" in name:
        x = x[:, 0]
    if "in_proj_qkvz" in name:
        groups = x.reshape(config.linear_num_key_heads, -1, x.shape[1])
        d, values = config.linear_key_head_dim, (groups.shape[1] - 2 * config.linear_key_head_dim) // 2
        q, k, v, z = (part.reshape(-1, x.shape[1]) for part in np.split(groups, [d, 2 * d, 2 * d + values], axis=1))
        blk = f"blk.{name.split('.')[2]}"
        return {f"{blk}.attn_qkv.weight": np.concatenate([q, k, v]), f"{blk}.attn_gate.weight": z}
    if architecture != "qwen3next":
        if "in_proj_qkv" in name or "conv1d" in name:
            x = np.concatenate([x[:qk], tiled(x[qk:], config, 0)])
        elif "out_proj" in name:
            x = tiled(x, config, 1)
        elif "linear_attn.norm" not in name:
            x = tiled(x, config, 0)
    return {gguf_name(name, architecture): x}


def add_hybrid(writer: gguf.GGUFWriter, config) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)


def add_draft_layer(writer: gguf.GGUFWriter, config) -> None:
    """What files have of a layer that drafts tokens, which nothing here reads."""
    writer.add_nextn_predict_layers(1)
    writer.add_array("qwen35.attention.recurrent_layers", [kind == "linear_attention" for kind in config.layer_types] + [False])
    for name in ("attn_norm.weight", "nextn.enorm.weight", "nextn.shared_head_norm.weight"):
        writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}", np.ones(config.hidden_size, dtype=np.float32))


def add_latent(writer: gguf.GGUFWriter, config) -> None:
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)


def add_shared_experts(writer: gguf.GGUFWriter, config, family: str, other: bool) -> None:
    dense = config.mlp_layer_types.count("dense") if family == "Glm4MoeLite" else config.first_k_dense_replace
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    sigmoid = family != "DeepseekV2"
    if not other:  # folders of GLM-4.7 Flash do not say it, so that its files do not
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if sigmoid:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)


def add_experts(writer: gguf.GGUFWriter, config) -> None:
    experts = next((n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, key, None))), None)
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def text_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Of a model that sees those of its text model, as others call them."""
    tensors = load_file(folder / "model.safetensors")
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items() if ".visual." not in name}


def write_gguf(folder: pathlib.Path, config, architecture: str, mxfp4: bool, other: bool = False) -> None:
    path = folder / ("other.gguf" if other else "model.gguf")
    writer = gguf.GGUFWriter(path, architecture)
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    drafts = other and architecture == "qwen35"
    writer.add_block_count(config.num_hidden_layers + drafts)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", SHAPE["intermediate_size"]))
    writer.add_head_count(config.num_attention_heads)
    latent = architecture == "deepseek2"
    if latent:
        d = config.qk_rope_head_dim  # what turns
        add_latent(writer, config)
    if latent or architecture == "glm4moe":
        add_shared_experts(writer, config, type(config).__name__.removesuffix("Config"), other)
    writer.add_head_count_kv(1 if latent else config.num_key_value_heads)
    writer.add_key_length(config.kv_lora_rank + d if latent else d)
    writer.add_value_length(config.kv_lora_rank if latent else d)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture in ("gemma3", "phi3", "gpt-oss") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    add_rope(writer, config, architecture, d)
    add_experts(writer, config)
    if architecture in HYBRIDS:
        add_hybrid(writer, config)
    if drafts:
        add_draft_layer(writer, config)
    joined: dict[str, dict[str, np.ndarray]] = {}
    tensors = stack_experts(text_tensors(folder))
    for name, weight in tensors.items():
        if name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False):
            continue
        if "mlp.experts." in name:
            for its_name, rows in gpt_oss_experts(name, weight).items():
                if mxfp4 and its_name.endswith("weight"):
                    writer.add_tensor(its_name, mxfp4_rows(rows), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                else:
                    writer.add_tensor(its_name, np.ascontiguousarray(rows))
            continue
        if name.startswith("blk."):
            writer.add_tensor(name, weight)
            continue
        if architecture in PAIRS and ("q_proj" in name or "k_proj" in name):
            weight = in_pairs(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture == "chatglm" and "self_attn.q_proj" in name:
            parts = [weight, *(tensors[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))]
            writer.add_tensor(gguf_name(name.replace("q_proj", "qkv_proj"), architecture), np.concatenate(parts))
            continue
        if architecture == "chatglm" and ("k_proj" in name or "v_proj" in name):
            continue
        if "linear_attn" in name:
            for its_name, rows in hybrid_tensors(name, weight, config, architecture).items():
                writer.add_tensor(its_name, np.ascontiguousarray(rows))
            continue
        if (architecture == "gemma3" or architecture in HYBRIDS) and "norm" in name:
            weight = weight + 1
        if name.endswith("e_score_correction_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", weight)
            continue
        if "kv_b_proj" in name:  # of each head W_k transposed, and W_v
            blk, heads = f"blk.{name.split('.')[2]}", weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            nope = config.qk_nope_head_dim
            writer.add_tensor(f"{blk}.attn_k_b.weight", np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2)))
            writer.add_tensor(f"{blk}.attn_v_b.weight", np.ascontiguousarray(heads[:, nope:]))
            continue
        if other and architecture == "qwen2" and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):  # --fuse-qkv
            _, _, layer, _, part, kind = name.split(".")
            parts = joined.setdefault(f"blk.{layer}.attn_qkv.{kind}", {})
            parts[part] = weight
            continue
        if "shared_expert_gate" in name and not other:
            weight = weight[0]
        writer.add_tensor(gguf_name(name, architecture), np.ascontiguousarray(weight))
    for its_name, parts in joined.items():
        writer.add_tensor(its_name, np.concatenate([parts[part] for part in ("q_proj", "k_proj", "v_proj")]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def wrap(folder: pathlib.Path) -> None:
    """The folder of a model that also sees: its text model's tensors beside some of another part."""
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = np.ones(8, dtype=np.float32)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(8, dtype=np.float32)
    save_numpy(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": 1, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make(name: str, family: str, architecture: str | None, overrides: dict, seed: int) -> None:
    torch.manual_seed(seed)
    shape = {**SHAPE, **overrides}
    if family == "Qwen3_5MoeText":  # its configurations give the width of experts alone
        del shape["intermediate_size"]
    if family == "Qwen3VL":
        whole = transformers.Qwen3VLConfig(text_config=shape, vision_config=EYES)
        config, model = whole.text_config, transformers.Qwen3VLForConditionalGeneration(whole).eval()
    else:
        config = getattr(transformers, f"{family}Config")(**shape)
        model = getattr(transformers, f"{family.replace('Text', '')}ForCausalLM")(config).eval()
    with torch.no_grad():
        plus_one = 0.0 if family.startswith(("Gemma", "Qwen3_5", "Qwen3Next")) else 1.0
        for weight in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]:  # larger than a usual initialisation, so that attention is far from uniform
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.2) + (weight.ndim == 1) * plus_one)
        if name.endswith("mxfp4"):
            round_experts(model)
    folder = HERE / name
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    save_file({"ids": ids[0], "logits": out.logits[0].float().contiguous(),
               "hidden": torch.stack([h[0].float() for h in out.hidden_states])}, folder / "golden.safetensors")
    if name.endswith("seeing"):
        wrap(folder)
    if architecture is not None:
        write_gguf(folder, config, architecture, name.endswith("mxfp4"))
    if name in OTHERS:
        write_gguf(folder, config, architecture, False, other=True)
    if name.endswith("mxfp4"):
        save_blocks(folder)
    print(name, json.loads((folder / "config.json").read_text()).get("rope_parameters"))


if __name__ == "__main__":
    for number, (name, (family, architecture, overrides)) in enumerate(CASES.items()):
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        make(name, family, architecture, overrides, number)
