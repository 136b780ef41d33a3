// Gated linear units. ACTIVATION: 0 SwiGLU, 1 GeGLU (tanh), 2 clamped SwiGLU.
// needs: common/common
// constants: ACTIVATION

fn activate(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    if (ACTIVATION == 0u) { return silu(gate) * up; }
    if (ACTIVATION == 1u) {
        let inner = 0.7978846 * (gate + 0.044715 * gate * gate * gate);
        return 0.5 * gate * (1.0 + tanh_of(inner)) * up;
    }
    let g = min(gate, limit);
    return g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1.0);
}
