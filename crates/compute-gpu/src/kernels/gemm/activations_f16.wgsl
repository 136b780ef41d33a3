// Converts rows of x to f16 for the GEMM kernels, two in a word. Each row is scaled by a power of
// two that takes its maximum to 2^14 .. 2^15: nothing overflows, and values are lost only below
// 2^-29 of the maximum. factors[row] undoes the scale. It is NaN if a value of the row is not
// finite. Rows are padded with zeros to `words` words.
// NORM 1: of RMSNorm(x), which also goes to `normed`, in dense rows.
// Grid: a workgroup of WG threads for each row.
// needs: common/common, @team
// constants: NORM, WG

struct Params {
    x: View, rows: u32, width: u32, factors: u32, x_f16: u32, words: u32,
    normed: u32, norm_weight: u32, eps: f32,
}
var<immediate> p: Params;

@group(0) @binding(1) var<storage, read_write> scratch: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let row = group_index(id, count);
    if (row >= p.rows) { return; }
    var x = p.x.offset + row * p.x.row_stride;
    if (NORM == 1u) {
        var squares = 0.0;
        for (var i = index; i < p.width; i += WG) { squares += act[x + i] * act[x + i]; }
        let scale = 1.0 / sqrt(group_sum(squares) / f32(p.width) + p.eps);
        let normed = p.normed + row * p.width;
        for (var i = index; i < p.width; i += WG) { act[normed + i] = act[x + i] * scale * act[p.norm_weight + i]; }
        storageBarrier();
        x = normed;
    }
    var max_abs = 0.0;
    var not_finite = 0.0;
    for (var i = index; i < p.width; i += WG) {
        let magnitude = bitcast<u32>(act[x + i]) & 0x7fffffffu;
        if (magnitude < 0x7f800000u) { max_abs = max(max_abs, bitcast<f32>(magnitude)); } else { not_finite = 1.0; }
    }
    max_abs = group_max(max_abs);
    not_finite = group_max(not_finite);
    // Exponents of the maximum, of the scale and of its inverse; none is zero or infinity.
    let exponent = min(268u - (bitcast<u32>(max_abs) >> 23u), 253u);
    let finite = not_finite < 0.5;
    let factor = select(0.0, bitcast<f32>(exponent << 23u), finite);
    if (index == 0u) { scratch[p.factors + row] = select(0x7fc00000u, (254u - exponent) << 23u, finite); }
    let dst = p.x_f16 + row * p.words;
    for (var i = index; i < p.words; i += WG) {
        var pair = vec2<f32>(0.0);
        if (finite && i * 2u < p.width) { pair.x = act[x + i * 2u] * factor; }
        if (finite && i * 2u + 1u < p.width) { pair.y = act[x + i * 2u + 1u] * factor; }
        scratch[dst + i] = pack2x16float(pair);
    }
}
