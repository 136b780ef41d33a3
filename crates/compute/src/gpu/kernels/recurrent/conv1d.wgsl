// Causal depthwise convolution, then SiLU: out[r][c] = silu(sum_j weight[c][j] input[r + j][c]),
// where the inputs are the TAPS - 1 rows of the state, then the rows of x. The last TAPS - 1
// inputs are the next state.
// Grid: a thread for each element of out, and for each of the next state.
// needs: common/common
// constants: TAPS, WG

struct Params { x: View, out: View, weight: u32, rows: u32, channels: u32 }
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;

fn input(i: u32, channel: u32) -> f32 {
    if (i < TAPS - 1u) { return committed[i * p.channels + channel]; }
    return act[p.x.offset + (i - (TAPS - 1u)) * p.x.row_stride + channel];
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    let row = i / p.channels;
    let channel = i % p.channels;
    if (row < p.rows) {
        var sum = 0.0;
        for (var j = 0u; j < TAPS; j++) {
            sum = fma(act[p.weight + channel * TAPS + j], input(row + j, channel), sum);
        }
        act[p.out.offset + row * p.out.row_stride + channel] = silu(sum);
    } else if (row < p.rows + TAPS - 1u) {
        next[(row - p.rows) * p.channels + channel] = input(row, channel);
    }
}
