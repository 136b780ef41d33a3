// 32 numbers of e2m1 (ELEMENT 4, a vector of words) or e4m3 (5, two vectors).

const VECTORS = BITS / 4u;

alias Chunk = array<vec4<u32>, VECTORS>;

fn chunk_load(row: u32, c: u32) -> array<vec4<u32>, VECTORS> {
    var all: array<vec4<u32>, VECTORS>;
    for (var i = 0u; i < VECTORS; i++) { all[i] = w4[row + c * VECTORS + i]; }
    return all;
}

// Exponent and mantissa below the sign are moved into an f32, whose exponent is then put right: subnormals come out right
// as whole numbers do.
fn e2m1(codes: vec4<u32>) -> vec4<f32> {
    let e = codes >> vec4<u32>(1u) & vec4<u32>(3u);
    let m = codes & vec4<u32>(1u);
    let normal = bitcast<vec4<f32>>((e + vec4<u32>(126u)) << vec4<u32>(23u) | m << vec4<u32>(22u));
    let size = select(normal, vec4<f32>(m) * 0.5, e == vec4<u32>());
    return select(size, -size, (codes & vec4<u32>(8u)) != vec4<u32>());
}

fn e4m3(codes: vec4<u32>) -> vec4<f32> {
    let e = codes >> vec4<u32>(3u) & vec4<u32>(15u);
    let m = codes & vec4<u32>(7u);
    let normal = bitcast<vec4<f32>>((e + vec4<u32>(120u)) << vec4<u32>(23u) | m << vec4<u32>(20u));
    var size = select(normal, vec4<f32>(m) / 512.0, e == vec4<u32>());
    let nan = bitcast<vec4<f32>>(codes | vec4<u32>(0x7fc00000u));
    size = select(size, nan, (codes & vec4<u32>(127u)) == vec4<u32>(127u));
    return select(size, -size, (codes & vec4<u32>(128u)) != vec4<u32>());
}

fn chunk_dot(all: array<vec4<u32>, VECTORS>, x: array<vec4<f32>, 8>) -> f32 {
    var sum = 0.0;
    for (var j = 0u; j < 8u; j++) {
        if (ELEMENT == 4u) {
            let word = all[0][j / 2u] >> (16u * (j % 2u));
            sum += dot(e2m1(vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u) & vec4<u32>(15u)), x[j]);
        } else {
            let word = all[j / 4u % VECTORS][j % 4u];
            sum += dot(e4m3(vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(255u)), x[j]);
        }
    }
    return sum;
}
