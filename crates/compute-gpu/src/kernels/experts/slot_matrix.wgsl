// Matrices in an expert's slot. BIAS_SCALAR: type of the biases in the slot, one for each stored
// row; 8 and 9 for none.
// needs: codec/load_blocks, @codec
// constants: BIAS_SCALAR

// Offsets from the start of a slot: weights in load units of the codec, the others in bytes.
struct SlotMatrix { weights: u32, scales: u32, biases: u32, bias: u32 }
@group(0) @binding(3) var<storage, read> words: array<u32>;

fn bias_at(start: u32, i: u32) -> f32 {
    if (BIAS_SCALAR > 2u) { return 0.0; }
    if (BIAS_SCALAR == 0u) { return bitcast<f32>(w[(start >> 2u) + i]); }
    let byte_offset = start + i * 2u;
    let half = w[byte_offset >> 2u] >> ((byte_offset & 2u) * 8u);
    if (BIAS_SCALAR == 1u) { return unpack2x16float(half).x; }
    return bitcast<f32>(half << 16u);
}
