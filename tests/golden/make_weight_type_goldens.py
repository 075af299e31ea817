# SPDX-License-Identifier: Apache-2.0
"""Records what PyPI's gguf reads from random blocks of every supported type of weights, in weight_types.bin.

    python3 tests/golden/make_weight_type_goldens.py        (needs gguf; run once, the output is committed)

For each type of TYPES, in that order: BLOCKS blocks of random bytes (f16 scales are drawn finite), then the float32 numbers that
they stand for.
"""
import pathlib

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
         "IQ3_S", "IQ3_XXS", "MXFP4"]
# Where in a block f16 numbers lie.
HALVES = {"F16": [0], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "IQ3_S": [0], "IQ3_XXS": [0]}


def random_blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    numbers, size = GGML_QUANT_SIZES[Type[name]]
    blocks = rng.integers(0, 256, (max(2, 384 // numbers), size), dtype=np.uint8)
    for at in HALVES.get(name, []):
        half = blocks[:, at + 1]
        half[(half & 0x7C) == 0x7C] ^= 0x40  # an exponent of all ones is infinity or NaN
    if name == "F32":
        return rng.standard_normal(blocks.shape[0], dtype=np.float32).view(np.uint8).reshape(blocks.shape)
    if name == "BF16":
        blocks[:, 1] &= 0xBF
    return blocks


if __name__ == "__main__":
    rng = np.random.default_rng(11)
    with open(pathlib.Path(__file__).parent / "weight_types.bin", "wb") as out:
        for name in TYPES:
            blocks = random_blocks(name, rng)
            numbers = dequantize(blocks.reshape(1, -1), Type[name]).astype(np.float32)
            assert np.isfinite(numbers).all(), name
            out.write(blocks.tobytes() + numbers.tobytes())
