// The experts of few rows. STAGE 0: inner[use][o] = activation(gate[o] . x[row], up[o] . x[row]). STAGE 2:
// out[part][o] = down[o] . inner[use]. Parts of threads and chunks are those of matvec.wgsl; in STAGE 0 two of a part's four
// rows are gate's and two are up's.
// BIAS_SCALAR: the type of the biases in the slot, one number for each stored row; 8 where what out has is
// added, 9 for none. STEP: rows from one stored row
// of a matrix to the next, 2 where gate and up are interleaved.
// Grid: uses x blocks of rows.

struct Part { weights: u32, scales: u32, biases: u32, bias: u32 } // bytes from the start of a slot; a word for weights
struct Params {
    x: u32, x_row: u32, out: u32, out_row: u32,
    uses: Uses, count: u32, walkers: u32, turns: u32, outputs: u32,
    one: Part, other: Part, other_first: u32, alpha: f32, limit: f32,
}
var<immediate> p: Params;
@group(0) @binding(3) var<storage, read> words: array<u32>;

const SLOT_UNIT = select(4u, 16u, VECTORS > 0u);
const OUTPUTS = select(2u, 4u, STAGE == 2u); // of a part at a time

fn bias_at(at: u32, i: u32) -> f32 {
    if (BIAS_SCALAR == 0u) { return bitcast<f32>(w[(at >> 2u) + i]); }
    let byte = at + i * 2u;
    let half = w[byte >> 2u] >> ((byte & 2u) * 8u);
    if (BIAS_SCALAR == 1u) { return unpack2x16float(half).x; }
    return bitcast<f32>(half << 16u);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let work = group_index(id, count);
    let i = work / p.walkers;
    if (i >= p.count) { return; }
    let found = use_of(p.uses, i);
    stage(p.x + select(found.row, i, STAGE == 2u) * p.x_row);
    if (!found.ours) { return; }
    let first = (work % p.walkers * p.turns * (WG / PART) + index / PART) * OUTPUTS;
    let out = p.out + select(i, found.part, STAGE == 2u) * p.out_row;
    for (var turn = 0u; turn < p.turns; turn++) {
        let o = first + turn * (WG / PART) * OUTPUTS;
        var stored = min(vec4<u32>(o) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(p.outputs - 1u));
        var weights = vec4<u32>(p.one.weights);
        var scales = vec4<u32>(p.one.scales);
        var biases = vec4<u32>(p.one.biases);
        if (STAGE == 0u) {
            stored = stored.xyxy * STEP + vec4<u32>(0u, 0u, p.other_first, p.other_first);
            weights = vec4<u32>(weights.xy, vec2<u32>(p.other.weights));
            scales = vec4<u32>(scales.xy, vec2<u32>(p.other.scales));
            biases = vec4<u32>(biases.xy, vec2<u32>(p.other.biases));
        }
        weights += found.slot / SLOT_UNIT + stored * ROW_WORDS;
        let of_row = stored / BLOCK_ROWS * ROW_SCALES + found.slot;
        let rows = Rows(weights, scales + of_row, biases + of_row);
        let chunk = index % PART;
        var sums = part_sum(products(load(rows, min(chunk, CHUNKS - 1u)), rows, chunk));
        if (index % PART == 0u) {
            if (BIAS_SCALAR < 3u) {
                let at = vec4<u32>(found.slot)
                    + select(vec4<u32>(p.one.bias), vec4<u32>(p.one.bias, p.one.bias, p.other.bias, p.other.bias), STAGE == 0u);
                sums += vec4<f32>(
                    bias_at(at.x, stored.x), bias_at(at.y, stored.y), bias_at(at.z, stored.z), bias_at(at.w, stored.w));
            }
            if (STAGE == 0u) {
                if (o < p.outputs) { a[out + o] = activate(sums.x, sums.z, p.alpha, p.limit); }
                if (o + 1u < p.outputs) { a[out + o + 1u] = activate(sums.y, sums.w, p.alpha, p.limit); }
            } else {
                for (var j = 0u; j < 4u; j++) {
                    if (o + j < p.outputs) {
                        var y = sums[j];
                        if (BIAS_SCALAR == 8u) { y += a[out + o + j]; }
                        a[out + o + j] = y;
                    }
                }
            }
        }
    }
}
