// Rows of x as f16 for the matrices that tile.wgsl multiplies, two in a word, each row times a power of two that takes its
// largest number to 2^14 .. 2^15: nothing overflows, and what is lost below is 2^-29 of the largest. factors[row] undoes
// it; of a row with a number that is not finite it is NaN. Rows end with zeros up to `words` words.
// Grid: a workgroup of WG threads for each row.
// needs: common/common, @team
// constants: WG

struct Params { x: View, rows: u32, width: u32, factors: u32, halves: u32, words: u32 }
var<immediate> p: Params;

@group(0) @binding(1) var<storage, read_write> s: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let row = group_index(id, count);
    if (row >= p.rows) { return; }
    let x = p.x.at + row * p.x.row;
    var most = 0.0;
    var wrong = 0.0;
    for (var i = index; i < p.width; i += WG) {
        let size = bitcast<u32>(a[x + i]) & 0x7fffffffu;
        if (size < 0x7f800000u) { most = max(most, bitcast<f32>(size)); } else { wrong = 1.0; }
    }
    most = group_max(most);
    wrong = group_max(wrong);
    // Exponents: of the largest number, of what it is multiplied by, and of what undoes that; none is zero or infinity.
    let up = min(268u - (bitcast<u32>(most) >> 23u), 253u);
    let finite = wrong < 0.5;
    let factor = select(0.0, bitcast<f32>(up << 23u), finite);
    if (index == 0u) { s[p.factors + row] = select(0x7fc00000u, (254u - up) << 23u, finite); }
    let to = p.halves + row * p.words;
    for (var i = index; i < p.words; i += WG) {
        var pair = vec2<f32>(0.0);
        if (finite && i * 2u < p.width) { pair.x = a[x + i * 2u] * factor; }
        if (finite && i * 2u + 1u < p.width) { pair.y = a[x + i * 2u + 1u] * factor; }
        s[to + i] = pack2x16float(pair);
    }
}
