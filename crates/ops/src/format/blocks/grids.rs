//! Codebooks of the IQ types.
//!
//! `grids.bin` is made by `scripts/gguf-blocks.py` from the Python package `gguf` of llama.cpp, by
//! the ggml authors, under the MIT licence in `LICENSE-ggml`.

/// Indexes of values, as little-endian streams of 2 or 3 bits: the grids in the order below.
pub static PACKED: &[u8; 8832] = include_bytes!("grids.bin");

/// Entries of 8 weights of IQ1_S and IQ1_M.
pub static IQ1: [[i8; 8]; 2048] = grid(0, 2, &[-1, 0, 1]);
/// Entries of 8 weights of IQ2_XXS.
pub static IQ2_XXS: [[i8; 8]; 256] = grid(4096, 2, &[8, 25, 43]);
/// Entries of 8 weights of IQ2_XS.
pub static IQ2_XS: [[i8; 8]; 512] = grid(4608, 2, &[8, 25, 43]);
/// Entries of 8 weights of IQ2_S.
pub static IQ2_S: [[i8; 8]; 1024] = grid(5632, 2, &[8, 25, 43]);
/// Entries of 4 weights of IQ3_XXS.
pub static IQ3_XXS: [[i8; 4]; 256] = grid(7680, 3, &[4, 12, 20, 28, 36, 44, 52, 62]);
/// Entries of 4 weights of IQ3_S.
pub static IQ3_S: [[i8; 4]; 512] = grid(8064, 3, &[1, 3, 5, 7, 9, 11, 13, 15]);

/// Unpacks the grid that starts at a byte: indexes of `bits` bits into `values`.
const fn grid<const WIDTH: usize, const ENTRIES: usize>(
    start: usize,
    bits: usize,
    values: &[i8],
) -> [[i8; WIDTH]; ENTRIES] {
    let mut entries = [[0; WIDTH]; ENTRIES];
    let mut i = 0;
    while i < WIDTH * ENTRIES {
        let bit = i * bits;
        let byte = start + bit / 8;
        let next = if byte + 1 < PACKED.len() { PACKED[byte + 1] } else { 0 };
        let word = PACKED[byte] as usize | (next as usize) << 8;
        let index = word >> (bit % 8) & ((1 << bits) - 1);
        entries[i / WIDTH][i % WIDTH] = values[index];
        i += 1;
    }
    entries
}
