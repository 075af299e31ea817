# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny random Llama model in Hugging Face's format, with the standard library alone.

Its answers mean nothing; it loads in milliseconds, reads hundreds of thousands of tokens, and can be damaged at will.
"""

import array
import json
import pathlib
import random
import struct
import sys

BOS, EOS = 256, 257
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("i", "n")]


def byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    odd = (b for b in range(256) if b not in plain)
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(odd)}
    return [letters[b] for b in range(256)]


def tokenizer() -> dict:
    vocab = {letter: i for i, letter in enumerate(byte_letters())}
    added = [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, text in ((BOS, "<|begin|>"), (EOS, "<|end|>"))]
    for i, (left, right) in enumerate(MERGES):
        vocab[left + right] = EOS + 1 + i
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}| ?\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"},
             "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
                                      {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [BOS], "tokens": ["<|begin|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": [f"{left} {right}" for left, right in MERGES]},
    }


def config(layers: int, max_positions: int) -> dict:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "vocab_size": EOS + 1 + len(MERGES), "max_position_embeddings": max_positions, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
            "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": BOS, "eos_token_id": EOS}


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    found = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,),
                  layer + "self_attn.q_proj.weight": (q, hidden), layer + "self_attn.k_proj.weight": (kv, hidden),
                  layer + "self_attn.v_proj.weight": (kv, hidden), layer + "self_attn.o_proj.weight": (hidden, q),
                  layer + "mlp.gate_proj.weight": (inner, hidden), layer + "mlp.up_proj.weight": (inner, hidden),
                  layer + "mlp.down_proj.weight": (hidden, inner)}
    return found


def safetensors(tensors: dict[str, tuple[tuple[int, ...], bytes]]) -> bytes:
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values())


def weights(c: dict, seed: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
    rng = random.Random(seed)
    tensors = {}
    for name, shape in shapes(c).items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array.array("f", [1.0] * count if len(shape) == 1 else (rng.gauss(0, 0.3) for _ in range(count)))
        if sys.byteorder == "big":
            values.byteswap()
        tensors[name] = (shape, values.tobytes())
    return tensors


def write_talker(folder: pathlib.Path, marks: list[str], script: list[str]) -> pathlib.Path:
    """A model that says the next token of the script behind each of its tokens, whatever is asked.

    Tokens of the script are `marks` (added to the tokenizer, not special), single bytes or "<|end|>", none of them twice.
    """
    write(folder, layers=1)
    c, names = config(1, 1 << 18), tokenizer()
    ids = {mark: c["vocab_size"] + i for i, mark in enumerate(marks)}
    names["added_tokens"] += [{"id": i, "content": mark, "special": False, "normalized": False} for mark, i in ids.items()]
    c |= {"vocab_size": c["vocab_size"] + len(marks), "tie_word_embeddings": False}
    chain = [EOS if said == "<|end|>" else ids.get(said, names["model"]["vocab"].get(said)) for said in script]
    if None in chain or len(set(chain)) < len(chain) or len(chain) > c["hidden_size"]:
        raise ValueError(f"a script of single tokens, {c['hidden_size']} at most, none twice: {script}")
    hidden, embed, head = c["hidden_size"], array.array("f"), array.array("f")
    for token in range(c["vocab_size"]):  # the layer adds nothing: each token points to the next
        at, behind = (chain.index(token) if token in chain else -1), (chain.index(token) - 1 if token in chain else -1)
        embed.extend(float(i == at) for i in range(hidden))
        head.extend(float(i == behind) for i in range(hidden))
    tensors = {}
    for name, shape in shapes(c).items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = (shape, array.array("f", [1.0 if len(shape) == 1 else 0.0] * count))
    tensors["model.embed_tokens.weight"] = ((c["vocab_size"], hidden), embed)
    tensors["lm_head.weight"] = ((c["vocab_size"], hidden), head)
    if sys.byteorder == "big":
        for _, values in tensors.values():
            values.byteswap()
    (folder / "config.json").write_text(json.dumps(c), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors({n: (s, v.tobytes()) for n, (s, v) in tensors.items()}))
    return folder


def write(folder: pathlib.Path, seed: int = 1, layers: int = 2, max_positions: int = 1 << 18) -> pathlib.Path:
    folder.mkdir(parents=True)
    c = config(layers, max_positions)
    (folder / "config.json").write_text(json.dumps(c), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(weights(c, seed)))
    return folder
