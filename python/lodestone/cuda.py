# SPDX-License-Identifier: Apache-2.0
"""Arrays on a GPU without PyTorch, JAX or CuPy: for programs that have none of them, and for tests.

    q, k, v = (lodestone.cuda.to_device(x) for x in (q, k, v))
    output, lse = lodestone.attend(q, k, v)
    print(output.to_host())

`attend`, `attend_causal`, `Plan.run`, `Selector`, `merge` and `top_k` take arrays of all of these on a GPU by DLPack, without a copy.
"""

from __future__ import annotations

from . import ArrayLike, CudaArray, StreamLike
from ._core import _gpu_count, _to_device

__all__ = ["CudaArray", "device_count", "to_device"]


def device_count() -> int:
    """How many GPUs this package can compute on: 0 where it was built without CUDA, or there is no driver."""
    return _gpu_count()


def to_device(array: ArrayLike, device: int = 0, stream: StreamLike | None = None) -> CudaArray:
    """A copy on a GPU of an array in the CPU's memory, in C order and of any type of number; waits for the stream.

    device: the GPU's number, from 0. InputError where the package was built without CUDA, RunError for a GPU that is not there.
    """
    return _to_device(array, device, stream)
