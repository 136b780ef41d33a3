// out[r] = table[tokens[r]], for the rows of the table that lie in this arena. COLS inputs.
// Grid: a thread for each number of out.
// needs: common/common, codec/any_format
// constants: COLS, WG

struct Params { out: View, m: Matrix, tokens: u32, count: u32, first: u32, rows: u32, nothing: u32 }
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read> words: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    nothing = p.nothing;
    let i = group_index(id, count) * WG + index;
    let r = i / COLS;
    if (r >= p.count) { return; }
    let row = words[p.tokens + r] - p.first;
    if (row >= p.rows) { return; }
    a[p.out.at + r * p.out.row + i % COLS] = weight_at(p.m, row, i % COLS);
}
