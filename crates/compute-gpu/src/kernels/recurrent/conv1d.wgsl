// Causal depthwise convolution of sequences, then SiLU if SILU is 1: out[r][c] = silu(sum_j
// weight[c][j] input[r + j DILATION][c] + bias[c]), where the inputs are the (TAPS - 1) DILATION
// rows of the state, then the rows of x. BIASED: 1 with a bias. The last rows of the inputs are the
// next state. The committed states are in one arena, and so are the next ones. The table of the
// sequences is in `words`, from offset `table` on, SEGMENT_WORDS words each.
// Grid: a thread for each element of out, and for each of the next state, in workgroups of one
// sequence.
// needs: common/common, common/segments
// constants: BIASED, DILATION, SILU, TAPS, WG

struct Params {
    x: View, out: View, weight: u32, bias: u32, channels: u32, table: u32, sequences: u32,
}
var<immediate> p: Params;
// Both may be the same arena, so both are bound for writing.
@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;
@group(0) @binding(3) var<storage, read> words: array<u32>;

// `first_group`: its first workgroup. `committed`, `next`: starts of its states in the arenas.
struct Sequence { first_group: u32, committed: u32, next: u32, first_row: u32, rows: u32 }

const SEGMENT_WORDS = 5u;
const HISTORY = (TAPS - 1u) * DILATION;

fn sequence_of(group: u32) -> Sequence {
    let entry = segment_entry(p.table, p.sequences, group);
    return Sequence(words[entry], words[entry + 1u], words[entry + 2u], words[entry + 3u], words[entry + 4u]);
}

fn input(sequence: Sequence, i: u32, channel: u32) -> f32 {
    if (i < HISTORY) { return committed[sequence.committed + i * p.channels + channel]; }
    return act[p.x.offset + (sequence.first_row + i - HISTORY) * p.x.row_stride + channel];
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let sequence = sequence_of(group);
    let i = (group - sequence.first_group) * WG + index;
    let row = i / p.channels;
    let channel = i % p.channels;
    if (row < sequence.rows) {
        var sum = 0.0;
        for (var j = 0u; j < TAPS; j++) {
            sum = fma(act[p.weight + channel * TAPS + j], input(sequence, row + j * DILATION, channel), sum);
        }
        if (BIASED == 1u) { sum += act[p.bias + channel]; }
        act[p.out.offset + (sequence.first_row + row) * p.out.row_stride + channel] = select(sum, silu(sum), SILU == 1u);
    } else if (row < sequence.rows + HISTORY) {
        next[sequence.next + (row - sequence.rows) * p.channels + channel] = input(sequence, row, channel);
    }
}
