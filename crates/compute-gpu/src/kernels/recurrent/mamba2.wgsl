// State-space recurrence of Mamba-2 of sequences, row by row, for each head: S = decay S + step x
// b^T; out = S c + d x, with step = clamp(softplus(dt + dt_bias)), decay = exp(-exp(a_log) step).
// ROW_THREADS neighbouring threads share two rows of S, which give two elements of out, and keep
// them in registers over all rows of the span. The rows of b and c are staged in workgroup memory,
// STAGED_ROWS at a time. Element i of a row of S, b or c belongs to thread i % ROW_THREADS:
// component i / ROW_THREADS % 4 of its vector i / ROW_THREADS / 4. K_WIDTH: width of such a row;
// V_WIDTH: width of a head. GROUP_HEADS: neighbouring heads that share b and c.
// Grid: a workgroup of WG threads for each 2 WG / ROW_THREADS elements of a head of a sequence.
// needs: common/common, common/exp_log, @pair_sum, @states
// constants: GROUP_HEADS, HEADS, K_WIDTH, ROW_THREADS, STAGED_ROWS, V_WIDTH, WG

struct Params {
    x: View, b: View, c: View, dt: View, out: View,
    a_log: u32, d: u32, dt_bias: u32, rows: u32, table: u32, min_step: f32, max_step: f32,
}
var<immediate> p: Params;

// Vectors of a row of S per thread.
const K_VECS = (K_WIDTH + 4u * ROW_THREADS - 1u) / (4u * ROW_THREADS);
// Vectors and elements of a row of b and c in workgroup memory.
const ROW_VECS = K_VECS * ROW_THREADS;
const ROW_VALUES = 4u * ROW_VECS;
// Elements of out of a workgroup.
const GROUP_VALUES = 2u * WG / ROW_THREADS;
const HEAD_GROUPS = (V_WIDTH + GROUP_VALUES - 1u) / GROUP_VALUES;

var<workgroup> b_rows: array<vec4<f32>, STAGED_ROWS * ROW_VECS>;
var<workgroup> c_rows: array<vec4<f32>, STAGED_ROWS * ROW_VECS>;
var<workgroup> x_rows: array<f32, STAGED_ROWS * GROUP_VALUES>;
// Decay and step.
var<workgroup> row_steps: array<vec2<f32>, STAGED_ROWS>;

// Stages `count` rows, from row `first` of the activations on.
fn stage_rows(first: u32, count: u32, head: u32, value: u32, rate: f32, index: u32) {
    let group = head / GROUP_HEADS;
    for (var i = index; i < count * ROW_VALUES; i += WG) {
        let staged = i / ROW_VALUES;
        let at = i % ROW_VALUES;
        var pair = vec2<f32>(0.0);
        if (at < K_WIDTH) {
            let row = first + staged;
            pair.x = act[p.b.offset + row * p.b.row_stride + group * p.b.head_stride + at];
            pair.y = act[p.c.offset + row * p.c.row_stride + group * p.c.head_stride + at];
        }
        let vec = staged * ROW_VECS + at / (4u * ROW_THREADS) * ROW_THREADS + at % ROW_THREADS;
        b_rows[vec][at / ROW_THREADS % 4u] = pair.x;
        c_rows[vec][at / ROW_THREADS % 4u] = pair.y;
    }
    for (var i = index; i < count * GROUP_VALUES; i += WG) {
        let at = value + i % GROUP_VALUES;
        var x = 0.0;
        if (at < V_WIDTH) { x = act[p.x.offset + (first + i / GROUP_VALUES) * p.x.row_stride + head * p.x.head_stride + at]; }
        x_rows[i] = x;
    }
    if (index < count) {
        let raw = act[p.dt.offset + (first + index) * p.dt.row_stride + head] + act[p.dt_bias + head];
        let softplus = max(raw, 0.0) + log1p_of(exp_of(-abs(raw)));
        let step = clamp(softplus, p.min_step, p.max_step);
        row_steps[index] = vec2<f32>(exp_of(-rate * step), step);
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    pair_sum_begin(index);
    let group = group_index(id, count);
    let head = group / HEAD_GROUPS % HEADS;
    let sequence = group / HEAD_GROUPS / HEADS;
    if (sequence >= sequence_count()) { return; }
    let first_row = first_row_of(sequence);
    let rows = rows_of(sequence);
    let value = group % HEAD_GROUPS * GROUP_VALUES;
    let row_thread = index % ROW_THREADS;
    // First of the two values of the thread, and the offset of its row of the state.
    let first_value = index / ROW_THREADS * 2u;
    let state_offset = (head * V_WIDTH + value + first_value) * K_WIDTH;
    let rate = exp_of(act[p.a_log + head]);
    let skip = act[p.d + head];
    var state: array<array<vec4<f32>, K_VECS>, 2>;
    for (var r = 0u; r < 2u; r++) {
        for (var i = 0u; i < K_VECS; i++) {
            for (var c = 0u; c < 4u; c++) {
                let at = (4u * i + c) * ROW_THREADS + row_thread;
                state[r][i][c] = 0.0;
                if (at < K_WIDTH && value + first_value + r < V_WIDTH) { state[r][i][c] = load_state(sequence, state_offset + r * K_WIDTH + at); }
            }
        }
    }
    for (var first = 0u; first < rows; first += STAGED_ROWS) {
        let staged = min(STAGED_ROWS, rows - first);
        workgroupBarrier();
        stage_rows(first_row + first, staged, head, value, rate, index);
        workgroupBarrier();
        for (var row = 0u; row < staged; row++) {
            let decay_step = row_steps[row];
            let at = row * GROUP_VALUES + first_value;
            let x = vec2<f32>(x_rows[at], x_rows[at + 1u]);
            let add = x * decay_step.y;
            var sums = vec2<f32>(0.0);
            for (var i = 0u; i < K_VECS; i++) {
                let vec = row * ROW_VECS + i * ROW_THREADS + row_thread;
                let b = b_rows[vec];
                let c = c_rows[vec];
                state[0][i] = fma(vec4<f32>(add.x), b, state[0][i] * decay_step.x);
                state[1][i] = fma(vec4<f32>(add.y), b, state[1][i] * decay_step.x);
                sums += vec2<f32>(dot(state[0][i], c), dot(state[1][i], c));
            }
            let y = pair_sum(sums) + skip * x;
            if (row_thread == 0u) {
                let out = p.out.offset + (first_row + first + row) * p.out.row_stride + head * p.out.head_stride + value + first_value;
                if (value + first_value < V_WIDTH) { act[out] = y.x; }
                if (value + first_value + 1u < V_WIDTH) { act[out + 1u] = y.y; }
            }
        }
    }
    for (var r = 0u; r < 2u; r++) {
        for (var i = 0u; i < K_VECS; i++) {
            for (var c = 0u; c < 4u; c++) {
                let at = (4u * i + c) * ROW_THREADS + row_thread;
                if (at < K_WIDTH && value + first_value + r < V_WIDTH) { store_state(sequence, state_offset + r * K_WIDTH + at, state[r][i][c]); }
            }
        }
    }
}
