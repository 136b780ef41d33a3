// Addition of a sub-block's output to the streams of a row: x[j] = gate_function(gate[j]) y + sum_i
// mixing[i][j] x[i]; without MIXED, gate_function(gate[j]) y + x[j]. STREAMS: number of streams.
// Grid: a thread for each element of y.
// needs: common/common, common/gate_function
// constants: MIXED, STREAMS, WG

struct Params { x: View, y: View, gate: View, mixing: View, count: u32, width: u32 }
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
    let gate = p.gate.offset + row * p.gate.row_stride;
    let mixing = p.mixing.offset + row * p.mixing.row_stride;
    let y = act[p.y.offset + row * p.y.row_stride + col];
    var streams: array<f32, STREAMS>;
    for (var s = 0u; s < STREAMS; s++) { streams[s] = act[x + s * p.x.head_stride]; }
    for (var j = 0u; j < STREAMS; j++) {
        var sum = 0.0;
        if (MIXED == 1u) {
            for (var s = 0u; s < STREAMS; s++) {
                sum += act[mixing + s * p.mixing.head_stride + j] * streams[s];
            }
        } else {
            sum = streams[j];
        }
        act[x + j * p.x.head_stride] = sum + gate_function(act[gate + j]) * y;
    }
}
