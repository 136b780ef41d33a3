// Stages activations in workgroup memory, by vectors of four, X_STRIDE apart, which `store_x`
// takes. Each thread issues X_LOADS loads before it waits for one: `load_x` for the first ones,
// ahead of the weights, after which they would have to wait; `stage_activations` for the others.
// NORM: stages RMSNorm(x) = x w / sqrt(mean(x^2) + eps), but only x w; `norm_factor` gives the
// rest. HEAD_WIDTH: if not 0, x is heads of this width, which are divided by their root mean
// square. The producer of x leaves HEAD_SQUARES sums of squares per head, HEAD_WIDTH elements
// apart: `sum_head_squares` loads them, and `store_head_factors` comes before `stage_activations`.
// A block of a codec with PAIR_COLS is 16 weights and the 16 that follow half of PAIR_COLS later:
// vectors are staged in this order.
// needs: common/common, @team, @activations
// constants: COLS, HEAD_SQUARES, HEAD_WIDTH, NORM, WG

const X_VECS = X_COLS / 4u;
const PAIR_VECS = max(PAIR_COLS, 4u) / 4u;
const X_LOADS = 8u - 4u * NORM;

struct LoadedX { x: array<vec4<f32>, X_LOADS>, w: array<vec4<f32>, X_LOADS> }

var<private> squares: f32;

const X_HEADS = X_COLS / max(HEAD_WIDTH, 1u);
var<workgroup> head_factors: array<f32, select(1u, X_HEADS, HEAD_WIDTH > 0u)>;

fn sum_head_squares(start: u32) -> f32 {
    var sum = 0.0;
    let head = start + min(thread, X_HEADS - 1u) * HEAD_WIDTH;
    for (var i = 0u; i < HEAD_SQUARES; i++) { sum += act[head + i]; }
    return sum;
}

fn store_head_factors(squares: f32, eps: f32) {
    if (thread < X_HEADS) { head_factors[thread] = 1.0 / sqrt(squares / f32(HEAD_WIDTH) + eps); }
    workgroupBarrier();
}

// The vector of x that is staged as vector `vec`.
fn source_of(vec: u32) -> u32 {
    let p = min(vec, X_VECS - 1u);
    if (PAIR_COLS == 0u) { return p; }
    let n = p % PAIR_VECS;
    return p - n + n / 4u % 2u * (PAIR_VECS / 2u) + n / 8u * 4u + n % 4u;
}

fn load_x_vec(start: u32, vec: u32) -> vec4<f32> {
    let p = source_of(vec);
    let i = start + p / X_STRIDE * 4u * X_STRIDE + p % X_STRIDE;
    return vec4<f32>(act[i], act[i + X_STRIDE], act[i + 2u * X_STRIDE], act[i + 3u * X_STRIDE]);
}

// Loads this thread's vectors from vector `first` on. `w`: start of the norm's weights.
fn load_x(start: u32, w: u32, first: u32) -> LoadedX {
    var loaded_x: LoadedX;
    // @unroll
    for (var j = 0u; j < X_LOADS; j++) {
        if (j * WG < X_VECS) {
            loaded_x.x[j] = load_x_vec(start, first + j * WG + thread);
            if (NORM == 1u) { loaded_x.w[j] = load_x_vec(w, first + j * WG + thread); }
        }
    }
    return loaded_x;
}

// `loaded_x`: the first vectors of the same x.
fn stage_activations(loaded_x: LoadedX, start: u32, w: u32) {
    var current = loaded_x;
    for (var first = 0u; first < X_VECS; first += X_LOADS * WG) {
        if (first > 0u) { current = load_x(start, w, first); }
        // @unroll
        for (var j = 0u; j < X_LOADS; j++) {
            if (j * WG < X_VECS) {
                let vec = first + j * WG + thread;
                var x = current.x[j];
                if (NORM == 1u) {
                    squares += select(0.0, dot_4(x, x), vec < X_VECS);
                    x *= current.w[j];
                }
                if (HEAD_WIDTH > 0u) { x *= head_factors[source_of(vec) / (max(HEAD_WIDTH, 4u) / 4u)]; }
                store_x(vec, x);
            }
        }
    }
    if (NORM == 1u) { squares = group_sum(squares); }
    workgroupBarrier();
}

fn norm_factor(eps: f32) -> f32 {
    return 1.0 / sqrt(squares / f32(COLS) + eps);
}
