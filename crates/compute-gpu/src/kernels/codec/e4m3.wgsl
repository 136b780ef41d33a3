// Codec e4m3 (MXFP8): 32 weights in two vec4<u32>.
// implements: @codec

const UNIT_BYTES = 16u;

struct Block32 { a: vec4<u32>, b: vec4<u32> }

fn load_block(row: u32, c: u32) -> Block32 {
    return Block32(w4[row + 2u * c], w4[row + 2u * c + 1u]);
}

// The weights of a word, times 2^-8: their bits are moved to f16's sign, lowest exponent bits and
// highest mantissa bits. Subnormals come out right, too.
fn four_values(word: u32) -> vec4<f32> {
    let up = vec2<u32>(word << 8u, word);
    let halves = (up & vec2<u32>(0x80008000u)) | (up >> vec2<u32>(1u) & vec2<u32>(0x3f803f80u));
    let even = unpack2x16float(halves.x);
    let odd = unpack2x16float(halves.y);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

const F16_FACTOR = 256.0;

fn word_of_four(q: Block32, j: u32) -> u32 {
    if (j >= 4u) { return q.b[j % 4u]; }
    return q.a[j % 4u];
}

// Four weights divided by F16_FACTOR; wrong for NaN.
fn block_f16_bits(q: Block32, j: u32) -> vec4<f32> {
    return four_values(word_of_four(q, j));
}

// A code without sign is 127 for NaN; only then is the sum 128.
fn nan_bits(words: vec4<u32>) -> vec4<u32> {
    return ((words & vec4<u32>(0x7f7f7f7fu)) + vec4<u32>(0x01010101u)) & vec4<u32>(0x80808080u);
}

fn block_has_nan(q: Block32) -> bool {
    return any((nan_bits(q.a) | nan_bits(q.b)) != vec4<u32>(0u));
}

fn block_values(q: Block32, j: u32) -> vec4<f32> {
    let sizes = vec4<u32>(word_of_four(q, j)) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(127u);
    let nans = bitcast<vec4<f32>>(vec4<u32>(0x7fc00000u) | sizes);
    return select(block_f16_bits(q, j) * F16_FACTOR, nans, sizes == vec4<u32>(127u));
}

fn sixteen_dot(q: vec4<u32>, x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>) -> f32 {
    return (dot_4(four_values(q.x), x0) + dot_4(four_values(q.y), x1)) + (dot_4(four_values(q.z), x2) + dot_4(four_values(q.w), x3));
}

fn block_dot(q: Block32, x: array<vec4<f32>, 8>) -> vec2<f32> {
    let sums = vec2<f32>(sixteen_dot(q.a, x[0], x[1], x[2], x[3]), sixteen_dot(q.b, x[4], x[5], x[6], x[7])) * F16_FACTOR;
    let nans = nan_bits(q.a) | nan_bits(q.b);
    let any_nan = nans.x | nans.y | nans.z | nans.w;
    return select(sums, vec2<f32>(bitcast<f32>(0x7fc00000u | any_nan)), any_nan != 0u);
}
