# SPDX-License-Identifier: Apache-2.0
"""Writes a model as a Hugging Face folder, and reads one back.

    python export.py --checkpoint CHECKPOINT.pt --tokenizer BUILD/tokenizer.json --out models/pocket
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model import Pocket
from tokenizer import BOS, EOS, SPECIAL

LIMIT = 21_000_000  # bytes that weights and tokenizer may take together


def save(model: Pocket, tokenizer: Path, folder: Path) -> int:
    """Writes the folder and returns the bytes that weights and tokenizer take."""
    folder.mkdir(parents=True, exist_ok=True)
    names = model.hugging_face_names()
    weights = {names[n]: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    texts = {
        "config.json": model.shape.hugging_face(),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS],
            "add_bos_token": True, "model_max_length": model.shape.positions, "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return sum((folder / name).stat().st_size for name in ("model.safetensors", "tokenizer.json"))


def load(model: Pocket, weights: Path) -> None:
    """Fills a model from model.safetensors."""
    stored = load_file(str(weights))
    names = model.hugging_face_names()
    if missing := set(names.values()) ^ set(stored):
        raise ValueError(f"{weights}: these weights do not match the model's: {sorted(missing)}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[names[name]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="made by train.py; left out: untrained weights")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = Pocket()
    if arguments.checkpoint:
        model.load_state_dict(torch.load(arguments.checkpoint, map_location="cpu", weights_only=True)["model"])
    size = save(model, arguments.tokenizer, arguments.out)
    print(f"{arguments.out}: {sum(p.numel() for p in model.parameters())} parameters, {size} bytes of at most {LIMIT}")
    if size > LIMIT:
        raise SystemExit("too large")


if __name__ == "__main__":
    main()
