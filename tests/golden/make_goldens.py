# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny random models and what transformers computes with them.

    python3 tests/golden/make_goldens.py        (needs torch, transformers, safetensors; run once, outputs are committed)

models/NAME/: config.json and model.safetensors (or shards) as save_pretrained writes them, and golden.safetensors with
ids [T], logits [T, V] and hidden [L + 1, T, D] (the embedding, then the residual stream after each layer; the last one is
normalised, as transformers gives it).
"""
import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

HERE = pathlib.Path(__file__).parent / "models"
TOKENS = 40
SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
             pad_token_id=None, tie_word_embeddings=True)


def rope(kind: str, **values: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


CASES = {
    "gqa-f32": (LlamaConfig, {}, torch.float32),
    "gqa-bf16": (LlamaConfig, {}, torch.bfloat16),
    "gqa-f16": (LlamaConfig, {}, torch.float16),
    "mha-untied-bias": (LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
                        torch.float32),
    "mqa-head-dim": (LlamaConfig, dict(num_key_value_heads=1, head_dim=20), torch.float32),
    "rope-linear": (LlamaConfig, rope("linear", factor=4.0), torch.float32),
    "rope-dynamic": (LlamaConfig, dict(max_position_embeddings=16, **rope("dynamic", factor=2.0)), torch.float32),
    "rope-yarn": (LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=16), torch.float32),
    "rope-llama3": (LlamaConfig, rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=32), torch.float32),
    "mistral": (MistralConfig, dict(sliding_window=None, head_dim=8), torch.float32),
}


def make(name: str, config_class: type, overrides: dict, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    config = config_class(**{**SHAPE, **overrides})
    model = (MistralForCausalLM if config_class is MistralConfig else LlamaForCausalLM)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than a usual initialisation, so that attention is far from uniform
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.2) + (parameter.ndim == 1) * 1.0)
    model = model.to(dtype)
    folder = HERE / name
    shard = {"max_shard_size": "40KB"} if name == "mha-untied-bias" else {}
    model.save_pretrained(folder, safe_serialization=True, **shard)
    # Weights rounded to their type, float32 arithmetic: bf16 arithmetic would add noise of its own to the golden.
    model = model.float()
    ids = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    save_file({"ids": ids[0], "logits": out.logits[0].float().contiguous(),
               "hidden": torch.stack([h[0].float() for h in out.hidden_states])}, folder / "golden.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(name, json.loads((folder / "config.json").read_text()).get("rope_parameters"))


if __name__ == "__main__":
    for number, (name, (config_class, overrides, dtype)) in enumerate(CASES.items()):
        make(name, config_class, overrides, dtype, number)
