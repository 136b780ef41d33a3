// Gated delta rule (DeltaNet) of sequences, row by row, for each value head, with q and k
// normalized to length one (and q divided by sqrt(K_WIDTH)): S = S diag(decay); d = beta (v - S k);
// S = S + d k^T; out = S q.
// ROW_THREADS neighbouring threads share a row of S, which gives one element of out. They keep
// THREAD_ROWS rows of S (at most ROW_THREADS) in registers over all rows of the span. Both
// products use the old S, so sums depend on each other only from row to row: d = beta (v - decay
// (S k)); out = decay (S q) + d (k . q). With a decay for each element of a key, the decays are
// factors of k and q in these products.
// The rows of the span are staged in workgroup memory, STAGED_ROWS at a time; the next ones load
// into registers meanwhile. ROW_THREADS threads load q and k of one row and normalize them.
// Element i of a vector belongs to thread i % ROW_THREADS: component i / ROW_THREADS % 4 of its
// vector i / ROW_THREADS / 4. K_WIDTH, V_WIDTH: widths of a key and of a value.
// TAPS: if not 0, each sequence has one row, and q, k and v are the newest inputs of a convolution,
// which delta_conv.wgsl computes first. All threads then compute the lengths, from the convolved
// vectors.
// KEY_DECAYS: 1 if each element of a key has a decay, 0 if a head has one. BOUNDED: 1 if its
// logarithm is bound * sigmoid(exp(a_log) x), 0 if it is -exp(a_log) softplus(x).
// GATED: if not 0, out is the weighted RMSNorm of each head, gated by a SiLU (1) or a sigmoid (2),
// without the division by the root mean square. Each workgroup writes its sum of squares to
// `squares`, those of a head one after another, heads V_WIDTH apart. TAPS is not 0 then.
// HEADS: value heads; KEY_HEADS: key heads; KEY_RUN: neighbouring value heads that share one.
// Grid: a workgroup of WG threads for each THREAD_ROWS WG / ROW_THREADS values of a head of a
// sequence.
// needs: common/common, common/exp_log, @pair_sum, @convolution, @states
// constants: BOUNDED, GATED, HEADS, KEY_DECAYS, KEY_HEADS, KEY_RUN, K_WIDTH, ROW_THREADS
// constants: STAGED_ROWS, TAPS, THREAD_ROWS, V_WIDTH, WG

struct Params {
    q: View, k: View, v: View, alpha: View, beta: View, out: View,
    a_log: u32, dt_bias: u32, rows: u32, bound: f32, table: u32, q_scale: f32,
    conv_x: u32, conv_weight: u32, channels: u32, // Start of the convolution's inputs and weights.
    // Gates and weights of the norm, and sums of squares.
    gate: u32, gate_row_stride: u32, norm_weight: u32, squares: u32, squares_row_stride: u32,
}
var<immediate> p: Params;

// Vectors of a key per thread.
const K_VECS = (K_WIDTH + 4u * ROW_THREADS - 1u) / (4u * ROW_THREADS);
// Values of a workgroup.
const GROUP_VALUES = THREAD_ROWS * WG / ROW_THREADS;
const HEAD_GROUPS = (V_WIDTH + GROUP_VALUES - 1u) / GROUP_VALUES;
// Vectors of decays in workgroup memory.
const DECAY_VECS = 1u + KEY_DECAYS * (STAGED_ROWS * K_VECS * ROW_THREADS - 1u);
// Values that a thread loads.
const V_LOADS = (STAGED_ROWS * GROUP_VALUES + WG - 1u) / WG;

var<workgroup> q_rows: array<vec4<f32>, STAGED_ROWS * K_VECS * ROW_THREADS>;
var<workgroup> k_rows: array<vec4<f32>, STAGED_ROWS * K_VECS * ROW_THREADS>;
var<workgroup> decay_rows: array<vec4<f32>, DECAY_VECS>;
var<workgroup> v_rows: array<f32, STAGED_ROWS * GROUP_VALUES>;
// Decay, beta and k . q.
var<workgroup> row_steps: array<vec4<f32>, STAGED_ROWS>;
var<workgroup> squares: array<f32, WG / ROW_THREADS>;

// Loaded elements of the next rows.
var<private> q: array<vec4<f32>, K_VECS>;
var<private> k: array<vec4<f32>, K_VECS>;
var<private> decay_inputs: array<vec4<f32>, K_VECS>;
var<private> v: array<f32, V_LOADS>;
var<private> step: vec2<f32>;

// Component `c` of vector `i` of a thread, in a vector at `start`.
fn component(start: u32, i: u32, c: u32, row_thread: u32) -> f32 {
    let at = (4u * i + c) * ROW_THREADS + row_thread;
    if (at < K_WIDTH) { return act[start + at]; }
    return 0.0;
}

fn load_vec(start: u32, i: u32, row_thread: u32) -> vec4<f32> {
    return vec4<f32>(
        component(start, i, 0u, row_thread),
        component(start, i, 1u, row_thread),
        component(start, i, 2u, row_thread),
        component(start, i, 3u, row_thread),
    );
}

// Input of the decay of element `at` of a head's key.
fn decay_input(row: u32, head: u32, at: u32) -> f32 {
    if (at >= K_WIDTH) { return 0.0; }
    return act[p.alpha.offset + row * p.alpha.row_stride + head * p.alpha.head_stride + at] + act[p.dt_bias + head * K_WIDTH + at];
}

// First row of the sequence, and its number of rows.
var<private> first_row: u32;
var<private> rows: u32;

// Inputs of a row's decay and beta.
fn load_step(row: u32, head: u32) -> vec2<f32> {
    return vec2<f32>(
        act[p.alpha.offset + row * p.alpha.row_stride + head * p.alpha.head_stride],
        act[p.beta.offset + row * p.beta.row_stride + head],
    );
}

// Loads STAGED_ROWS rows of the sequence, from its row `first` on, into registers.
fn load_rows(first: u32, head: u32, value: u32, index: u32) {
    let row_thread = index % ROW_THREADS;
    let staged = index / ROW_THREADS;
    if (staged < STAGED_ROWS && first + staged < rows) {
        let row = first_row + first + staged;
        let key_head = head / KEY_RUN % KEY_HEADS;
        let start = vec2<u32>(
            p.q.offset + row * p.q.row_stride + key_head * p.q.head_stride,
            p.k.offset + row * p.k.row_stride + key_head * p.k.head_stride,
        );
        for (var i = 0u; i < K_VECS; i++) {
            q[i] = load_vec(start.x, i, row_thread);
            k[i] = load_vec(start.y, i, row_thread);
            if (KEY_DECAYS == 1u) {
                for (var c = 0u; c < 4u; c++) { decay_inputs[i][c] = decay_input(row, head, (4u * i + c) * ROW_THREADS + row_thread); }
            }
        }
        step = load_step(row, head);
    }
    for (var i = 0u; i < V_LOADS; i++) {
        let at = i * WG + index;
        let row = first + at / GROUP_VALUES;
        if (at < STAGED_ROWS * GROUP_VALUES && row < rows && value + at % GROUP_VALUES < V_WIDTH) {
            v[i] = act[p.v.offset + (first_row + row) * p.v.row_stride + head * p.v.head_stride + value + at % GROUP_VALUES];
        }
    }
}

fn decay_of(x: f32, rate: f32) -> f32 {
    if (BOUNDED == 1u) { return exp_of(p.bound / (1.0 + exp_of(-rate * x))); }
    let softplus = max(x, 0.0) + log1p_of(exp_of(-abs(x)));
    return exp_of(-rate * softplus);
}

// Decay, beta and k . q. The decay is 1 if each element has one.
fn row_step(step: vec2<f32>, rate: f32, bias: f32, product: f32) -> vec4<f32> {
    var decay = 1.0;
    if (KEY_DECAYS == 0u) { decay = decay_of(step.x + bias, rate); }
    return vec4<f32>(decay, sigmoid(step.y), product, 0.0);
}

// Normalizes the loaded rows and stores them to workgroup memory.
fn stage_rows(index: u32, rate: f32, bias: f32) {
    let row_thread = index % ROW_THREADS;
    let staged = index / ROW_THREADS;
    var squares = vec2<f32>(0.0);
    var product = 0.0;
    for (var i = 0u; i < K_VECS; i++) {
        squares += vec2<f32>(dot(q[i], q[i]), dot(k[i], k[i]));
        product += dot(q[i], k[i]);
    }
    squares = pair_sum(squares);
    product = pair_sum(vec2<f32>(product, 0.0)).x;
    let scales = vec2<f32>(p.q_scale, 1.0) / sqrt(squares + 1e-6);
    if (staged < STAGED_ROWS) {
        for (var i = 0u; i < K_VECS; i++) {
            q_rows[(staged * K_VECS + i) * ROW_THREADS + row_thread] = q[i] * scales.x;
            k_rows[(staged * K_VECS + i) * ROW_THREADS + row_thread] = k[i] * scales.y;
            if (KEY_DECAYS == 1u) {
                var decays: vec4<f32>;
                for (var c = 0u; c < 4u; c++) { decays[c] = decay_of(decay_inputs[i][c], rate); }
                decay_rows[(staged * K_VECS + i) * ROW_THREADS + row_thread] = decays;
            }
        }
        if (row_thread == 0u) { row_steps[staged] = row_step(step, rate, bias, product * scales.x * scales.y); }
    }
    for (var i = 0u; i < V_LOADS; i++) {
        let at = i * WG + index;
        if (at < STAGED_ROWS * GROUP_VALUES) { v_rows[at] = v[i]; }
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
    first_row = first_row_of(sequence);
    rows = rows_of(sequence);
    let value = group % HEAD_GROUPS * GROUP_VALUES;
    let row_thread = index % ROW_THREADS;
    // First value of the thread, and the offset of its row of the state.
    let first_value = index / ROW_THREADS * THREAD_ROWS;
    let state_offset = (head * V_WIDTH + value + first_value) * K_WIDTH;

    if (TAPS == 0u) { load_rows(0u, head, value, index); }
    var state: array<array<vec4<f32>, K_VECS>, THREAD_ROWS>;
    for (var r = 0u; r < THREAD_ROWS; r++) {
        for (var i = 0u; i < K_VECS; i++) {
            for (var c = 0u; c < 4u; c++) {
                let at = (4u * i + c) * ROW_THREADS + row_thread;
                state[r][i][c] = 0.0;
                if (at < K_WIDTH && value + first_value + r < V_WIDTH) { state[r][i][c] = load_state(sequence, state_offset + r * K_WIDTH + at); }
            }
        }
    }
    let rate = exp_of(act[p.a_log + head]);
    var bias = 0.0;
    if (KEY_DECAYS == 0u) { bias = act[p.dt_bias + head]; }
    // Value that the thread writes.
    let my_value = value + first_value + row_thread;
    let writes = row_thread < THREAD_ROWS && my_value < V_WIDTH;
    var gate = 1.0;
    if (GATED > 0u && writes) {
        let x = act[p.gate + sequence * p.gate_row_stride + head * V_WIDTH + my_value];
        if (GATED == 1u) {
            gate = act[p.norm_weight + my_value] * silu(x);
        } else {
            gate = act[p.norm_weight + my_value] * sigmoid(x);
        }
    }
    if (TAPS > 0u) {
        step = load_step(sequence, head);
        if (KEY_DECAYS == 1u) {
            for (var i = index; i < 4u * K_VECS * ROW_THREADS; i += WG) {
                let vec = i / (4u * ROW_THREADS) * ROW_THREADS + i % ROW_THREADS;
                decay_rows[vec][i / ROW_THREADS % 4u] = decay_of(decay_input(sequence, head, i), rate);
            }
        }
        convolve(sequence, head, value, index);
    }
    for (var first = 0u; first < rows; first += STAGED_ROWS) {
        workgroupBarrier();
        if (TAPS == 0u) {
            stage_rows(index, rate, bias);
            workgroupBarrier();
            load_rows(first + STAGED_ROWS, head, value, index);
        }
        for (var row = 0u; row < min(STAGED_ROWS, rows - first); row++) {
            var key: array<vec4<f32>, K_VECS>;
            var query: array<vec4<f32>, K_VECS>;
            for (var i = 0u; i < K_VECS; i++) {
                key[i] = k_rows[(row * K_VECS + i) * ROW_THREADS + row_thread];
                query[i] = q_rows[(row * K_VECS + i) * ROW_THREADS + row_thread];
            }
            var decay_beta_kq = row_steps[row];
            if (TAPS > 0u) {
                var squares = vec2<f32>(0.0);
                var product = 0.0;
                for (var i = 0u; i < K_VECS; i++) {
                    squares += vec2<f32>(dot(query[i], query[i]), dot(key[i], key[i]));
                    product += dot(query[i], key[i]);
                }
                product = pair_sum(vec2<f32>(product, 0.0)).x;
                let scales = vec2<f32>(p.q_scale, 1.0) / sqrt(pair_sum(squares) + 1e-6);
                for (var i = 0u; i < K_VECS; i++) {
                    query[i] *= scales.x;
                    key[i] *= scales.y;
                }
                decay_beta_kq = row_step(step, rate, bias, product * scales.x * scales.y);
            }
            // Factors of the old state in the products.
            var old_key = key;
            var old_query = query;
            var decays: array<vec4<f32>, K_VECS>;
            if (KEY_DECAYS == 1u) {
                for (var i = 0u; i < K_VECS; i++) {
                    decays[i] = decay_rows[(row * K_VECS + i) * ROW_THREADS + row_thread];
                    old_key[i] *= decays[i];
                    old_query[i] *= decays[i];
                }
            }
            var y = 0.0;
            var products: array<vec2<f32>, THREAD_ROWS>;
            for (var r = 0u; r < THREAD_ROWS; r++) {
                var x = vec4<f32>(0.0);
                var z = vec4<f32>(0.0);
                for (var i = 0u; i < K_VECS; i++) {
                    x = fma(state[r][i], old_key[i], x);
                    z = fma(state[r][i], old_query[i], z);
                }
                products[r] = vec2<f32>(x.x + x.y + (x.z + x.w), z.x + z.y + (z.z + z.w));
            }
            for (var r = 0u; r < THREAD_ROWS; r++) { products[r] = pair_sum(products[r]) * decay_beta_kq.x; }
            for (var r = 0u; r < THREAD_ROWS; r++) {
                let product = products[r];
                let d = decay_beta_kq.y * (v_rows[row * GROUP_VALUES + first_value + r] - product.x);
                for (var i = 0u; i < K_VECS; i++) {
                    if (KEY_DECAYS == 1u) {
                        state[r][i] = fma(vec4<f32>(d), key[i], state[r][i] * decays[i]);
                    } else {
                        state[r][i] = fma(vec4<f32>(d), key[i], state[r][i] * decay_beta_kq.x);
                    }
                }
                if (row_thread == r) { y = fma(d, decay_beta_kq.z, product.y); }
            }
            if (writes) { act[p.out.offset + (first_row + first + row) * p.out.row_stride + head * p.out.head_stride + my_value] = y * gate; }
            if (GATED > 0u) {
                let thread_squares = pair_sum(vec2<f32>(select(0.0, y * y, writes), 0.0)).x;
                if (row_thread == 0u) { squares[index / ROW_THREADS] = thread_squares; }
                workgroupBarrier();
                if (index == 0u) {
                    var sum = 0.0;
                    for (var i = 0u; i < WG / ROW_THREADS; i++) { sum += squares[i]; }
                    act[p.squares + sequence * p.squares_row_stride + head * V_WIDTH + group % HEAD_GROUPS] = sum;
                }
            }
        }
    }
    for (var r = 0u; r < THREAD_ROWS; r++) {
        for (var i = 0u; i < K_VECS; i++) {
            for (var c = 0u; c < 4u; c++) {
                let at = (4u * i + c) * ROW_THREADS + row_thread;
                if (at < K_WIDTH && value + first_value + r < V_WIDTH) { store_state(sequence, state_offset + r * K_WIDTH + at, state[r][i][c]); }
            }
        }
    }
}
