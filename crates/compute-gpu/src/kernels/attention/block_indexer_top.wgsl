// Block indexer, selection: the positions of the TOP_BLOCKS blocks with the highest scores, in
// ascending order, then -1. On ties the later block wins. Rows that see at most TOP_BLOCKS blocks
// select all positions.
// A rank is the count of blocks that come before, so all ranks are found at once.
// WG: 256. KEY_BLOCK: positions of a block. Grid: a workgroup for each row and head.
// needs: common/common, attention/row_table
// constants: KEY_BLOCK, TOP_BLOCKS, WG

struct Params { scores: View, out: View, rows: u32, table: u32, heads: u32 }
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;

var<workgroup> chosen: array<u32, TOP_BLOCKS>;
var<workgroup> sorted: array<u32, TOP_BLOCKS>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let row = group / p.heads;
    if (row >= p.rows) { return; }
    let visible = row_position(p.table, row) + 1u;
    let blocks = (visible + KEY_BLOCK - 1u) / KEY_BLOCK;
    let out = p.out.offset + row * p.out.row_stride + group % p.heads * p.out.head_stride;
    if (blocks <= TOP_BLOCKS) {
        for (var i = index; i < TOP_BLOCKS * KEY_BLOCK; i += WG) {
            act[out + i] = select(-1.0, f32(i), i < visible);
        }
        return;
    }
    let scores = p.scores.offset + group * p.scores.row_stride;
    // NaN leaves ranks open.
    for (var i = index; i < TOP_BLOCKS; i += WG) { chosen[i] = blocks - 1u; }
    workgroupBarrier();
    for (var i = index; i < blocks; i += WG) {
        let score = act[scores + i];
        var rank = 0u;
        for (var j = 0u; j < blocks; j++) {
            let other = act[scores + j];
            rank += select(0u, 1u, other > score || (other == score && j > i));
        }
        if (rank < TOP_BLOCKS) { chosen[rank] = i; }
    }
    workgroupBarrier();
    for (var i = index; i < TOP_BLOCKS; i += WG) {
        var place = 0u;
        for (var j = 0u; j < TOP_BLOCKS; j++) {
            place += select(0u, 1u, chosen[j] < chosen[i] || (chosen[j] == chosen[i] && j < i));
        }
        sorted[place] = chosen[i];
    }
    workgroupBarrier();
    for (var i = index; i < TOP_BLOCKS * KEY_BLOCK; i += WG) {
        let t = sorted[i / KEY_BLOCK] * KEY_BLOCK + i % KEY_BLOCK;
        act[out + i] = select(-1.0, f32(t), t < visible);
    }
}
