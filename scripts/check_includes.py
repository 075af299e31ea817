#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that #include lines point the one way that src/README.md draws and that no folder is crowded; exits 1 and names each fault."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folder of src/: what it may include, besides itself and include/lodestone. "kernels/weight_type.h" allows that one header.
LOWER = ["base", "io", "documents", "kernels", "kv", "attend", "ann", "select", "text", "model", "gpu", "engine"]
MAY_INCLUDE = {
    "base": [],
    "io": ["base", "kernels/weight_type.h"],
    "text": ["io", "base"],
    "documents": ["text/utf8.h", "io", "base"],
    "kernels": ["base"],
    "ann": ["kernels", "base"],
    "kv": ["kernels", "io", "base"],
    "attend": ["kv", "kernels", "base"],
    "select": ["ann", "attend", "kv", "kernels", "io", "base"],
    "model": ["text", "attend", "kv", "kernels", "io", "base"],
    "gpu": ["ann", "model", "select", "attend", "kv", "kernels", "io", "base"],
    "engine": ["documents", "gpu", "model", "text", "select", "attend", "kv", "kernels", "io", "base"],
    "cluster": LOWER,
    "serve": ["cluster", *LOWER],
    "lab/tasks": ["text", "io", "base"],
    "lab/train": ["lab/tasks", *LOWER],
    "lab/eval": ["lab/tasks", "lab/train", *LOWER],
    "lab/bench": ["lab/eval", "lab/train", *LOWER],
    "lab/studies": ["lab/eval", "lab/bench", "lab/tasks", "lab/train", *LOWER],
    "lab/report": ["lab/eval", "lab/bench", "lab/studies", "lab/tasks", *LOWER],
}
MOST_FILES = 40  # in one folder of src/: more is hard to read
# A public header is read by people who have none of our dependencies' headers.
PUBLIC_SYSTEM_HEADER = re.compile(r"[a-z_0-9]+")
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')


def folder_of(parts: tuple[str, ...]) -> str:
    """The folder of the table that a path below src/ lies in: "lab/eval" for lab/eval/scoring.h."""
    return "/".join(parts[:2]) if parts[0] == "lab" else parts[0]


def allowed(folder: str, header: str) -> bool:
    target = folder_of(tuple(header.split("/")))
    return target in (folder, "lodestone") or target in MAY_INCLUDE[folder] or header in MAY_INCLUDE[folder]


def fault(path: pathlib.Path, quoted: str, system: str) -> str:
    """Why this include of this file is wrong, or an empty string."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        folder = folder_of(parts[1:])
        if folder not in MAY_INCLUDE:
            return f"src/{folder} is not in the table of scripts/check_includes.py"
        if quoted and not allowed(folder, quoted):
            return f"src/{folder} may include {', '.join(MAY_INCLUDE[folder] or ['nothing'])}"
    elif quoted and not quoted.startswith("lodestone/") and parts[0] in ("include", "examples"):
        return f"{parts[0]}/ may include public headers only"
    elif system and parts[0] == "include" and not PUBLIC_SYSTEM_HEADER.fullmatch(system):
        return "public headers include the standard library only"
    return ""


def crowded_folders() -> list[str]:
    """A sentence for each folder of src/ that holds more files than MOST_FILES."""
    folders = [ROOT / "src", *(p for p in (ROOT / "src").rglob("*") if p.is_dir())]
    counts = {folder: sum(p.is_file() for p in folder.iterdir()) for folder in folders}
    return [f"{folder.relative_to(ROOT)}: expected at most {MOST_FILES} files, found {count}"
            for folder, count in sorted(counts.items()) if count > MOST_FILES]


def main() -> int:
    crowded = crowded_folders()
    print("\n".join(crowded), end="\n" if crowded else "", file=sys.stderr)
    faults = len(crowded)
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
