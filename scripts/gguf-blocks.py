#!/usr/bin/env python3
"""Writes the codebooks of ggml's IQ types, and blocks of every type with their weights for tests.

usage: gguf-blocks.py          needs: pip install gguf==0.19.0 (MIT, The ggml authors)"""
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

OPS = Path(__file__).parent.parent / "crates/ops"

# Name, bits of an index, values: in the order of `format/blocks/grids.rs`.
GRIDS = [
    ("IQ1_S", 2, [-1, 0, 1]),
    ("IQ2_XXS", 2, [8, 25, 43]),
    ("IQ2_XS", 2, [8, 25, 43]),
    ("IQ2_S", 2, [8, 25, 43]),
    ("IQ3_XXS", 3, [4, 12, 20, 28, 36, 44, 52, 62]),
    ("IQ3_S", 3, [1, 3, 5, 7, 9, 11, 13, 15]),
]

# In the order of `BlockType::ALL`.
TYPES = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S "
    "IQ2_S IQ4_XS IQ1_M TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0 Q2_0"
).split()

# Weights and bytes of types that the package does not know.
NEW = {"Q1_0": (128, 18), "Q2_0": (64, 18)}

# Weights of each type in the test's file.
WEIGHTS = 1024


def packed(name, bits, values):
    kind = getattr(quants, name)
    kind.init_grid()
    codes = np.searchsorted(values, np.asarray(kind.grid).flatten())
    stream = (codes[:, None] >> np.arange(bits)) & 1
    return np.packbits(stream.astype(np.uint8).flatten(), bitorder="little").tobytes()


def codes(blocks, bits):
    """The f16 of each block, and its codes: a stream of `bits` bits, lowest first."""
    stream = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    weights = stream.reshape(len(blocks), -1, bits) << np.arange(bits)
    return blocks[:, :2].copy().view("<f2").astype("<f4"), weights.sum(axis=2)


def dequantize(name, blocks):
    """As ggml does."""
    if name == "Q1_0":
        d, q = codes(blocks, 1)
        return np.where(q == 1, d, -d)
    if name == "Q2_0":
        d, q = codes(blocks, 2)
        return (q.astype("<f4") - 1) * d
    return quants.dequantize(blocks, GGMLQuantizationType[name])


def main():
    grids = b"".join(packed(*grid) for grid in GRIDS)
    (OPS / "src/format/blocks/grids.bin").write_bytes(grids)
    random = np.random.default_rng(5)
    vectors = b""
    for name in TYPES:
        weights, size = NEW.get(name) or quants.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        count = WEIGHTS // weights
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            out = dequantize(name, blocks).astype("<f4")
        vectors += name.ljust(8).encode() + bytes([count]) + blocks.tobytes() + out.tobytes()
    (OPS / "tests/data/block_types.bin").write_bytes(vectors)
    print(len(grids), "bytes of codebooks,", len(vectors), "bytes of blocks")


if __name__ == "__main__":
    main()
