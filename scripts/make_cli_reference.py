#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_cli_reference.py PROGRAM [--check]: writes docs/cli.md from the program's own --help, or checks that it is current."""

import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Command line

Written by `scripts/make_cli_reference.py build/release/lodestone` from the program's own `--help`; a test checks that it is current.

Exit codes: 0 done; 1 a failure at run time; 2 bad usage or bad input, with one sentence on stderr; 130 interrupted.
`verify` ends with 1 where what it was given is damaged, and with 2 where it cannot say (`"intact": null`): it knows no such file or architecture, or may not open it.
Counts take the suffixes k = 1024 and M = 1024². Results go to stdout, progress and remarks to stderr.
"""


def help_of(program: str, words: list[str]) -> str:
    return subprocess.run([program, *words, "--help"], capture_output=True, check=True, text=True).stdout


def page(program: str, words: list[str]) -> str:
    text = help_of(program, words)
    title = " ".join(["lodestone", *words])
    found = f"\n{'#' * (2 + len(words))} {title}\n\n```\n{text.strip()}\n```\n"
    _, _, verbs = text.partition("\nSubcommands:\n")
    for verb in re.findall(r"^ {2}(\S+)", verbs, re.MULTILINE):
        found += page(program, [*words, verb])
    return found


def main() -> int:
    program = sys.argv[1]
    wanted = HEAD + page(program, [])
    if sys.argv[2:] != ["--check"]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    print("docs/cli.md is not current; run scripts/make_cli_reference.py build/release/lodestone", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
