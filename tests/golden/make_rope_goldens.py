# SPDX-License-Identifier: Apache-2.0
"""Records the RoPE frequencies and rotations of transformers for every kind of scaling, in rope.json.

    python3 tests/golden/make_rope_goldens.py        (needs torch, transformers; run once, the output is committed)

Each case: `config` (a whole config.json, some in the old form, some in the new), `tokens` (length of the context), `frequencies`
[d/2], `scaling`, and per position in `at` the cosines and sines [d/2], scaling included.
"""
import json
import pathlib

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUT = pathlib.Path(__file__).parent / "rope.json"
BASE = dict(architectures=["LlamaForCausalLM"], hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, max_position_embeddings=4096, rms_norm_eps=1e-5)
LLAMA31 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096)

CASES = {
    "plain": ({}, 4096),
    "plain-theta": (dict(rope_theta=1000000.0), 131072),
    "plain-new": (dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0)), 131072),
    "head-dim": (dict(head_dim=128, rope_theta=500000.0), 131072),
    "linear-old": (dict(rope_scaling=dict(type="linear", factor=8.0)), 32768),
    "linear-new": (dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=20000.0)), 32768),
    "dynamic-short": (dict(rope_scaling=dict(type="dynamic", factor=2.0)), 2048),
    "dynamic-long": (dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)), 65536),
    "llama3.1": (dict(head_dim=128, rope_theta=500000.0, max_position_embeddings=131072, rope_scaling=LLAMA31), 131072),
    "llama3.2": (dict(rope_theta=500000.0, max_position_embeddings=131072, rope_scaling={**LLAMA31, "factor": 32.0}), 131072),
    "yarn": (dict(max_position_embeddings=65536, rope_scaling=YARN), 65536),
    "yarn-theta": (dict(rope_theta=1000000.0, max_position_embeddings=131072, head_dim=128, rope_parameters={
        **YARN, "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0}), 131072),
    "yarn-betas": (dict(max_position_embeddings=65536, rope_scaling={**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.5}), 65536),
    "yarn-mscale": (dict(max_position_embeddings=65536, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}), 65536),
    "yarn-no-truncate": (dict(max_position_embeddings=65536, rope_scaling={**YARN, "truncate": False}), 65536),
}
POSITIONS = [1, 4095, 131071, 999999]


def case(name: str, overrides: dict, tokens: int) -> dict:
    config = {**BASE, **overrides}
    rope = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
    if "dynamic" in name:  # its frequencies follow the longest position seen
        rope(torch.zeros(1), torch.tensor([[tokens - 1]]))
    at = {}
    for position in POSITIONS:
        # The rotation as its forward() computes it, without the update of dynamic scaling.
        angle = rope.inv_freq.float() * float(position)
        at[position] = {"cos": (angle.cos() * rope.attention_scaling).tolist(), "sin": (angle.sin() * rope.attention_scaling).tolist()}
    return {"name": name, "config": config, "tokens": tokens, "frequencies": rope.inv_freq.tolist(), "scaling": rope.attention_scaling, "at": at}


def short(value):
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    return [short(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    rows = [short(case(name, *spec)) for name, spec in CASES.items()]
    OUT.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
