#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks every tracked file: licence line in sources, no large files outside models/ and demo/, text ends in a newline."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LICENCE = "SPDX-License-Identifier: Apache-2.0"
LARGEST = 300 * 1024
MAY_BE_LARGE = ("models/", "demo/")
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".cmake"}
SOURCE_NAMES = {"CMakeLists.txt", "quickstart", "check", "run"}


def tracked_files() -> list[str]:
    """Of the checkout, whoever owns it; without git (a release archive), every file outside build/."""
    listing = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listing.returncode == 0:
        return [name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    files = (p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file())
    return [name for name in files if not name.startswith(("build/", ".git/"))]


def faults_of(name: str) -> list[str]:
    path = ROOT / name
    size = path.stat().st_size
    found = []
    if size > LARGEST and not name.startswith(MAY_BE_LARGE):
        found.append(f"{size} bytes; files above {LARGEST} belong into models/ or demo/")
    if path.suffix in SOURCES or path.name in SOURCE_NAMES:
        text = path.read_text(encoding="utf-8")
        if LICENCE not in "\n".join(text.split("\n")[:2]):
            found.append(f"expected '{LICENCE}' in the first two lines")
        if not text.endswith("\n"):
            found.append("expected a newline at the end")
    return found


def main() -> int:
    faults = [f"{name}: {fault}" for name in tracked_files() for fault in faults_of(name)]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
