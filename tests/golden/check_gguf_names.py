# SPDX-License-Identifier: Apache-2.0
"""Compares the GGUF names of every family's tensors with llama.cpp's published table (PyPI `gguf`).

    python3 tests/golden/check_gguf_names.py     needs gguf; run it when a family is added

A name that llama.cpp's table of the architecture lacks is an error; one of its table that no name here covers is listed, for
there the reader refuses files that have it.
"""
import pathlib
import re
import sys

from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

SOURCES = pathlib.Path(__file__).parents[2] / "src/model"
FILES = [path.read_text() for path in [SOURCES / "family.cc", *sorted((SOURCES / "families").glob("*.[ch]*"))]]
# Read with the config, or of layers that draft tokens, or left out by llama.cpp's readers as well.
ELSEWHERE = re.compile(r"rope_f|attn_rot_embd|nextn|\.indexer|enorm|hnorm|eh_proj")
# Its readers take either form, whichever of them its writer's table has.
EITHER = {"blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps", "blk.{}.ffn_gate_up_exps"}


def table(name: str) -> list[str]:
    """GGUF names in an array of TensorName, those of what it is joined with included."""
    for text in FILES:
        alias = re.search(rf"\bconst std::span<const TensorName>[^;]*?\b{name} = (\w+)", text)
        here = re.search(rf"\b{alias.group(1) if alias else name} ?=", text)
        if here is None or (alias is None and not re.search("std::array|constexpr auto", text[here.start() - 80:here.start()])):
            continue
        body = text[here.end():text.index(";\n", here.end())]
        names = re.findall(r'"((?:blk\.|token_embd|output|per_layer)[^"]*)"', body)
        return names + [n for shared in ("kUsualExperts", "kSharedExperts", "kGlmNames") if shared in body for n in table(shared)]
    raise SystemExit(f"no table {name}")


def published(architecture: str) -> set[str]:
    arch = next(a for a in MODEL_ARCH if MODEL_ARCH_NAMES[a] == architecture)
    return {TENSOR_NAMES[t].replace("{bid}", "{}") for t in MODEL_TENSORS[arch]}


def stem(name: str) -> str:
    return re.sub(r"\.(weight|bias|scale)$", "", name)


def main() -> int:
    families = []
    for block in re.findall(r"\{\.name = \"[^}]*\}", FILES[0]):
        field = dict(re.findall(r"\.(\w+) = \"?([^\",}]+)", block))
        own = {stem(n) for n in table(field["own_names"])} if "own_names" in field else set()
        families.append((field, own, published(field["gguf"])))
    usual, wrong = {stem(n) for n in table("kUsualNames")}, 0
    for field, own, known in families:
        # Families that share a table have each some of its names.
        anywhere = set().union(*(k for f, _, k in families if f.get("own_names") == field.get("own_names")))
        missing = sorted(own - anywhere - EITHER)
        unread = sorted(n for n in known - own - usual - EITHER if not ELSEWHERE.search(n))
        print(f"{field['name']} ({field['gguf']}): {len((own | usual) & known)} names of llama.cpp's table" +
              (f"; not in it: {', '.join(missing)}" if missing else "") + (f"; not read: {', '.join(unread)}" if unread else ""))
        wrong += len(missing)
    return min(wrong, 1)


sys.exit(main())
