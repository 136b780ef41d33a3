// The rows of four chunks: the first word of each (the first vector of four words where chunks are so read), and the first
// byte of their scales and biases.
// ELEMENT, BITS, BLOCK_COLS, SCALE as in formats.wgsl; BLOCK_COLS is a multiple of 32, and weights begin at multiples of 16
// bytes (of 4 where chunks are read by words), scales and biases at multiples of 4.

struct Rows { weights: vec4<u32>, scales: vec4<u32>, biases: vec4<u32> }

@group(0) @binding(1) var<storage, read> w: array<u32>;
@group(0) @binding(2) var<storage, read> w4: array<vec4<u32>>;

fn chunk_scale(at: u32, c: u32) -> f32 {
    let i = c / (BLOCK_COLS / 32u);
    if (SCALE == 0u) { return bitcast<f32>(w[(at >> 2u) + i]); }
    if (SCALE < 3u) {
        let byte = at + i * 2u;
        let half = w[byte >> 2u] >> ((byte & 2u) * 8u);
        if (SCALE == 1u) { return unpack2x16float(half).x; }
        return bitcast<f32>(half << 16u);
    }
    let byte = at + i;
    let code = w[byte >> 2u] >> ((byte & 3u) * 8u) & 255u;
    // e8m0: 2^(code - 127), where 0 is less than the smallest number with all bits and 255 is NaN.
    if (code == 0u) { return bitcast<f32>(0x00400000u | code); }
    if (code == 255u) { return bitcast<f32>(0x7fc00000u | code); }
    return bitcast<f32>(code << 23u);
}

fn chunk_scales(at: vec4<u32>, c: vec4<u32>) -> vec4<f32> {
    if (ELEMENT < 3u) { return vec4<f32>(1.0); }
    return vec4<f32>(chunk_scale(at.x, c.x), chunk_scale(at.y, c.y), chunk_scale(at.z, c.z), chunk_scale(at.w, c.w));
}

fn chunk_biases(at: vec4<u32>, c: vec4<u32>) -> vec4<f32> {
    if (ELEMENT != 3u) { return vec4<f32>(); }
    return chunk_scales(at, c);
}
