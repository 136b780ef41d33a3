// Gated linear units. ACTIVATION: 0 SwiGLU, 1 GeGLU (tanh), 2 clamped, 3 clipped, 4 limited SwiGLU.
// Functions of `up`, without a gate: 5 the square of a ReLU, 6 GELU (erf), 7 GELU (tanh), 8 quick
// GELU.
// needs: common/common, common/exp_log
// constants: ACTIVATION

// exp(x^2) erfc(x) for x >= 0: t P(2 t - 1) with t = 1 / (1 + 0.4 x), where P interpolates at the
// Chebyshev nodes of degree 8.
fn erfcx_of(x: f32) -> f32 {
    let t = 1.0 / fma(0.4, x, 1.0);
    let u = fma(2.0, t, -1.0);
    var sum = 2.0057221e-4;
    sum = fma(sum, u, 1.4109715e-4);
    sum = fma(sum, u, -1.8716555e-3);
    sum = fma(sum, u, -3.334728e-3);
    sum = fma(sum, u, 1.1329619e-2);
    sum = fma(sum, u, 6.849458e-2);
    sum = fma(sum, u, 0.18156676);
    sum = fma(sum, u, 0.32186118);
    sum = fma(sum, u, 0.42161274);
    return sum * t;
}

// Activation without a gate, or none.
fn activate_up(x: f32) -> f32 {
    if (ACTIVATION == 5u) { return max(x, 0.0) * max(x, 0.0); }
    if (ACTIVATION == 6u) {
        // x P(X <= x) for a standard normal X. Far below zero 1 + erf would lose all digits.
        // The tail is zero long before the bound, which keeps infinity from a product with zero.
        let size = min(abs(x), 64.0);
        let tail = exp_of(-0.5 * x * x) * erfcx_of(size * 0.70710678);
        return max(x, 0.0) - 0.5 * size * tail;
    }
    if (ACTIVATION == 7u) { return x * sigmoid(1.5957691 * (x + 0.044715 * x * x * x)); }
    if (ACTIVATION == 8u) { return x * sigmoid(1.702 * x); }
    return x;
}

fn activate(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    if (ACTIVATION == 0u) { return silu(gate) * up; }
    if (ACTIVATION == 1u) {
        let inner = 0.7978846 * (gate + 0.044715 * gate * gate * gate);
        return 0.5 * gate * (1.0 + tanh_of(inner)) * up;
    }
    if (ACTIVATION == 3u) { return silu(min(gate, limit)) * clamp(up, -limit, limit); }
    if (ACTIVATION == 4u) { return min(silu(gate), limit) * clamp(up, -limit, limit); }
    if (ACTIVATION >= 5u) { return activate_up(up); }
    let g = min(gate, limit);
    return g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1.0);
}
