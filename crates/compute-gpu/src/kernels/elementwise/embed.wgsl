// Embedding lookup: out[r] = table[id[r]] in each of HEADS heads, for the rows of the table in this
// arena. COLS: width. CHOSEN: ids are activations, in f32.
// Grid: a thread for each element of out.
// needs: common/common, codec/any_format
// constants: CHOSEN, COLS, HEADS, WG

struct Params {
    out: View, m: Matrix,
    first_id: u32, id_stride: u32, count: u32, last_id: u32, first_row: u32, rows: u32, zero: u32,
}
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read> words: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    zero = p.zero;
    let i = group_index(id, count) * WG + index;
    let r = i / COLS / HEADS;
    let head = i / COLS % HEADS;
    if (r >= p.count) { return; }
    let at = p.first_id + r * p.id_stride;
    var token = 0u;
    if (CHOSEN == 1u) { token = min(u32(max(act[at], 0.0)), p.last_id); } else { token = words[at]; }
    let row = token - p.first_row;
    if (row >= p.rows) { return; }
    act[p.out.offset + r * p.out.row_stride + head * p.out.head_stride + i % COLS] = weight_at(p.m, row, i % COLS);
}
