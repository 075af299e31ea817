# SPDX-License-Identifier: Apache-2.0
"""Writes the tiny model of tiny_model.py as a GGUF file, whole or in parts, with the standard library alone."""

import pathlib
import struct

import tiny_model

U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down"}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item) -> bytes:
    """Its type and itself; a list is of strings or of whole numbers."""
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    if isinstance(item, list):
        texts = isinstance(item[0], str)
        parts = (string(x) if texts else struct.pack("<i", x) for x in item)
        return struct.pack("<IIQ", ARRAY, STRING if texts else I32, len(item)) + b"".join(parts)
    return struct.pack("<If", F32, item) if isinstance(item, float) else struct.pack("<II", U32, item)


def metadata(c: dict) -> dict:
    tokenizer = tiny_model.tokenizer()
    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()} | {t["id"]: t["content"] for t in tokenizer["added_tokens"]}
    return {"general.architecture": "llama", "general.name": "tiny", "llama.block_count": c["num_hidden_layers"],
            "llama.context_length": c["max_position_embeddings"], "llama.embedding_length": c["hidden_size"],
            "llama.feed_forward_length": c["intermediate_size"], "llama.attention.head_count": c["num_attention_heads"],
            "llama.attention.head_count_kv": c["num_key_value_heads"], "llama.attention.key_length": c["head_dim"],
            "llama.attention.value_length": c["head_dim"], "llama.rope.freq_base": c["rope_theta"],
            "llama.rope.dimension_count": c["head_dim"], "llama.attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [texts[i] for i in range(len(texts))],
            "tokenizer.ggml.token_type": [3 if i in (tiny_model.BOS, tiny_model.EOS) else 1 for i in range(len(texts))],
            "tokenizer.ggml.merges": tokenizer["model"]["merges"],
            "tokenizer.ggml.bos_token_id": tiny_model.BOS, "tokenizer.ggml.eos_token_id": tiny_model.EOS}


def name_of(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def in_pairs(data: bytes, heads: int, rows: int) -> bytes:
    """The rows of each head in the order 0, d/2, 1, d/2 + 1, ..., as GGUF files have q and k of a Llama."""
    size, d = len(data) // rows, rows // heads
    order = [head * d + i // 2 + (i % 2) * (d // 2) for head in range(heads) for i in range(d)]
    return b"".join(data[row * size:(row + 1) * size] for row in order)


def tensors(c: dict, seed: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
    found = {}
    for name, (shape, data) in tiny_model.weights(c, seed).items():
        if "q_proj" in name or "k_proj" in name:
            data = in_pairs(data, c["num_attention_heads" if "q_proj" in name else "num_key_value_heads"], shape[0])
        found[name_of(name)] = (shape, data)
    return found


def file(keys: dict, parts: dict[str, tuple[tuple[int, ...], bytes]], kind: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(parts), len(keys))
    head += b"".join(string(key) + value(item) for key, item in keys.items())
    data = b""
    for name, (shape, numbers) in parts.items():
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += numbers + bytes(-len(numbers) % 32)
    return head + bytes(-len(head) % 32) + data


def write(path: pathlib.Path, seed: int = 1, layers: int = 2, max_positions: int = 1 << 18, keys: dict | None = None,
          without: str = "", more: dict | None = None) -> pathlib.Path:
    """`keys` take the place of others or, when None, leave them out; the tensor `without` is left out, `more` are added."""
    c = tiny_model.config(layers, max_positions)
    all_keys = {key: item for key, item in {**metadata(c), **(keys or {})}.items() if item is not None}
    all_tensors = {name: t for name, t in tensors(c, seed).items() if name != without} | (more or {})
    path.write_bytes(file(all_keys, all_tensors))
    return path


def write_parts(folder: pathlib.Path, count: int = 3, seed: int = 1) -> list[pathlib.Path]:
    c = tiny_model.config(2, 1 << 18)
    all_tensors = list(tensors(c, seed).items())
    share = -(-len(all_tensors) // count)
    paths = []
    for i in range(count):
        keys = {"split.no": i, "split.count": count, "split.tensors.count": len(all_tensors), "general.name": f"tiny{seed}"}
        path = folder / f"tiny-{i + 1:05}-of-{count:05}.gguf"
        path.write_bytes(file({**metadata(c), **keys} if i == 0 else keys, dict(all_tensors[i * share:(i + 1) * share])))
        paths.append(path)
    return paths
