// The products of tile.wgsl by matrices of 16 x 16 that a subgroup multiplies together, f16 to f32. Subgroups lie in a
// grid; each has four matrices of sums beside each other, and up to four above each other, which lie as far apart as subgroups
// do together: with few rows in a tile all of them multiply fewer. A number's sum is in the order of the inputs, whatever the
// tile. TEAM: a multiple of 32. WG: whole subgroups, of 64 outputs each.
// needs: gemm/gemm_tile
// enables: f16, wgpu_cooperative_matrix
// constants: OUTS, PAIRS, ROWS, STEP, TEAM, WG

alias Four = vec4<f16>;
alias AsIs = vec4<f16>;
alias MatX = coop_mat16x16<f16, A>;
alias MatW = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

const PAD = 2u;
// Subgroups beside and above each other, and matrices of a subgroup above each other.
const ACROSS_BY = OUTS / 64u;
const DOWN_BY = WG / TEAM / ACROSS_BY;
const DOWN = ROWS / 16u / DOWN_BY;
// Rows from one matrix of a subgroup to its next.
const APART = DOWN_BY * 16u;
// Two matrices of sums on their way out, side by side.
const STAGE_PITCH = select(36u, 32u, WG / TEAM > 4u);
const STAGE = 16u * STAGE_PITCH;

@group(0) @binding(2) var<storage, read> halves: array<vec4<f16>>;

var<workgroup> group_tile: Tile;
var<workgroup> stage: array<f32, STAGE * (WG / TEAM)>;

fn four_of_x(x: AsIs) -> Four {
    return x;
}

// f16 ends at 65,504: larger weights are taken for that.
fn four_of(v: vec4<f32>) -> Four {
    let most = max(max(abs(v.x), abs(v.y)), max(abs(v.z), abs(v.w)));
    if (most > 65504.0) { return Four(clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0))); }
    return Four(v);
}

// Two matrices side by side, which lie in the stage. A thread has one column, or gate and up of one output.
fn emit_matrices(tile: Tile, index: u32, row: u32, output: u32) {
    let lane = index % TEAM;
    let columns = 32u >> PAIRS;
    let o = lane % columns << PAIRS;
    let to = tile.output + output + o;
    if (to >= p.outputs) { return; }
    let bias = vec2<f32>(bias_of(to, tile.slot), bias_of(to + PAIRS, tile.slot));
    let rows = min(max(tile.count, row) - row, 16u);
    for (var r = lane / columns; r < rows; r += TEAM / columns) {
        let at = index / TEAM * STAGE + r * STAGE_PITCH + o;
        let factor = bitcast<f32>(row_factor[row + r]);
        let sum = stage[at] * factor + bias.x;
        if (PAIRS == 1u) {
            a[row_out[row + r] + to / 2u] = activate(sum, stage[at + 1u] * factor + bias.y, p.alpha, p.limit);
        } else {
            a[row_out[row + r] + to] = sum;
        }
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
    let row = sub / ACROSS_BY * 16u;
    let output = sub % ACROSS_BY * 64u;
    let at = sub * STAGE;
    // Matrices of rows that a subgroup needs.
    let live = (tile.count + APART - 1u) / APART;
    var c00 = MatC();
    var c01 = MatC();
    var c02 = MatC();
    var c03 = MatC();
    var c10 = MatC();
    var c11 = MatC();
    var c12 = MatC();
    var c13 = MatC();
    var c20 = MatC();
    var c21 = MatC();
    var c22 = MatC();
    var c23 = MatC();
    var c30 = MatC();
    var c31 = MatC();
    var c32 = MatC();
    var c33 = MatC();
    workgroupBarrier();
    tile_start(tile, index);
    tile_ask(0u, index);
    let x_at = row * PITCH;
    let w_at = output * PITCH;
    for (var k = 0u; k < p.cols; k += STEP) {
        tile_put(tile, k, index);
        workgroupBarrier();
        if (k + STEP < p.cols) { tile_ask(k + STEP, index); }
        for (var c = 0u; c < FOURS; c += 4u) {
            let w0 = coopLoad<MatW>(&ws[w_at + c], PITCH);
            let w1 = coopLoad<MatW>(&ws[w_at + 16u * PITCH + c], PITCH);
            let w2 = coopLoad<MatW>(&ws[w_at + 32u * PITCH + c], PITCH);
            let w3 = coopLoad<MatW>(&ws[w_at + 48u * PITCH + c], PITCH);
            let x0 = coopLoadT<MatX>(&xs[x_at + c], PITCH);
            c00 = coopMultiplyAdd(x0, w0, c00);
            c01 = coopMultiplyAdd(x0, w1, c01);
            c02 = coopMultiplyAdd(x0, w2, c02);
            c03 = coopMultiplyAdd(x0, w3, c03);
            if ((DOWN > 1u) & (live > 1u)) {
                let x1 = coopLoadT<MatX>(&xs[x_at + APART * PITCH + c], PITCH);
                c10 = coopMultiplyAdd(x1, w0, c10);
                c11 = coopMultiplyAdd(x1, w1, c11);
                c12 = coopMultiplyAdd(x1, w2, c12);
                c13 = coopMultiplyAdd(x1, w3, c13);
            }
            if ((DOWN > 2u) & (live > 2u)) {
                let x2 = coopLoadT<MatX>(&xs[x_at + 2u * APART * PITCH + c], PITCH);
                c20 = coopMultiplyAdd(x2, w0, c20);
                c21 = coopMultiplyAdd(x2, w1, c21);
                c22 = coopMultiplyAdd(x2, w2, c22);
                c23 = coopMultiplyAdd(x2, w3, c23);
            }
            if ((DOWN > 3u) & (live > 3u)) {
                let x3 = coopLoadT<MatX>(&xs[x_at + 3u * APART * PITCH + c], PITCH);
                c30 = coopMultiplyAdd(x3, w0, c30);
                c31 = coopMultiplyAdd(x3, w1, c31);
                c32 = coopMultiplyAdd(x3, w2, c32);
                c33 = coopMultiplyAdd(x3, w3, c33);
            }
        }
        workgroupBarrier();
    }
    coopStoreT(c00, &stage[at], STAGE_PITCH);
    coopStoreT(c01, &stage[at + 16u], STAGE_PITCH);
    workgroupBarrier();
    emit_matrices(tile, index, row, output);
    workgroupBarrier();
    coopStoreT(c02, &stage[at], STAGE_PITCH);
    coopStoreT(c03, &stage[at + 16u], STAGE_PITCH);
    workgroupBarrier();
    emit_matrices(tile, index, row, output + 32u);
    if ((DOWN > 1u) & (live > 1u)) {
        workgroupBarrier();
        coopStoreT(c10, &stage[at], STAGE_PITCH);
        coopStoreT(c11, &stage[at + 16u], STAGE_PITCH);
        workgroupBarrier();
        emit_matrices(tile, index, row + APART, output);
        workgroupBarrier();
        coopStoreT(c12, &stage[at], STAGE_PITCH);
        coopStoreT(c13, &stage[at + 16u], STAGE_PITCH);
        workgroupBarrier();
        emit_matrices(tile, index, row + APART, output + 32u);
    }
    if ((DOWN > 2u) & (live > 2u)) {
        workgroupBarrier();
        coopStoreT(c20, &stage[at], STAGE_PITCH);
        coopStoreT(c21, &stage[at + 16u], STAGE_PITCH);
        workgroupBarrier();
        emit_matrices(tile, index, row + 2u * APART, output);
        workgroupBarrier();
        coopStoreT(c22, &stage[at], STAGE_PITCH);
        coopStoreT(c23, &stage[at + 16u], STAGE_PITCH);
        workgroupBarrier();
        emit_matrices(tile, index, row + 2u * APART, output + 32u);
    }
    if ((DOWN > 3u) & (live > 3u)) {
        workgroupBarrier();
        coopStoreT(c30, &stage[at], STAGE_PITCH);
        coopStoreT(c31, &stage[at + 16u], STAGE_PITCH);
        workgroupBarrier();
        emit_matrices(tile, index, row + 3u * APART, output);
        workgroupBarrier();
        coopStoreT(c32, &stage[at], STAGE_PITCH);
        coopStoreT(c33, &stage[at + 16u], STAGE_PITCH);
        workgroupBarrier();
        emit_matrices(tile, index, row + 3u * APART, output + 32u);
    }
}
