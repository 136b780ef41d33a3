// The products of tile.wgsl by plain multiplications: a square of 16 x 16 threads, each with ROWS / 16 rows by OUTS / 16
// outputs, pairs of neighbouring ones. A number's sum is in the order of the inputs, whatever the tile.
// needs: gemm/gemm_tile
// constants: OUTS, PAIRS, ROWS, STEP, WG

alias Four = vec4<f32>;
alias AsIs = vec2<u32>;

const PAD = 1u;
const DOWN = ROWS / 16u;
const ACROSS = OUTS / 16u;

@group(0) @binding(2) var<storage, read> halves: array<vec2<u32>>;

fn four_of_x(both: AsIs) -> Four {
    return vec4<f32>(unpack2x16float(both.x), unpack2x16float(both.y));
}

fn four_of(v: vec4<f32>) -> Four {
    return v;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let tile = tile_of(group_index(id, count));
    if (tile.count == 0u) { return; }
    tile_begin(tile, index);
    workgroupBarrier();
    let row = index / 16u;
    let output = index % 16u * 2u;
    var sums: array<f32, DOWN * ACROSS>;
    for (var i = 0u; i < DOWN * ACROSS; i++) { sums[i] = 0.0; }
    tile_start(tile, index);
    tile_ask(0u, index);
    for (var k = 0u; k < p.cols; k += STEP) {
        tile_put(tile, k, index);
        workgroupBarrier();
        if (k + STEP < p.cols) { tile_ask(k + STEP, index); }
        for (var c = 0u; c < FOURS; c++) {
            for (var j = 0u; j < ACROSS; j++) {
                let weights = ws[(output + (j & 1u) + (j >> 1u) * 32u) * PITCH + c];
                for (var i = 0u; i < DOWN; i++) {
                    sums[i * ACROSS + j] += dot(xs[(row + i * 16u) * PITCH + c], weights);
                }
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < DOWN; i++) {
        for (var j = 0u; j < ACROSS; j += 1u + PAIRS) {
            let at = i * ACROSS + j;
            let o = output + (j & 1u) + (j >> 1u) * 32u;
            tile_emit(tile, row + i * 16u, o, vec2<f32>(sums[at], sums[at + PAIRS]));
        }
    }
}
