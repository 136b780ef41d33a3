// GEMM (see gemm_tile.wgsl) of few rows with the matrices of a table, on cooperative matrices. The
// subgroups of a workgroup share its outputs and divide the inputs of each step, so a workgroup of
// few outputs keeps them all busy; their sums are added at the end. A sum has the same order for
// any number of rows.
// RESIDUAL 1: out is also added to the residual. Grid: tiles x blocks of TILE_N outputs.
// Rows of x are padded to whole steps.
// TEAM: 32. WG: 256. TILE_M: 16 or 32. TILE_N: 32. TILE_K: a multiple of 16 for each subgroup.
// needs: gemm/cooperative_types, gemm/gemm_tile
// enables: f16, wgpu_cooperative_matrix
// constants: RESIDUAL, TEAM, TILE_K, TILE_M, WG

const SUBGROUPS = WG / TEAM;
// Vectors of a step that a subgroup multiplies.
const SUBGROUP_VECS = TILE_K / 4u / SUBGROUPS;
// Pitch of sums on their way to out, and their words for each subgroup.
const STAGE_PITCH = 20u;
const STAGE_WORDS = 16u * STAGE_PITCH;

var<workgroup> group_tile: Tile;
var<workgroup> out_stage: array<f32, STAGE_WORDS * SUBGROUPS>;

// Adds the sums of all subgroups, and writes rows from `row` on of 16 outputs from `output` on.
fn write_sums(tile: Tile, index: u32, row: u32, output: u32) {
    let r = row + index / 16u;
    let o = tile.output + output + index % 16u;
    if (r >= tile.count || o >= outputs_at(tile.slot)) { return; }
    var sum = 0.0;
    for (var i = 0u; i < SUBGROUPS; i++) { sum += out_stage[i * STAGE_WORDS + index / 16u * STAGE_PITCH + index % 16u]; }
    let y = sum * bitcast<f32>(row_factor[r]) + bias_of(o, tile.slot);
    act[row_out_offset[r] + o] = y;
    if (RESIDUAL == 1u) { act[words[tile.slot + 7u] + (tile.first + r) * words[tile.slot + 8u] + o] += y; }
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
    var c00 = MatC();
    var c01 = MatC();
    var c10 = MatC();
    var c11 = MatC();
    workgroupBarrier();
    tile_offsets(tile, index);
    tile_load(0u, index);
    let first_vec = subgroup * SUBGROUP_VECS;
    for (var k = 0u; k < p.cols; k += TILE_K) {
        tile_store(tile, k, index);
        workgroupBarrier();
        if (k + TILE_K < p.cols) { tile_load(k + TILE_K, index); }
        for (var c = 0u; c < SUBGROUP_VECS; c += 4u) {
            let w0 = coopLoad<MatW>(&w_tile[first_vec + c], PITCH);
            let w1 = coopLoad<MatW>(&w_tile[16u * PITCH + first_vec + c], PITCH);
            let x0 = coopLoadT<MatX>(&x_tile[first_vec + c], PITCH);
            c00 = coopMultiplyAdd(x0, w0, c00);
            c01 = coopMultiplyAdd(x0, w1, c01);
            if (TILE_M > 16u) {
                let x1 = coopLoadT<MatX>(&x_tile[16u * PITCH + first_vec + c], PITCH);
                c10 = coopMultiplyAdd(x1, w0, c10);
                c11 = coopMultiplyAdd(x1, w1, c11);
            }
        }
        workgroupBarrier();
    }
    let stage_offset = subgroup * STAGE_WORDS;
    coopStoreT(c00, &out_stage[stage_offset], STAGE_PITCH);
    workgroupBarrier();
    write_sums(tile, index, 0u, 0u);
    workgroupBarrier();
    coopStoreT(c01, &out_stage[stage_offset], STAGE_PITCH);
    workgroupBarrier();
    write_sums(tile, index, 0u, 16u);
    if (TILE_M > 16u) {
        workgroupBarrier();
        coopStoreT(c10, &out_stage[stage_offset], STAGE_PITCH);
        workgroupBarrier();
        write_sums(tile, index, 16u, 0u);
        workgroupBarrier();
        coopStoreT(c11, &out_stage[stage_offset], STAGE_PITCH);
        workgroupBarrier();
        write_sums(tile, index, 16u, 16u);
    }
}
