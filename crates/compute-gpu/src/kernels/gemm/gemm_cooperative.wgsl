// GEMM (see gemm_tile.wgsl) on cooperative matrices, 16 x 16 x 16, f16 to f32. Grid: tiles x
// blocks of TILE_N outputs.
// The subgroups of a workgroup form a grid. Each accumulates four matrices along N and up to four
// along M; those along M are as far apart as all subgroups together cover, so tiles with few rows
// leave work out evenly. A sum is in the order of the inputs, whatever the tile.
// TEAM: a multiple of 32. WG: whole subgroups, of 64 outputs each.
// needs: gemm/cooperative_types, gemm/gemm_tile
// enables: f16, wgpu_cooperative_matrix
// constants: GATED, TEAM, TILE_K, TILE_M, TILE_N, WG

// Subgroups along N and M, and matrices of a subgroup along M.
const SUBGROUPS_N = TILE_N / 64u;
const SUBGROUPS_M = WG / TEAM / SUBGROUPS_N;
const MATRICES_M = TILE_M / 16u / SUBGROUPS_M;
// Rows from one matrix of a subgroup to its next.
const MATRIX_PITCH = SUBGROUPS_M * 16u;
// Pitch of two matrices of sums side by side, on their way to out.
const STAGE_PITCH = select(36u, 32u, WG / TEAM > 4u);
const STAGE_WORDS = 16u * STAGE_PITCH;

var<workgroup> group_tile: Tile;
var<workgroup> out_stage: array<f32, STAGE_WORDS * (WG / TEAM)>;

// Writes two matrices from the stage. A thread has one column, or gate and up of one output.
fn write_matrices(tile: Tile, index: u32, row: u32, output: u32) {
    let lane = index % TEAM;
    let cols = 32u >> GATED;
    let o = lane % cols << GATED;
    let out_col = tile.output + output + o;
    if (out_col >= outputs_at(tile.slot)) { return; }
    let bias = vec2<f32>(bias_of(out_col, tile.slot), bias_of(out_col + GATED, tile.slot));
    let rows = min(max(tile.count, row) - row, 16u);
    for (var r = lane / cols; r < rows; r += TEAM / cols) {
        let stage_offset = index / TEAM * STAGE_WORDS + r * STAGE_PITCH + o;
        let factor = bitcast<f32>(row_factor[row + r]);
        let sum = out_stage[stage_offset] * factor + bias.x;
        if (GATED == 1u) {
            act[row_out_offset[row + r] + out_col / 2u] = activate(sum, out_stage[stage_offset + 1u] * factor + bias.y, p.alpha, p.limit);
        } else {
            act[row_out_offset[row + r] + out_col] = activate_up(sum);
        }
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    // Uniform over the workgroup, as cooperative matrices require.
    if (index == 0u) { group_tile = tile_at(group_index(id, count)); }
    let tile = workgroupUniformLoad(&group_tile);
    if (tile.count == 0u) { return; }
    tile_rows(tile, index);
    let subgroup = index / TEAM;
    let row = subgroup / SUBGROUPS_N * 16u;
    let output = subgroup % SUBGROUPS_N * 64u;
    let stage_offset = subgroup * STAGE_WORDS;
    // Matrices along M that contain rows of the tile.
    let live_matrices = (tile.count + MATRIX_PITCH - 1u) / MATRIX_PITCH;
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
    tile_offsets(tile, index);
    tile_load(0u, index);
    let x_at = row * PITCH;
    let w_at = output * PITCH;
    for (var k = 0u; k < p.cols; k += TILE_K) {
        tile_store(tile, k, index);
        workgroupBarrier();
        if (k + TILE_K < p.cols) { tile_load(k + TILE_K, index); }
        for (var c = 0u; c < K_VECS; c += 4u) {
            let w0 = coopLoad<MatW>(&w_tile[w_at + c], PITCH);
            let w1 = coopLoad<MatW>(&w_tile[w_at + 16u * PITCH + c], PITCH);
            let w2 = coopLoad<MatW>(&w_tile[w_at + 32u * PITCH + c], PITCH);
            let w3 = coopLoad<MatW>(&w_tile[w_at + 48u * PITCH + c], PITCH);
            let x0 = coopLoadT<MatX>(&x_tile[x_at + c], PITCH);
            c00 = coopMultiplyAdd(x0, w0, c00);
            c01 = coopMultiplyAdd(x0, w1, c01);
            c02 = coopMultiplyAdd(x0, w2, c02);
            c03 = coopMultiplyAdd(x0, w3, c03);
            if ((MATRICES_M > 1u) & (live_matrices > 1u)) {
                let x1 = coopLoadT<MatX>(&x_tile[x_at + MATRIX_PITCH * PITCH + c], PITCH);
                c10 = coopMultiplyAdd(x1, w0, c10);
                c11 = coopMultiplyAdd(x1, w1, c11);
                c12 = coopMultiplyAdd(x1, w2, c12);
                c13 = coopMultiplyAdd(x1, w3, c13);
            }
            if ((MATRICES_M > 2u) & (live_matrices > 2u)) {
                let x2 = coopLoadT<MatX>(&x_tile[x_at + 2u * MATRIX_PITCH * PITCH + c], PITCH);
                c20 = coopMultiplyAdd(x2, w0, c20);
                c21 = coopMultiplyAdd(x2, w1, c21);
                c22 = coopMultiplyAdd(x2, w2, c22);
                c23 = coopMultiplyAdd(x2, w3, c23);
            }
            if ((MATRICES_M > 3u) & (live_matrices > 3u)) {
                let x3 = coopLoadT<MatX>(&x_tile[x_at + 3u * MATRIX_PITCH * PITCH + c], PITCH);
                c30 = coopMultiplyAdd(x3, w0, c30);
                c31 = coopMultiplyAdd(x3, w1, c31);
                c32 = coopMultiplyAdd(x3, w2, c32);
                c33 = coopMultiplyAdd(x3, w3, c33);
            }
        }
        workgroupBarrier();
    }
    coopStoreT(c00, &out_stage[stage_offset], STAGE_PITCH);
    coopStoreT(c01, &out_stage[stage_offset + 16u], STAGE_PITCH);
    workgroupBarrier();
    write_matrices(tile, index, row, output);
    workgroupBarrier();
    coopStoreT(c02, &out_stage[stage_offset], STAGE_PITCH);
    coopStoreT(c03, &out_stage[stage_offset + 16u], STAGE_PITCH);
    workgroupBarrier();
    write_matrices(tile, index, row, output + 32u);
    if ((MATRICES_M > 1u) & (live_matrices > 1u)) {
        workgroupBarrier();
        coopStoreT(c10, &out_stage[stage_offset], STAGE_PITCH);
        coopStoreT(c11, &out_stage[stage_offset + 16u], STAGE_PITCH);
        workgroupBarrier();
        write_matrices(tile, index, row + MATRIX_PITCH, output);
        workgroupBarrier();
        coopStoreT(c12, &out_stage[stage_offset], STAGE_PITCH);
        coopStoreT(c13, &out_stage[stage_offset + 16u], STAGE_PITCH);
        workgroupBarrier();
        write_matrices(tile, index, row + MATRIX_PITCH, output + 32u);
    }
    if ((MATRICES_M > 2u) & (live_matrices > 2u)) {
        workgroupBarrier();
        coopStoreT(c20, &out_stage[stage_offset], STAGE_PITCH);
        coopStoreT(c21, &out_stage[stage_offset + 16u], STAGE_PITCH);
        workgroupBarrier();
        write_matrices(tile, index, row + 2u * MATRIX_PITCH, output);
        workgroupBarrier();
        coopStoreT(c22, &out_stage[stage_offset], STAGE_PITCH);
        coopStoreT(c23, &out_stage[stage_offset + 16u], STAGE_PITCH);
        workgroupBarrier();
        write_matrices(tile, index, row + 2u * MATRIX_PITCH, output + 32u);
    }
    if ((MATRICES_M > 3u) & (live_matrices > 3u)) {
        workgroupBarrier();
        coopStoreT(c30, &out_stage[stage_offset], STAGE_PITCH);
        coopStoreT(c31, &out_stage[stage_offset + 16u], STAGE_PITCH);
        workgroupBarrier();
        write_matrices(tile, index, row + 3u * MATRIX_PITCH, output);
        workgroupBarrier();
        coopStoreT(c32, &out_stage[stage_offset], STAGE_PITCH);
        coopStoreT(c33, &out_stage[stage_offset + 16u], STAGE_PITCH);
        workgroupBarrier();
        write_matrices(tile, index, row + 3u * MATRIX_PITCH, output + 32u);
    }
}
