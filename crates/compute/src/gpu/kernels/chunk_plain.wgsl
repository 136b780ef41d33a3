// 32 plain numbers: ELEMENT 0 f32, 1 f16, 2 bf16.

const VECTORS = BITS / 4u;

alias Chunk = array<vec4<u32>, VECTORS>;

fn chunk_load(row: u32, c: u32) -> Chunk {
    var all: Chunk;
    for (var i = 0u; i < VECTORS; i++) { all[i] = w4[row + c * VECTORS + i]; }
    return all;
}

fn chunk_dot(all: Chunk, x: array<vec4<f32>, 8>) -> vec2<f32> {
    var sums = vec2<f32>();
    if (ELEMENT == 0u) {
        for (var j = 0u; j < 8u; j++) { sums[j / 4u] += dot(bitcast<vec4<f32>>(all[j % VECTORS]), x[j]); }
        return sums;
    }
    for (var j = 0u; j < 4u; j++) {
        let v = all[j];
        var low = vec4<f32>();
        var high = vec4<f32>();
        if (ELEMENT == 1u) {
            low = vec4<f32>(unpack2x16float(v.x), unpack2x16float(v.y));
            high = vec4<f32>(unpack2x16float(v.z), unpack2x16float(v.w));
        } else {
            let even = bitcast<vec4<f32>>(v << vec4<u32>(16u));
            let odd = bitcast<vec4<f32>>(v & vec4<u32>(0xffff0000u));
            low = vec4<f32>(even.x, odd.x, even.y, odd.y);
            high = vec4<f32>(even.z, odd.z, even.w, odd.w);
        }
        sums[j / 2u] += dot(low, x[2u * j]) + dot(high, x[2u * j + 1u]);
    }
    return sums;
}
