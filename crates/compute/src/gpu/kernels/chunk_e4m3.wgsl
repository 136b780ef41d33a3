// 32 numbers of e4m3: two vectors of words.

const VECTORS = 2u;

struct Chunk { a: vec4<u32>, b: vec4<u32> }

fn chunk_load(row: u32, c: u32) -> Chunk {
    return Chunk(w4[row + 2u * c], w4[row + 2u * c + 1u]);
}

// The numbers of a word, times 2^-8: their bits lie where f16 has sign, lowest bits of the exponent and highest bits of the
// mantissa. So also those without a leading one come out right.
fn four_of(word: u32) -> vec4<f32> {
    let up = vec2<u32>(word << 8u, word);
    let halves = (up & vec2<u32>(0x80008000u)) | (up >> vec2<u32>(1u) & vec2<u32>(0x3f803f80u));
    let even = unpack2x16float(halves.x);
    let odd = unpack2x16float(halves.y);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn chunk_four(q: Chunk, j: u32) -> vec4<f32> {
    var word = q.a[j % 4u];
    if (j >= 4u) { word = q.b[j % 4u]; }
    let sizes = vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(127u);
    let nans = bitcast<vec4<f32>>(vec4<u32>(0x7fc00000u) | sizes);
    return select(four_of(word) * 256.0, nans, sizes == vec4<u32>(127u));
}

fn sixteen_dot(q: vec4<u32>, x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>) -> f32 {
    return (dot(four_of(q.x), x0) + dot(four_of(q.y), x1)) + (dot(four_of(q.z), x2) + dot(four_of(q.w), x3));
}

fn chunk_dot(q: Chunk, x: array<vec4<f32>, 8>) -> vec2<f32> {
    let sums = vec2<f32>(sixteen_dot(q.a, x[0], x[1], x[2], x[3]), sixteen_dot(q.b, x[4], x[5], x[6], x[7])) * 256.0;
    // A code without its sign is 127 where it is NaN, and only there is the sum 128.
    let codes = (q.a & vec4<u32>(0x7f7f7f7fu)) + vec4<u32>(0x01010101u)
        | (q.b & vec4<u32>(0x7f7f7f7fu)) + vec4<u32>(0x01010101u);
    let nans = (codes.x | codes.y | codes.z | codes.w) & 0x80808080u;
    return select(sums, vec2<f32>(bitcast<f32>(0x7fc00000u | nans)), nans != 0u);
}
