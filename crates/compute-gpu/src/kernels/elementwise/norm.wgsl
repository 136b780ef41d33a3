// RMSNorm, gated RMSNorm and LayerNorm: out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight
// + bias, or * silu(other), or * sigmoid(other). RMSNorm has mean 0 and no bias. With ADD, x +=
// other comes first (residual add), and x keeps the sum.
// KIND: 0 RMSNorm, 1 RMSNorm gated by a SiLU, 2 LayerNorm, 3 RMSNorm gated by a sigmoid, 4 RMSNorm
// of x silu(other).
// WEIGHTED, BIASED: 1 with a weight, a bias. HEAD_WEIGHTS: 1 if each head has its weights.
// THREAD_VALUES: most elements per thread, width / WG rounded up.
// Grid: a workgroup of WG threads for each vector.
// needs: common/common, @team
// constants: ADD, BIASED, HEAD_WEIGHTS, KIND, THREAD_VALUES, WEIGHTED, WG

struct Params {
    x: View, out: View, other: View,
    weight: u32, bias: u32, vectors: u32, heads: u32, width: u32, eps: f32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let vector = group_index(id, count);
    if (vector >= p.vectors) { return; }
    let row = vector / p.heads;
    let head = vector % p.heads;
    let x = p.x.offset + row * p.x.row_stride + head * p.x.head_stride;
    let other = p.other.offset + row * p.other.row_stride + head * p.other.head_stride;
    let out = p.out.offset + row * p.out.row_stride + head * p.out.head_stride;
    let weight = p.weight + HEAD_WEIGHTS * head * p.width;
    var values: array<f32, THREAD_VALUES>;
    var sum = 0.0;
    for (var j = 0u; j < THREAD_VALUES; j++) {
        let i = index + j * WG;
        if (i >= p.width) { break; }
        var value = act[x + i];
        if (ADD == 1u) {
            value += act[other + i];
            act[x + i] = value;
        }
        if (KIND == 4u) { value *= silu(act[other + i]); }
        values[j] = value;
        sum += value;
    }
    var mean = 0.0;
    if (KIND == 2u) { mean = group_sum(sum) / f32(p.width); }
    var squares = 0.0;
    for (var j = 0u; j < THREAD_VALUES; j++) {
        if (index + j * WG >= p.width) { break; }
        let value = values[j] - mean;
        squares += value * value;
    }
    let scale = 1.0 / sqrt(group_sum(squares) / f32(p.width) + p.eps);
    for (var j = 0u; j < THREAD_VALUES; j++) {
        let i = index + j * WG;
        if (i >= p.width) { break; }
        var y = (values[j] - mean) * scale;
        if (WEIGHTED == 1u) { y *= act[weight + i]; }
        if (KIND == 1u) { y *= silu(act[other + i]); }
        if (KIND == 3u) { y *= sigmoid(act[other + i]); }
        if (BIASED == 1u) { y += act[p.bias + i]; }
        act[out + i] = y;
    }
}
