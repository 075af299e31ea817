#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills `train saap` and `train hash` with signal 9 at random moments. The same command must go on from the checkpoint and end
with the same bytes as a training that nobody disturbed.

usage: training_kills.py [saap] [hash] [--kills 20] [--device cpu] [--seed 1] [--threads 1] [--program build/release/lodestone]

After each kill the artefact must be absent or complete, and the checkpoint absent or readable. A run that finds a checkpoint must
go on from it. After the last run of a round only the artefact may be left. Random moments seldom fall into a write, so each setting
is also killed once at each of these moments: amid the write of a checkpoint, right behind the artefact's rename, and (SAAP) behind a
checkpoint within the optimiser's steps. Prints a line a kill and ends with exit code 1 at the first difference."""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODEL, TEXT = ROOT / "models" / "pocket", ROOT / "demo" / "document.txt"
CHECKPOINT_SECONDS = 20  # SaapRun::kCheckpointEvery
POLL = 0.0003  # seconds; a checkpoint's temporary file lives for a few milliseconds
LONGEST = 600  # seconds of one run: 50 times what it takes
REFUSED = 2  # exit code: the output exists already

# Small sizes, so that one training takes seconds. --sample-memory makes several groups of heads, each of which ends with a
# checkpoint; q8 because what a checkpoint restores is rounded a second time.
SAAP = ("--clusters", "64", "--hidden", "64", "--samples", "200", "--batch", "200", "--window", "127")
SETTINGS = {
    "saap": {
        "plain texts, three groups": ("--lessons", "off", "--tokens", "1k", "--prompts", "4", "--late-tokens", "128",
                                      "--steps", "400", "--sample-memory", "1400KiB", *SAAP),
        "lessons, trained keys, q8": ("--lessons", "on", "--tokens", "2k", "--prompts", "3", "--steps", "300", "--type", "q8",
                                      "--keys", "trained", "--key-steps", "150", "--key-sample", "512", "--key-queries", "128",
                                      *SAAP),
    },
    "hash": {
        "plain texts": ("--lessons", "off", "--tokens", "1k", "--prompts", "10", "--steps", "8", "--others", "512"),
        "lessons, steps after chunks": ("--lessons", "on", "--tokens", "2k", "--prompts", "4", "--steps", "4", "--draw", "chunk",
                                        "--queries", "8", "--keys", "query-head", "--others", "512", "--start", "random"),
    },
}


def notes_of(checkpoint: pathlib.Path) -> dict[str, str]:
    """The strings in a safetensors file; fails where the file is shorter or longer than its header says."""
    data = checkpoint.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + length])
    notes = header.pop("__metadata__")
    ends = [tensor["data_offsets"][1] for tensor in header.values()]
    if len(data) != 8 + length + max(ends):
        sys.exit(f"{checkpoint}: {len(data)} bytes, expected {8 + length + max(ends)}")
    return notes


class Trial:
    """One setting of one training."""

    def __init__(self, flags: argparse.Namespace, verb: str, setting: str, folder: pathlib.Path):
        self.verb, self.setting, self.folder = verb, setting, folder
        arguments = SETTINGS[verb][setting]
        self.prompts = int(arguments[arguments.index("--prompts") + 1])
        self.artefact = folder / "killed.safetensors"
        self.checkpoint = folder / "killed.safetensors.checkpoint"
        self.temporaries = [folder / f".{path.name}.tmp" for path in (self.artefact, self.checkpoint)]
        self.log = folder / "log"
        self.command = [str(flags.program), "train", verb, "--device", flags.device, "-t", str(flags.threads), "-m", str(MODEL),
                        "-f", str(TEXT), *arguments, "-o", str(self.artefact)]
        self.kills = self.went_on = self.began_anew = self.had_ended = self.checkpoints_left = 0
        self.usual = 0.0
        self.whole = b""

    def fail(self, sentence: str):
        sys.exit(f"train {self.verb} ({self.setting}), kill {self.kills}: {sentence}\n{' '.join(self.command)}\n{self.log.read_text()}")

    def start(self, *more: str) -> subprocess.Popen:
        with self.log.open("wb") as log:
            return subprocess.Popen([*self.command, *more], stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)

    def finish(self, process: subprocess.Popen):
        try:
            process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.kill(process)
            self.fail(f"still running after {LONGEST} s")
        if process.returncode != 0:
            self.fail(f"exit code {process.returncode}")

    def undisturbed(self):
        began = time.monotonic()
        self.finish(self.start())
        self.usual = time.monotonic() - began
        self.whole = self.artefact.read_bytes()
        self.expect_artefact_alone()
        self.artefact.unlink()

    def expect_artefact_alone(self):
        left = sorted(path.name for path in self.folder.iterdir() if path not in (self.artefact, self.log))
        if left:
            self.fail(f"left behind: {', '.join(left)}")

    def last_line(self) -> str:
        """How far the program said that it was."""
        lines = self.log.read_text().splitlines()
        return lines[-1].split(",")[0] if lines else "nothing said yet"

    def began_at_the_start(self) -> bool:
        """Whether the progress lines show work that every checkpoint makes needless: keys for k-means, the first prompt."""
        said = self.log.read_text()
        if self.verb == "saap":
            return "saap: keys: " in said
        first = re.search(r"^train hash: (\d+)/(\d+) tokens", said, re.MULTILINE)
        return first is not None and int(first[1]) <= int(first[2]) // self.prompts

    def written(self) -> int:
        """When the checkpoint was written, in nanoseconds."""
        return self.checkpoint.stat().st_mtime_ns if self.checkpoint.exists() else 0

    def kept(self) -> str:
        """What the checkpoint holds; empty where there is none."""
        if not self.checkpoint.exists():
            return ""
        notes = notes_of(self.checkpoint)
        if self.verb == "hash":
            return f"{notes['prompts_done']} of {self.prompts} prompts"
        heads = sum(name.endswith(".report") for name in notes)
        amid = [f"{count} steps of {name.split('.net.')[0].split('.joint.')[0]}" for name, count in sorted(notes.items())
                if name.endswith((".net.steps", ".joint.keys.steps"))]
        return ", ".join(["centroids", f"{heads} heads", *amid])

    def send(self, process: subprocess.Popen, what: signal.Signals):
        """To the whole group, and only while the process is not yet reaped, so that the number cannot mean another."""
        if process.poll() is None:
            os.killpg(process.pid, what)

    def kill(self, process: subprocess.Popen) -> bool:
        """False where the process had ended before."""
        self.send(process, signal.SIGKILL)
        return process.wait() == -signal.SIGKILL

    def killed_after(self, seconds: float) -> bool:
        process = self.start()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        return self.kill(process)

    def wait_until(self, process: subprocess.Popen, happened) -> None:
        while process.poll() is None and not happened():
            time.sleep(POLL)

    def killed_at(self, moment: str, draw: random.Random) -> bool:
        process = self.start()
        if moment == "amid a checkpoint's write":
            if draw.random() < 0.5:  # not the first one
                self.wait_until(process, self.checkpoint.exists)
            self.wait_until(process, self.temporaries[1].exists)
        elif moment == "behind the artefact's rename":
            self.wait_until(process, self.artefact.exists)
        else:  # a stopped process ages without work, and its next step writes the checkpoint that is due
            self.wait_until(process, lambda: "classifiers of layers" in self.log.read_text())
            time.sleep(draw.uniform(0, 0.1) * self.usual)
            self.send(process, signal.SIGSTOP)
            before = self.written()
            time.sleep(CHECKPOINT_SECONDS + 0.5)
            self.send(process, signal.SIGCONT)
            self.wait_until(process, lambda: self.written() != before)
            time.sleep(draw.uniform(0, 0.02) * self.usual)  # soon, before the last step's checkpoint replaces it
        return self.kill(process)

    def look(self, moment: str) -> None:
        """What a kill left."""
        self.kills += 1
        if self.artefact.exists() and self.artefact.read_bytes() != self.whole:
            self.fail("the artefact is there and not the undisturbed one")
        known = (self.artefact, self.checkpoint, self.log, *self.temporaries)
        unknown = [path.name for path in self.folder.iterdir() if path not in known]
        if unknown:
            self.fail(f"unexpected files: {', '.join(unknown)}")
        amid = [path.name for path in self.temporaries if path.exists()]
        print(f"  kill {self.kills} {moment} ({self.last_line()}): checkpoint {self.kept() or 'absent'}"
              f"{', artefact complete' if self.artefact.exists() else ''}{', amid the write of ' + ', '.join(amid) if amid else ''}",
              flush=True)

    def go_on(self, seconds: float | None) -> bool:
        """The same command again, killed after so many seconds or left alone; True where it ended by itself."""
        checkpoint = self.kept()
        if self.artefact.exists():
            # The training had ended, and the same command refuses to replace its artefact, as it does after any other. A
            # checkpoint that the kill left stays until --force ends the training once more from it.
            self.had_ended += 1
            self.checkpoints_left += bool(checkpoint)
            if self.start().wait() != REFUSED or self.artefact.read_bytes() != self.whole:
                self.fail("the artefact is there; expected the same command to leave it alone")
            self.finish(self.start("--force"))
            return True
        if seconds is None:
            self.finish(self.start())
        elif self.killed_after(seconds):
            if checkpoint and self.began_at_the_start():
                self.fail(f"there was a checkpoint of {checkpoint}, and the training began anew")
            return False
        anew = self.began_at_the_start()
        if anew == bool(checkpoint):
            self.fail(f"checkpoint: {checkpoint or 'none'}; the training {'began anew' if anew else 'went on'}")
        self.began_anew += anew
        self.went_on += not anew
        return True

    def end_round(self, began: float):
        if self.artefact.read_bytes() != self.whole:
            self.fail("the artefact differs from that of the undisturbed training")
        self.expect_artefact_alone()
        self.artefact.unlink()
        print(f"    the same {len(self.whole)} bytes, nothing else left, {time.monotonic() - began:.1f} s in all", flush=True)

    def random_round(self, draw: random.Random, most: int) -> int:
        """Kills once, in every third round or so a second time; returns how often."""
        began, kills = time.monotonic(), 0
        while kills < most and (kills == 0 or draw.random() < 1 / 3):
            moment = draw.uniform(0, self.usual)
            ended = not self.killed_after(moment) if kills == 0 else self.go_on(moment)
            if ended:
                self.ended_early(began)
                return kills
            kills += 1
            self.look(f"after {moment:.2f} s")
            if self.artefact.exists():
                break
        self.go_on(None)
        self.end_round(began)
        return kills

    def ended_early(self, began: float):
        """A run that was faster than the undisturbed one: no kill, but the artefact must be the same."""
        print("  ended before the kill", flush=True)
        self.end_round(began)

    def aimed_round(self, moment: str, draw: random.Random):
        began = time.monotonic()
        if not self.killed_at(moment, draw):
            self.ended_early(began)
            return
        self.look(moment)
        self.go_on(None)
        self.end_round(began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", nargs="*", metavar="saap|hash", help="both without it")
    parser.add_argument("--kills", type=int, default=20, help="at random moments, of each training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build" / "release" / "lodestone")
    flags = parser.parse_args()
    summary = []
    for verb in flags.trainings or list(SETTINGS):
        if verb not in SETTINGS:
            parser.error(f"expected saap or hash, found {verb}")
        began, draw, trials = time.monotonic(), random.Random(f"{flags.seed} {verb}"), []
        at_random = 0
        with tempfile.TemporaryDirectory(prefix="lodestone-training-") as folder:
            for number, setting in enumerate(SETTINGS[verb]):
                place = pathlib.Path(folder, str(number))
                place.mkdir()
                trials.append(trial := Trial(flags, verb, setting, place))
                trial.undisturbed()
                print(f"train {verb}, {setting}: undisturbed {trial.usual:.1f} s, seed {flags.seed}", flush=True)
                wanted = flags.kills * (number + 1) // len(SETTINGS[verb])
                while at_random < wanted:
                    at_random += trial.random_round(draw, wanted - at_random)
                aims = ["amid a checkpoint's write", "behind the artefact's rename"]
                if verb == "saap":
                    aims.append("behind a checkpoint within the steps")
                for aim in aims:
                    trial.aimed_round(aim, draw)
        kills, went_on, anew, ended, left = (sum(getattr(t, name) for t in trials) for name in (
            "kills", "went_on", "began_anew", "had_ended", "checkpoints_left"))
        summary.append(f"train {verb}: {at_random} kills at random moments and {kills - at_random} at chosen ones. {went_on} runs went on "
                       f"from a checkpoint and ended; {anew} began anew, since there was none yet; {ended} kills found the artefact "
                       f"complete, {left} of them with its checkpoint beside it. Every artefact was the same. "
                       f"{time.monotonic() - began:.0f} s")
    print("\n".join(summary))


if __name__ == "__main__":
    main()
