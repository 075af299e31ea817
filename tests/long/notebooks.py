# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of python/notebooks from their first cell to their last; exits 1 when one fails.

usage: PYTHONPATH=build/release/python python tests/long/notebooks.py [FOLDER]
Needs nbclient, ipykernel and matplotlib. With a folder, the notebooks with their outputs and plots are written there.
"""

import pathlib
import resource
import sys
import time

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[2]


def processor_seconds():
    """Of kernels that have ended: on a busy machine the clock says little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    failed = 0
    for path in sorted((ROOT / "python" / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        start, used = time.monotonic(), processor_seconds()
        try:
            nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
            plots = sum("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", []))
            print(f"{path.name}: {time.monotonic() - start:.0f} s, {processor_seconds() - used:.0f} s of processors, {plots} plot(s)")
        except nbclient.exceptions.CellExecutionError as error:
            print(f"{path.name}: {error}")
            failed = 1
        for cell in notebook.cells:
            for out in cell.get("outputs", []):
                print(out.get("text", ""), end="")
        if len(sys.argv) > 1:
            nbformat.write(notebook, pathlib.Path(sys.argv[1]) / path.name)
    return failed


if __name__ == "__main__":
    sys.exit(main())
