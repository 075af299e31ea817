#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ends `lodestone index` at random moments, by SIGKILL or Ctrl-C, and gives the same command again, until it has ended by itself as often as asked.

usage: index_kill.py PROGRAM [--model models/pocket] [--text demo/document.txt] [--kills 10] [--seed 1] [-a SPEC]...

After every kill the file must be absent or whole (`verify`); the file of a reading that was killed must equal, byte for byte, that of a
reading that was not. Prints a line a kill and ends with exit code 1 at the first difference.
"""
import argparse
import hashlib
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


INTERRUPTED = 130  # exit code


def read_once(command: list[str], kill_after: float | None, by: int = signal.SIGKILL) -> bool:
    """Runs the command; True when it ended by itself, False when it was ended by the signal after so many seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(by)
        _, errors = process.communicate()
        if process.returncode in (-signal.SIGKILL, INTERRUPTED):
            return False
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}: {errors.decode(errors='replace')}")
    return True


def digest(path: pathlib.Path) -> str:
    """The file itself may be larger than memory, and a second one than the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--model", default=str(ROOT / "models/pocket"))
    parser.add_argument("--text", default=str(ROOT / "demo/document.txt"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-a", "--attention", action="append", default=[])
    flags = parser.parse_args()
    draw = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = pathlib.Path(folder, "whole.lode"), pathlib.Path(folder, "killed.lode")
        command = [flags.program, "index", "--quiet", "-m", flags.model, "-f", flags.text]
        for spec in flags.attention:
            command += ["-a", spec]
        start = time.monotonic()
        read_once(command + ["-o", str(whole)], None)
        usual = time.monotonic() - start
        print(f"one reading: {usual:.1f} s, {whole.stat().st_size} bytes", flush=True)
        expected = digest(whole)
        whole.unlink()
        kills = readings = went_on = 0
        while kills < flags.kills:
            killed.unlink(missing_ok=True)
            attempts, spent = 0, 0.0
            while True:
                moment = draw.uniform(0.02, 1.1) * usual if kills < flags.kills else None
                start = time.monotonic()
                went_on += pathlib.Path(folder, ".killed.lode.partial").exists()
                ended = read_once(command + ["-o", str(killed)], moment, draw.choice((signal.SIGKILL, signal.SIGINT)))
                spent += time.monotonic() - start
                attempts += 1
                if ended:
                    break
                kills += 1
                if killed.exists() and subprocess.run([flags.program, "verify", str(killed)], capture_output=True).returncode != 0:
                    sys.exit(f"kill {kills} after {moment:.1f} s: the file is there and damaged")
                print(f"kill {kills} after {moment:.1f} s: the file is {'whole' if killed.exists() else 'absent'}", flush=True)
                if killed.exists():  # killed behind the last step: the same command would refuse to replace it
                    break
            readings += 1
            if digest(killed) != expected:
                sys.exit(f"reading {readings}, after {attempts} attempts: the file differs from that of one reading")
            left = [path.name for path in pathlib.Path(folder).iterdir() if path != killed]
            if left:
                sys.exit(f"reading {readings}: left behind: {', '.join(left)}")
            print(f"reading {readings}: the same file after {attempts} attempts, {spent / usual:.2f} times one reading", flush=True)
    if not went_on:
        sys.exit("no reading had anything to go on from: take a longer text")
    print(f"{kills} kills, {readings} readings, {went_on} of whose attempts went on: all ended with the same file")


if __name__ == "__main__":
    main()
