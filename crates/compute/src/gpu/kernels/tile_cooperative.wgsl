// The products of tile.wgsl by matrices of 16 x 16 that a subgroup multiplies together, f16 to f32: each of
// WG / TEAM subgroups has 32 rows by 64 outputs. A number's sum is in the order of the inputs, whatever the tile.

alias Four = vec4<f16>;
alias MatX = coop_mat16x16<f16, A>;
alias MatW = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

const PAD = 2u;
const ACROSS = OUTS / 64u;

@group(0) @binding(2) var<storage, read> halves: array<vec4<f16>>;

var<workgroup> group_tile: Tile;
// A matrix of sums on its way out, for each subgroup.
var<workgroup> stage: array<f32, 256u * WG / TEAM>;

fn four_of_x(at: u32) -> Four {
    return halves[at];
}

// f16 ends at 65,504: larger weights are taken for that.
fn four_of(v: vec4<f32>) -> Four {
    let most = max(max(abs(v.x), abs(v.y)), max(abs(v.z), abs(v.w)));
    if (most > 65504.0) { return Four(clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0))); }
    return Four(v);
}

fn emit_matrix(tile: Tile, index: u32, row: u32, output: u32) {
    let at = index / TEAM * 256u;
    for (var i = index % TEAM; i < (256u >> PAIRS); i += TEAM) {
        let r = i >> (4u - PAIRS);
        let o = (i & (15u >> PAIRS)) << PAIRS;
        let sum = at + r * 16u + o;
        tile_emit(tile, row + r, output + o, vec2<f32>(stage[sum], stage[sum + PAIRS]));
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    // All threads see one tile, so that they go on together: cooperative matrices ask for proof of that.
    if (index == 0u) { group_tile = tile_of(group_index(id, count)); }
    let tile = workgroupUniformLoad(&group_tile);
    if (tile.count == 0u) { return; }
    tile_begin(tile, index);
    let sub = index / TEAM;
    let row = sub / ACROSS * 32u;
    let output = sub % ACROSS * 64u;
    let at = sub * 256u;
    for (var i = index; i < 256u * WG / TEAM; i += WG) { stage[i] = 0.0; }
    workgroupBarrier();
    let zero = coopLoadT<MatC>(&stage[at], 16u);
    var c00 = zero;
    var c01 = zero;
    var c02 = zero;
    var c03 = zero;
    var c10 = zero;
    var c11 = zero;
    var c12 = zero;
    var c13 = zero;
    for (var k = 0u; k < p.cols; k += STEP) {
        tile_load(tile, k, index);
        workgroupBarrier();
        for (var c = 0u; c < FOURS; c += 4u) {
            let x0 = coopLoadT<MatX>(&xs[row * PITCH + c], PITCH);
            let x1 = coopLoadT<MatX>(&xs[(row + 16u) * PITCH + c], PITCH);
            let w0 = coopLoad<MatW>(&ws[output * PITCH + c], PITCH);
            let w1 = coopLoad<MatW>(&ws[(output + 16u) * PITCH + c], PITCH);
            let w2 = coopLoad<MatW>(&ws[(output + 32u) * PITCH + c], PITCH);
            let w3 = coopLoad<MatW>(&ws[(output + 48u) * PITCH + c], PITCH);
            c00 = coopMultiplyAdd(x0, w0, c00);
            c01 = coopMultiplyAdd(x0, w1, c01);
            c02 = coopMultiplyAdd(x0, w2, c02);
            c03 = coopMultiplyAdd(x0, w3, c03);
            c10 = coopMultiplyAdd(x1, w0, c10);
            c11 = coopMultiplyAdd(x1, w1, c11);
            c12 = coopMultiplyAdd(x1, w2, c12);
            c13 = coopMultiplyAdd(x1, w3, c13);
        }
        workgroupBarrier();
    }
    coopStoreT(c00, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row, output);
    workgroupBarrier();
    coopStoreT(c01, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row, output + 16u);
    workgroupBarrier();
    coopStoreT(c02, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row, output + 32u);
    workgroupBarrier();
    coopStoreT(c03, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row, output + 48u);
    workgroupBarrier();
    coopStoreT(c10, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row + 16u, output);
    workgroupBarrier();
    coopStoreT(c11, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row + 16u, output + 16u);
    workgroupBarrier();
    coopStoreT(c12, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row + 16u, output + 32u);
    workgroupBarrier();
    coopStoreT(c13, &stage[at], 16u);
    workgroupBarrier();
    emit_matrix(tile, index, row + 16u, output + 48u);
}
