#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that #include lines point the one way that src/README.md draws; exits 1 and names each line that does not."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# folder of src/: what it may include, besides itself and include/lodestone. "model/rope.h" allows that one header.
MAY_INCLUDE = {
    "base": [],
    "io": ["base"],
    "kernels": ["base"],
    "ann": ["kernels", "base"],
    "kv": ["kernels", "io", "base"],
    "attend": ["kv", "kernels", "base"],
    "select": ["ann", "attend", "kv", "kernels", "io", "base", "model/rope.h"],
    "model": ["attend", "kv", "kernels", "io", "base"],
    "gpu": ["ann", "model", "select", "attend", "kv", "kernels", "io", "base"],
    "engine": ["gpu", "model", "select", "attend", "kv", "kernels", "io", "base"],
    "train": ["gpu", "engine", "select", "ann", "model", "attend", "kv", "kernels", "io", "base"],
    "tasks": ["base", "io"],
    "eval": ["train", "ann", "engine", "gpu", "tasks", "select", "attend", "kernels", "kv", "io", "base", "model"],
    "report": ["eval", "engine", "tasks", "model", "kernels", "base"],
}
# A public header is read by people who have none of our dependencies' headers.
PUBLIC_SYSTEM_HEADER = re.compile(r"[a-z_0-9]+")
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')


def allowed(folder: str, header: str) -> bool:
    target = header.split("/")[0]
    return target in (folder, "lodestone") or target in MAY_INCLUDE[folder] or header in MAY_INCLUDE[folder]


def fault(path: pathlib.Path, quoted: str, system: str) -> str:
    """Why this include of this file is wrong, or an empty string."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        if parts[1] not in MAY_INCLUDE:
            return f"src/{parts[1]} is not in the table of scripts/check_includes.py"
        if quoted and not allowed(parts[1], quoted):
            return f"src/{parts[1]} may include {', '.join(MAY_INCLUDE[parts[1]] or ['nothing'])}"
    elif quoted and not quoted.startswith("lodestone/") and parts[0] in ("include", "examples"):
        return f"{parts[0]}/ may include public headers only"
    elif system and parts[0] == "include" and not PUBLIC_SYSTEM_HEADER.fullmatch(system):
        return "public headers include the standard library only"
    return ""


def main() -> int:
    faults = 0
    for top in ("include", "src", "examples"):
        for path in sorted(p for p in (ROOT / top).rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                reason = match and fault(path, match[1] or "", match[2] or "")
                if reason:
                    print(f"{path.relative_to(ROOT)}:{number}: {line.strip()}: {reason}", file=sys.stderr)
                    faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
