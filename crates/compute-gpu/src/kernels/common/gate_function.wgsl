// Function of a gate. FUNCTION: 0 sigmoid, 1 softplus, 2 identity, 3 twice the sigmoid.
// needs: common/common, common/exp_log
// constants: FUNCTION

fn gate_function(gate: f32) -> f32 {
    if (FUNCTION == 1u) { return max(gate, 0.0) + log1p_of(exp_of(-abs(gate))); }
    if (FUNCTION == 2u) { return gate; }
    if (FUNCTION == 3u) { return 2.0 * sigmoid(gate); }
    return sigmoid(gate);
}
