// Codec e2m1 (MXFP4, NVFP4): 32 weights in one vec4<u32>. `block_dot_i8` counts them in halves,
// from -8.
// implements: @codec

const QUANT_OFFSET = -8.0;
const QUANT_STEP = 0.5;
const UNIT_BYTES = 16u;

alias Block32 = vec4<u32>;

fn load_block(row: u32, c: u32) -> vec4<u32> {
    return w4[row + c];
}

// The eight weights of a word, times 2^-14: their bits are moved to f16's sign, lowest exponent
// bits and highest mantissa bit. Subnormals come out right, too.
struct Eight { low: vec4<f32>, high: vec4<f32> }

fn eight_values(word: u32) -> Eight {
    let up = vec4<u32>(word) << vec4<u32>(12u, 8u, 4u, 0u);
    let halves = (up & vec4<u32>(0x80008000u)) | (up >> vec4<u32>(3u) & vec4<u32>(0x0e000e00u));
    let a = unpack2x16float(halves.x);
    let b = unpack2x16float(halves.y);
    let c = unpack2x16float(halves.z);
    let d = unpack2x16float(halves.w);
    return Eight(vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y));
}

fn eight_dot(word: u32, x0: vec4<f32>, x1: vec4<f32>) -> f32 {
    let all = eight_values(word);
    return dot_4(all.low, x0) + dot_4(all.high, x1);
}

const F16_FACTOR = 16384.0;

// Four weights divided by F16_FACTOR.
fn block_f16_bits(q: vec4<u32>, j: u32) -> vec4<f32> {
    let all = eight_values(q[j / 2u]);
    return select(all.low, all.high, j % 2u == 1u);
}

fn block_has_nan(q: vec4<u32>) -> bool {
    return false;
}

fn block_values(q: vec4<u32>, j: u32) -> vec4<f32> {
    return block_f16_bits(q, j) * F16_FACTOR;
}

fn block_dot(q: vec4<u32>, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return vec2<f32>(
        eight_dot(q.x, x[0], x[1]) + eight_dot(q.y, x[2], x[3]),
        eight_dot(q.z, x[4], x[5]) + eight_dot(q.w, x[6], x[7])) * F16_FACTOR;
}

// Twice each weight plus 16: packed bytes without sign do not interfere with each other.
fn block_dot_i8(q: vec4<u32>, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    // Twice the magnitude is below 16. It is the code without sign, plus 1 if bits 0 and 2 are
    // set, 2 if 1 and 2 are, 2 if all are.
    let ones = q & q >> vec4<u32>(2u) & vec4<u32>(0x11111111u);
    let sizes = (q & vec4<u32>(0x77777777u)) + (ones | ones << vec4<u32>(1u) & q)
        + (q & q >> vec4<u32>(1u) & vec4<u32>(0x22222222u));
    let less = (q >> vec4<u32>(3u) & vec4<u32>(0x11111111u)) * 15u & sizes;
    let even = (sizes & vec4<u32>(0x0f0f0f0fu) | vec4<u32>(0x10101010u)) - (less << vec4<u32>(1u) & vec4<u32>(0x1e1e1e1eu));
    let odd = (sizes >> vec4<u32>(4u) & vec4<u32>(0x0f0f0f0fu) | vec4<u32>(0x10101010u))
        - (less >> vec4<u32>(3u) & vec4<u32>(0x1e1e1e1eu));
    return vec2<i32>(
        (dot4I8Packed(even.x, x0.x) + dot4I8Packed(odd.x, x0.y)) + (dot4I8Packed(even.y, x0.z) + dot4I8Packed(odd.y, x0.w)),
        (dot4I8Packed(even.z, x1.x) + dot4I8Packed(odd.z, x1.y)) + (dot4I8Packed(even.w, x1.z) + dot4I8Packed(odd.w, x1.w)));
}
