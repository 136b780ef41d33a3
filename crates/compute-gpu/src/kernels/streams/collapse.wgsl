// Weighted sum of the streams of a row: out = sum_h gate_function(weights[h]) x[h].
// STREAMS: number of streams. WEIGHTS: 0 none (the mean), 1 one per stream, 2 one per element.
// Grid: a thread for each element of out.
// needs: common/common, common/gate_function
// constants: STREAMS, WEIGHTS, WG

struct Params { x: View, weights: View, out: View, count: u32, width: u32 }
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    if (i >= p.count) { return; }
    let row = i / p.width;
    let col = i % p.width;
    let x = p.x.offset + row * p.x.row_stride + col;
    let weights = p.weights.offset + row * p.weights.row_stride + select(0u, col, WEIGHTS == 2u);
    var sum = 0.0;
    for (var h = 0u; h < STREAMS; h++) {
        var weight = 1.0 / f32(STREAMS);
        if (WEIGHTS > 0u) { weight = gate_function(act[weights + h * p.weights.head_stride]); }
        sum += weight * act[x + h * p.x.head_stride];
    }
    act[p.out.offset + row * p.out.row_stride + col] = sum;
}
