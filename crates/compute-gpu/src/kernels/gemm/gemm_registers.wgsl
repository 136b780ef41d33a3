// GEMM (see gemm_tile.wgsl) in registers: 16 x 16 threads, each with TILE_M / 16 rows by TILE_N /
// 16 outputs, in pairs of neighbours. A sum is in the order of the inputs, whatever the tile.
// Grid: tiles x blocks of TILE_N outputs.
// needs: gemm/gemm_tile
// constants: GATED, TILE_K, TILE_M, TILE_N, WG

alias Vec4 = vec4<f32>;
alias XWords = vec2<u32>;

const PAD = 1u;
const THREAD_M = TILE_M / 16u;
const THREAD_N = TILE_N / 16u;

@group(0) @binding(2) var<storage, read> x_f16: array<vec2<u32>>;

fn x_vec4(words: XWords) -> Vec4 {
    return vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
}

fn w_vec4(v: vec4<f32>) -> Vec4 {
    return v;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let tile = tile_at(group_index(id, count));
    if (tile.count == 0u) { return; }
    tile_rows(tile, index);
    workgroupBarrier();
    let row = index / 16u;
    let output = index % 16u * 2u;
    var sums: array<f32, THREAD_M * THREAD_N>;
    for (var i = 0u; i < THREAD_M * THREAD_N; i++) { sums[i] = 0.0; }
    tile_offsets(tile, index);
    tile_load(0u, index);
    for (var k = 0u; k < p.cols; k += TILE_K) {
        tile_store(tile, k, index);
        workgroupBarrier();
        if (k + TILE_K < p.cols) { tile_load(k + TILE_K, index); }
        for (var c = 0u; c < K_VECS; c++) {
            for (var j = 0u; j < THREAD_N; j++) {
                let weights = w_tile[(output + (j & 1u) + (j >> 1u) * 32u) * PITCH + c];
                for (var i = 0u; i < THREAD_M; i++) {
                    sums[i * THREAD_N + j] += dot(x_tile[(row + i * 16u) * PITCH + c], weights);
                }
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < THREAD_M; i++) {
        for (var j = 0u; j < THREAD_N; j += 1u + GATED) {
            let sum = i * THREAD_N + j;
            let o = output + (j & 1u) + (j >> 1u) * 32u;
            tile_write(tile, row + i * 16u, o, vec2<f32>(sums[sum], sums[sum + GATED]));
        }
    }
}
