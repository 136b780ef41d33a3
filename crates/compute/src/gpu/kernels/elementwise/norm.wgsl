// RMSNorm, its gated form and LayerNorm:
//   out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, or * silu(other)
// where the mean is zero and there is no bias for RMSNorm. With ADD, x += other comes first, and x keeps the sum: the
// residual stream and what a layer yields.
// KIND: 0 RMSNorm, 1 gated, 2 LayerNorm. WEIGHTED: 1 where there is a weight. ADD: 0 or 1.
// EACH: numbers of a vector that a thread keeps, at most: width / WG, rounded up.
// Grid: a workgroup of WG threads for each vector.
// needs: common/common, @team
// constants: ADD, EACH, KIND, WEIGHTED, WG

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
    let x = p.x.at + row * p.x.row + head * p.x.head;
    let other = p.other.at + row * p.other.row + head * p.other.head;
    let out = p.out.at + row * p.out.row + head * p.out.head;
    var kept: array<f32, EACH>;
    var sum = 0.0;
    for (var j = 0u; j < EACH; j++) {
        let i = index + j * WG;
        if (i >= p.width) { break; }
        var v = a[x + i];
        if (ADD == 1u) {
            v += a[other + i];
            a[x + i] = v;
        }
        kept[j] = v;
        sum += v;
    }
    var mean = 0.0;
    if (KIND == 2u) { mean = group_sum(sum) / f32(p.width); }
    var squares = 0.0;
    for (var j = 0u; j < EACH; j++) {
        if (index + j * WG >= p.width) { break; }
        let v = kept[j] - mean;
        squares += v * v;
    }
    let scale = 1.0 / sqrt(group_sum(squares) / f32(p.width) + p.eps);
    for (var j = 0u; j < EACH; j++) {
        let i = index + j * WG;
        if (i >= p.width) { break; }
        var y = (kept[j] - mean) * scale;
        if (WEIGHTED == 1u) { y *= a[p.weight + i]; }
        if (KIND == 1u) { y *= silu(a[other + i]); }
        if (KIND == 2u) { y += a[p.bias + i]; }
        a[out + i] = y;
    }
}
