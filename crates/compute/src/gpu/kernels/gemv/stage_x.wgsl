// x on its way into workgroup memory, by pieces of four numbers, STRIDE apart, that `x_put` takes. Each thread asks for ASKED
// of them before it waits for one: `ask` for the first ones, ahead of weights, behind which they would have to wait; `stage` for
// the others.
//
// NORM: RMSNorm(x) = x w / sqrt(mean(x^2) + eps) instead, of which x w is brought; `x_factor` gives the rest.
// HEAD: x is heads of so many numbers, each of which is yet to be divided by the root of its mean square, if it is not 0. What makes x
// leaves sums of squares, SQUARES of each head, HEAD numbers apart: `head_squares` asks for them, and `head_factors` comes before
// `stage`.
// needs: common/common, @team, @activations
// constants: COLS, HEAD, NORM, SQUARES, WG

const X_PIECES = X_COLS / 4u;
const ASKED = 8u - 4u * NORM;

struct Asked { x: array<vec4<f32>, ASKED>, w: array<vec4<f32>, ASKED> }

var<private> squares: f32;

const HEADS = X_COLS / max(HEAD, 1u);
var<workgroup> factors: array<f32, select(1u, HEADS, HEAD > 0u)>;

fn head_squares(at: u32) -> f32 {
    var sum = 0.0;
    let head = at + min(thread, HEADS - 1u) * HEAD;
    for (var i = 0u; i < SQUARES; i++) { sum += a[head + i]; }
    return sum;
}

fn head_factors(squares: f32, eps: f32) {
    if (thread < HEADS) { factors[thread] = 1.0 / sqrt(squares / f32(HEAD) + eps); }
    workgroupBarrier();
}

fn piece_at(at: u32, piece: u32) -> vec4<f32> {
    let p = min(piece, X_PIECES - 1u);
    let i = at + p / STRIDE * 4u * STRIDE + p % STRIDE;
    return vec4<f32>(a[i], a[i + STRIDE], a[i + 2u * STRIDE], a[i + 3u * STRIDE]);
}

// This thread's pieces from piece `first` on. `w`: where the norm's weights begin.
fn ask(at: u32, w: u32, first: u32) -> Asked {
    var asked: Asked;
    // @unroll
    for (var j = 0u; j < ASKED; j++) {
        if (j * WG < X_PIECES) {
            asked.x[j] = piece_at(at, first + j * WG + thread);
            if (NORM == 1u) { asked.w[j] = piece_at(w, first + j * WG + thread); }
        }
    }
    return asked;
}

// `asked`: the first pieces of the same x.
fn stage(asked: Asked, at: u32, w: u32) {
    var now = asked;
    for (var first = 0u; first < X_PIECES; first += ASKED * WG) {
        if (first > 0u) { now = ask(at, w, first); }
        // @unroll
        for (var j = 0u; j < ASKED; j++) {
            if (j * WG < X_PIECES) {
                let piece = first + j * WG + thread;
                var x = now.x[j];
                if (NORM == 1u) {
                    squares += select(0.0, dot(x, x), piece < X_PIECES);
                    x *= now.w[j];
                }
                if (HEAD > 0u) { x *= factors[min(piece, X_PIECES - 1u) / (max(HEAD, 4u) / 4u)]; }
                x_put(piece, x);
            }
        }
    }
    if (NORM == 1u) { squares = group_sum(squares); }
    workgroupBarrier();
}

fn x_factor(eps: f32) -> f32 {
    return 1.0 / sqrt(squares / f32(COLS) + eps);
}
