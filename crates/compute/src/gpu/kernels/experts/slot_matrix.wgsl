// Matrices in a slot.
// BIAS_SCALAR: the type of the biases in the slot, one number for each stored row; 8 and 9 for none.
// needs: codec/load_blocks, @codec
// constants: BIAS_SCALAR

struct Part { weights: u32, scales: u32, biases: u32, bias: u32 } // bytes from the start of a slot; a word for weights
@group(0) @binding(3) var<storage, read> words: array<u32>;

const SLOT_UNIT = select(4u, 16u, VECTORS > 0u);

fn bias_at(at: u32, i: u32) -> f32 {
    if (BIAS_SCALAR > 2u) { return 0.0; }
    if (BIAS_SCALAR == 0u) { return bitcast<f32>(w[(at >> 2u) + i]); }
    let byte = at + i * 2u;
    let half = w[byte >> 2u] >> ((byte & 2u) * 8u);
    if (BIAS_SCALAR == 1u) { return unpack2x16float(half).x; }
    return bitcast<f32>(half << 16u);
}
