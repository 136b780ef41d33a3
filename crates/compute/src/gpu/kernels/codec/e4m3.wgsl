// 32 numbers of e4m3: two vectors of words.
// implements: @codec

const VECTORS = 2u;

struct Chunk { a: vec4<u32>, b: vec4<u32> }

fn chunk_load(row: u32, c: u32) -> Chunk {
    return Chunk(w4[row + 2u * c], w4[row + 2u * c + 1u]);
}

// The numbers of a word, times 2^-8: their bits lie where f16 has sign, lowest bits of the exponent and highest bits of the
// mantissa. So also those without a leading one come out right.
fn four_numbers(word: u32) -> vec4<f32> {
    let up = vec2<u32>(word << 8u, word);
    let halves = (up & vec2<u32>(0x80008000u)) | (up >> vec2<u32>(1u) & vec2<u32>(0x3f803f80u));
    let even = unpack2x16float(halves.x);
    let odd = unpack2x16float(halves.y);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

const FACTOR = 256.0;

fn word_of_four(q: Chunk, j: u32) -> u32 {
    if (j >= 4u) { return q.b[j % 4u]; }
    return q.a[j % 4u];
}

// Four numbers, divided by FACTOR; but for those that are not numbers.
fn chunk_bits(q: Chunk, j: u32) -> vec4<f32> {
    return four_numbers(word_of_four(q, j));
}

// A code without its sign is 127 where it is NaN, and only there is the sum 128.
fn nan_bits(words: vec4<u32>) -> vec4<u32> {
    return ((words & vec4<u32>(0x7f7f7f7fu)) + vec4<u32>(0x01010101u)) & vec4<u32>(0x80808080u);
}

fn chunk_has_nans(q: Chunk) -> bool {
    return any((nan_bits(q.a) | nan_bits(q.b)) != vec4<u32>(0u));
}

fn chunk_four(q: Chunk, j: u32) -> vec4<f32> {
    let sizes = vec4<u32>(word_of_four(q, j)) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(127u);
    let nans = bitcast<vec4<f32>>(vec4<u32>(0x7fc00000u) | sizes);
    return select(chunk_bits(q, j) * FACTOR, nans, sizes == vec4<u32>(127u));
}

fn sixteen_dot(q: vec4<u32>, x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>) -> f32 {
    return (dot(four_numbers(q.x), x0) + dot(four_numbers(q.y), x1)) + (dot(four_numbers(q.z), x2) + dot(four_numbers(q.w), x3));
}

fn chunk_dot(q: Chunk, x: array<vec4<f32>, 8>) -> vec2<f32> {
    let sums = vec2<f32>(sixteen_dot(q.a, x[0], x[1], x[2], x[3]), sixteen_dot(q.b, x[4], x[5], x[6], x[7])) * FACTOR;
    let nans = nan_bits(q.a) | nan_bits(q.b);
    let any_nan = nans.x | nans.y | nans.z | nans.w;
    return select(sums, vec2<f32>(bitcast<f32>(0x7fc00000u | any_nan)), any_nan != 0u);
}
