#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks every tracked file: licence line in sources, no large files outside models/ and demo/, text ends in a newline, every
kernel of the library is launched in one way; and that no folder of sources holds so many that nobody finds one."""

import collections
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LICENCE = "SPDX-License-Identifier: Apache-2.0"
LARGEST = 300 * 1024
MAY_BE_LARGE = ("models/", "demo/")
MOST_IN_A_FOLDER = 40
MAY_HOLD_MORE = ("tests", "fuzz/corpus")
SOURCES = {".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".cmake"}
CUDA = {".cu", ".cuh"}
LAUNCHES = "launch_chain.cu"  # has the one call of the runtime that launches
OTHER_LAUNCHES = ("<<<", "cudaLaunchKernel", "cudaLaunchCooperativeKernel")
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
        if path.suffix in CUDA and name.startswith("src/") and path.name != LAUNCHES and any(way in text for way in OTHER_LAUNCHES):
            found.append("expected kernels to be launched by Launch (kernels/cuda/device/launch.cuh), so that they can be held back")
    return found


def full_folders(names: list[str]) -> list[str]:
    counts = collections.Counter(pathlib.PurePosixPath(name).parent.as_posix() for name in names)
    return [f"{folder}: {count} files; a folder holds at most {MOST_IN_A_FOLDER}: split it by what its files are about"
            for folder, count in sorted(counts.items()) if count > MOST_IN_A_FOLDER and not folder.startswith(MAY_HOLD_MORE)]


def main() -> int:
    names = tracked_files()
    faults = [f"{name}: {fault}" for name in names for fault in faults_of(name)] + full_folders(names)
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
