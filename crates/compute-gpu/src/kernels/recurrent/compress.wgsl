// Weighted means of blocks of RATIO positions: out[i][c] = sum_p w[p][c] x[p][c], where w[.][c] is
// the softmax of the logits over the positions p of block i. OVERLAP 1: part a of the positions of
// the block before, if any, and part b of those of the block. GATED 0: all logits are 0.
// APE 1: a vector of p.ape is added to the gate, by position % RATIO.
// A state is SLOTS rows: position p in row p % SLOTS, as its row of x, then its row of the gate.
// Positions before the first row of a sequence are in its committed state. The committed states
// are in one arena, and so are the next ones. The table of the sequences is in `words`, from offset
// `table` on, SEGMENT_WORDS words each.
// Sums are in the order of positions, so that the bits of an entry do not depend on the steps.
// Grid: a thread for each element of out, and for each of the next state, in workgroups of one
// sequence.
// needs: common/common, common/exp_log, common/segments
// constants: APE, GATED, OVERLAP, RATIO, WG

struct Params { x: View, gate: View, out: View, ape: u32, width: u32, table: u32, sequences: u32 }
var<immediate> p: Params;
// Both may be the same arena, so both are bound for writing.
@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;
@group(0) @binding(3) var<storage, read> words: array<u32>;

const PARTS = 1u + OVERLAP;
const SLOTS = RATIO * PARTS;

// `first_group`: its first workgroup. `committed`, `next`: starts of its states in the arenas.
// `position`: of the first row; a large one is reduced modulo SLOTS.
struct Sequence {
    first_group: u32, committed: u32, next: u32, first_row: u32, rows: u32, position: u32, first_entry: u32, entries: u32,
}

const SEGMENT_WORDS = 8u;

fn sequence_of(group: u32) -> Sequence {
    let entry = segment_entry(p.table, p.sequences, group);
    return Sequence(
        words[entry], words[entry + 1u], words[entry + 2u], words[entry + 3u],
        words[entry + 4u], words[entry + 5u], words[entry + 6u], words[entry + 7u],
    );
}

fn row_len() -> u32 { return p.width * PARTS * (1u + GATED); }

fn value(sequence: Sequence, position: u32, column: u32) -> f32 {
    if (position < sequence.position) {
        return committed[sequence.committed + position % SLOTS * row_len() + column];
    }
    return act[p.x.offset + (sequence.first_row + position - sequence.position) * p.x.row_stride + column];
}

fn gate(sequence: Sequence, position: u32, column: u32) -> f32 {
    if (position < sequence.position) {
        return committed[sequence.committed + position % SLOTS * row_len() + p.width * PARTS + column];
    }
    return act[p.gate.offset + (sequence.first_row + position - sequence.position) * p.gate.row_stride + column];
}

fn logit(sequence: Sequence, position: u32, column: u32) -> f32 {
    if (GATED == 0u) { return 0.0; }
    let x = gate(sequence, position, column);
    if (APE == 0u) { return x; }
    return x + act[p.ape + position % RATIO * p.width * PARTS + column];
}

// Column of the part of a position that belongs to an entry.
fn part_column(position: u32, block: u32, column: u32) -> u32 {
    return select(column, p.width + column, OVERLAP == 1u && position / RATIO == block);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let sequence = sequence_of(group);
    var i = (group - sequence.first_group) * WG + index;
    let elements = sequence.entries * p.width;
    if (i < elements) {
        let column = i % p.width;
        let block = sequence.position / RATIO + i / p.width;
        let end = (block + 1u) * RATIO;
        let start = end - min(end, SLOTS);
        var largest = -3.0e38;
        for (var position = start; position < end; position++) {
            largest = max(largest, logit(sequence, position, part_column(position, block, column)));
        }
        var sum = 0.0;
        var total = 0.0;
        for (var position = start; position < end; position++) {
            let c = part_column(position, block, column);
            let weight = exp_of(logit(sequence, position, c) - largest);
            sum = fma(weight, value(sequence, position, c), sum);
            total += weight;
        }
        act[p.out.offset + (sequence.first_entry + i / p.width) * p.out.row_stride + column] = sum / total;
        return;
    }
    i -= elements;
    let slot = i / row_len();
    if (slot >= SLOTS) { return; }
    var column = i % row_len();
    // Positions from the one in this slot to the last one.
    let age = (sequence.position + sequence.rows + SLOTS - 1u - slot) % SLOTS;
    var x = committed[sequence.committed + i];
    if (age < sequence.rows) {
        let position = sequence.position + sequence.rows - 1u - age;
        if (column < p.width * PARTS) {
            x = value(sequence, position, column);
        } else {
            x = gate(sequence, position, column - p.width * PARTS);
        }
    }
    next[sequence.next + i] = x;
}
