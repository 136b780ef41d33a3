// Gated linear units. ACTIVATION: 0 SwiGLU, 1 GeGLU (tanh), 2 clamped, 3 clipped, 4 limited SwiGLU.
// needs: common/common
// constants: ACTIVATION

fn activate(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    if (ACTIVATION == 0u) { return silu(gate) * up; }
    if (ACTIVATION == 1u) {
        let inner = 0.7978846 * (gate + 0.044715 * gate * gate * gate);
        return 0.5 * gate * (1.0 + tanh_of(inner)) * up;
    }
    if (ACTIVATION == 3u) { return silu(min(gate, limit)) * clamp(up, -limit, limit); }
    if (ACTIVATION == 4u) { return min(silu(gate), limit) * clamp(up, -limit, limit); }
    let g = min(gate, limit);
    return g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1.0);
}
