// Gated linear units. ACTIVATION: 0 SwiGLU, 1 GeGLU (tanh), 2 clamped, 3 clipped, 4 limited SwiGLU,
// 5 the square of a ReLU of `up`, without a gate.
// needs: common/common
// constants: ACTIVATION

// Activation without a gate, or none.
fn activate_up(x: f32) -> f32 {
    if (ACTIVATION == 5u) { return max(x, 0.0) * max(x, 0.0); }
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
    if (ACTIVATION == 5u) { return activate_up(up); }
    let g = min(gate, limit);
    return g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1.0);
}
