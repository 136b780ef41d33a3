// The gated delta rule, row by row. For each value head, where q and k have length one (and q is divided by sqrt(KEYS)):
//   S = decay S     d = beta (v - S k)     S = S + d k^T     out = S q
// A row of S, which makes one number of out, is the work of LANES neighbouring threads; these keep SHARE rows of S, at most
// LANES, in registers over all rows of the span. Both products are taken of the old S, so that one sum waits for another
// only from row to row:  d = beta (v - decay (S k))     out = decay (S q) + d (k . q).
//
// The rows of the span come through workgroup memory, ROWS at a time; while they are computed, the next are on their way to
// registers. LANES threads bring one row's q and k, and take their lengths. Number i of a vector is kept by lane
// i % LANES: it is component i / LANES % 4 of four i / LANES / 4.
// KEYS, VALUES: widths of a key and of a value.
// TAPS: if it is not 0, there is one row, and what q, k and v name are the newest inputs of a convolution, which delta_convolved.wgsl makes
// first; lengths are then taken by all threads, of what the workgroup has convolved.
// GATED: out is the weighted and gated RMSNorm of that, head by head, but for the division by the root of the mean square: the sum of
// the squares of each workgroup goes to `squares`, those of a head one behind another, VALUES apart. There is one row then.
// Grid: a workgroup of WG threads for each SHARE WG / LANES values of a head.
// needs: common/common, common/exp_log, @pair_sum, @convolution
// constants: GATED, KEYS, LANES, ROWS, SHARE, TAPS, VALUES, WG

struct Params {
    q: View, k: View, v: View, alpha: View, beta: View, out: View,
    a_log: u32, dt_bias: u32, rows: u32, heads: u32, heads_of_key: u32, q_scale: f32,
    x: u32, taps: u32, channels: u32, // where all inputs of the convolution and its weights begin
    gate: u32, norm: u32, squares: u32, // gates and weights of the norm
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;

// Fours of a key that a thread keeps.
const FOURS = (KEYS + 4u * LANES - 1u) / (4u * LANES);
// Values of a workgroup.
const PART = SHARE * WG / LANES;
const PARTS = (VALUES + PART - 1u) / PART;
// Values that a thread brings.
const BROUGHT = (ROWS * PART + WG - 1u) / WG;

var<workgroup> queries: array<vec4<f32>, ROWS * FOURS * LANES>;
var<workgroup> keys: array<vec4<f32>, ROWS * FOURS * LANES>;
var<workgroup> values: array<f32, ROWS * PART>;
// Decay, beta and k . q.
var<workgroup> steps: array<vec4<f32>, ROWS>;
var<workgroup> squares: array<f32, WG / LANES>;

// What a thread brings of the next rows.
var<private> q: array<vec4<f32>, FOURS>;
var<private> k: array<vec4<f32>, FOURS>;
var<private> v: array<f32, BROUGHT>;
var<private> step: vec2<f32>;

// Number `part` of the fours `i` of a thread, in a vector that begins at `start`.
fn component(start: u32, i: u32, part: u32, lane: u32) -> f32 {
    let at = (4u * i + part) * LANES + lane;
    if (at < KEYS) { return a[start + at]; }
    return 0.0;
}

fn four(start: u32, i: u32, lane: u32) -> vec4<f32> {
    return vec4<f32>(
        component(start, i, 0u, lane),
        component(start, i, 1u, lane),
        component(start, i, 2u, lane),
        component(start, i, 3u, lane),
    );
}

// Brings ROWS rows from row `first`.
fn bring(first: u32, head: u32, value: u32, index: u32) {
    let lane = index % LANES;
    let own = index / LANES;
    if (own < ROWS && first + own < p.rows) {
        let row = first + own;
        let key_head = head / p.heads_of_key;
        let start = vec2<u32>(
            p.q.at + row * p.q.row + key_head * p.q.head,
            p.k.at + row * p.k.row + key_head * p.k.head,
        );
        for (var i = 0u; i < FOURS; i++) {
            q[i] = four(start.x, i, lane);
            k[i] = four(start.y, i, lane);
        }
        step = vec2<f32>(a[p.alpha.at + row * p.alpha.row + head], a[p.beta.at + row * p.beta.row + head]);
    }
    for (var i = 0u; i < BROUGHT; i++) {
        let at = i * WG + index;
        let row = first + at / PART;
        if (at < ROWS * PART && row < p.rows && value + at % PART < VALUES) {
            v[i] = a[p.v.at + row * p.v.row + head * p.v.head + value + at % PART];
        }
    }
}

// Decay, beta and k . q.
fn step_of(step: vec2<f32>, rate: f32, bias: f32, product: f32) -> vec4<f32> {
    let x = step.x + bias;
    let softplus = max(x, 0.0) + log1p_of(exp_of(-abs(x)));
    return vec4<f32>(exp_of(-rate * softplus), sigmoid(step.y), product, 0.0);
}

// Puts what was brought where the workgroup sees it.
fn share(index: u32, rate: f32, bias: f32) {
    let lane = index % LANES;
    let own = index / LANES;
    var squares = vec2<f32>(0.0);
    var product = 0.0;
    for (var i = 0u; i < FOURS; i++) {
        squares += vec2<f32>(dot(q[i], q[i]), dot(k[i], k[i]));
        product += dot(q[i], k[i]);
    }
    squares = lanes_sum(squares);
    product = lanes_sum(vec2<f32>(product, 0.0)).x;
    let scales = vec2<f32>(p.q_scale, 1.0) / sqrt(squares + 1e-6);
    if (own < ROWS) {
        for (var i = 0u; i < FOURS; i++) {
            queries[(own * FOURS + i) * LANES + lane] = q[i] * scales.x;
            keys[(own * FOURS + i) * LANES + lane] = k[i] * scales.y;
        }
        if (lane == 0u) { steps[own] = step_of(step, rate, bias, product * scales.x * scales.y); }
    }
    for (var i = 0u; i < BROUGHT; i++) {
        let at = i * WG + index;
        if (at < ROWS * PART) { values[at] = v[i]; }
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    lanes_begin(index);
    let group = group_index(id, count);
    let head = group / PARTS;
    if (head >= p.heads) { return; }
    let value = group % PARTS * PART;
    let lane = index % LANES;
    // The first of the thread's values, and where its row of the state begins.
    let own = index / LANES * SHARE;
    let state = (head * VALUES + value + own) * KEYS;

    if (TAPS == 0u) { bring(0u, head, value, index); }
    var s: array<array<vec4<f32>, FOURS>, SHARE>;
    for (var r = 0u; r < SHARE; r++) {
        for (var i = 0u; i < FOURS; i++) {
            for (var part = 0u; part < 4u; part++) {
                let at = (4u * i + part) * LANES + lane;
                s[r][i][part] = 0.0;
                if (at < KEYS && value + own + r < VALUES) { s[r][i][part] = committed[state + r * KEYS + at]; }
            }
        }
    }
    let rate = exp_of(a[p.a_log + head]);
    let bias = a[p.dt_bias + head];
    // Of the value that the thread writes.
    let written = value + own + lane;
    let writes = lane < SHARE && written < VALUES;
    var gate = 1.0;
    if (GATED == 1u && writes) { gate = a[p.norm + written] * silu(a[p.gate + head * VALUES + written]); }
    if (TAPS > 0u) {
        step = vec2<f32>(a[p.alpha.at + head], a[p.beta.at + head]);
        convolve(head, value, index);
    }
    for (var first = 0u; first < p.rows; first += ROWS) {
        workgroupBarrier();
        if (TAPS == 0u) {
            share(index, rate, bias);
            workgroupBarrier();
            bring(first + ROWS, head, value, index);
        }
        let rows = min(ROWS, p.rows - first);
        for (var row = 0u; row < rows; row++) {
            var key: array<vec4<f32>, FOURS>;
            var query: array<vec4<f32>, FOURS>;
            for (var i = 0u; i < FOURS; i++) {
                key[i] = keys[(row * FOURS + i) * LANES + lane];
                query[i] = queries[(row * FOURS + i) * LANES + lane];
            }
            var now = steps[row];
            if (TAPS > 0u) {
                var squares = vec2<f32>(0.0);
                var product = 0.0;
                for (var i = 0u; i < FOURS; i++) {
                    squares += vec2<f32>(dot(query[i], query[i]), dot(key[i], key[i]));
                    product += dot(query[i], key[i]);
                }
                product = lanes_sum(vec2<f32>(product, 0.0)).x;
                let scales = vec2<f32>(p.q_scale, 1.0) / sqrt(lanes_sum(squares) + 1e-6);
                for (var i = 0u; i < FOURS; i++) {
                    query[i] *= scales.x;
                    key[i] *= scales.y;
                }
                now = step_of(step, rate, bias, product * scales.x * scales.y);
            }
            var y = 0.0;
            var products: array<vec2<f32>, SHARE>;
            for (var r = 0u; r < SHARE; r++) {
                var x = vec4<f32>(0.0);
                var z = vec4<f32>(0.0);
                for (var i = 0u; i < FOURS; i++) {
                    x = fma(s[r][i], key[i], x);
                    z = fma(s[r][i], query[i], z);
                }
                products[r] = vec2<f32>(x.x + x.y + (x.z + x.w), z.x + z.y + (z.z + z.w));
            }
            for (var r = 0u; r < SHARE; r++) { products[r] = lanes_sum(products[r]) * now.x; }
            for (var r = 0u; r < SHARE; r++) {
                let product = products[r];
                let d = now.y * (values[row * PART + own + r] - product.x);
                for (var i = 0u; i < FOURS; i++) { s[r][i] = fma(vec4<f32>(d), key[i], s[r][i] * now.x); }
                if (lane == r) { y = fma(d, now.z, product.y); }
            }
            if (writes) { a[p.out.at + (first + row) * p.out.row + head * p.out.head + written] = y * gate; }
            if (GATED == 1u) {
                let of_lanes = lanes_sum(vec2<f32>(select(0.0, y * y, writes), 0.0)).x;
                if (lane == 0u) { squares[index / LANES] = of_lanes; }
                workgroupBarrier();
                if (index == 0u) {
                    var sum = 0.0;
                    for (var i = 0u; i < WG / LANES; i++) { sum += squares[i]; }
                    a[p.squares + head * VALUES + group % PARTS] = sum;
                }
            }
        }
    }
    for (var r = 0u; r < SHARE; r++) {
        for (var i = 0u; i < FOURS; i++) {
            for (var part = 0u; part < 4u; part++) {
                let at = (4u * i + part) * LANES + lane;
                if (at < KEYS && value + own + r < VALUES) { next[state + r * KEYS + at] = s[r][i][part]; }
            }
        }
    }
}
