# SPDX-License-Identifier: Apache-2.0
"""The README's commands work as written, in a folder where models/ and demo/ lie as they do in the repository."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

from program import PROGRAM

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Readme(unittest.TestCase):
    def test_commands(self):
        blocks = re.findall(r"^```sh ci\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
        self.assertGreater(len(blocks), 0)
        with tempfile.TemporaryDirectory(prefix="lodestone-") as name:
            folder = pathlib.Path(name)
            (folder / "models").symlink_to(ROOT / "models")
            (folder / "demo").mkdir()
            # The document's beginning will do: what is tested here is that the commands run.
            lines = (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:12000].splitlines()
            (folder / "demo" / "document.txt").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
            path = f"{pathlib.Path(PROGRAM).resolve().parent}:{os.environ['PATH']}"
            for block in blocks:
                done = subprocess.run(["bash", "-euxc", block], cwd=folder, env={**os.environ, "PATH": path},
                                      capture_output=True, text=True, timeout=240, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_links(self):
        """Every relative link of every page leads somewhere."""
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/*.md"), *ROOT.glob("train/**/*.md")]:
            for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
                self.assertTrue((page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}")


if __name__ == "__main__":
    unittest.main()
