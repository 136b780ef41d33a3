// Softmax with an attention sink: its final normalization. MASKED: score of positions that are not
// visible. It is finite, as Metal's fast math does not support infinity.
// needs: common/common

const MASKED = -1e30;
const NONE = 0xffffffffu;

// Score of the sink of a head; MASKED if `sinks` is NONE.
fn sink_score(sinks: u32, head: u32) -> f32 {
    if (sinks == NONE) { return MASKED; }
    return max(act[sinks + head], MASKED);
}

// Softmax weight of a sink, relative to the maximum score.
fn sink_weight(sinks: u32, sink: f32, max_score: f32) -> f32 {
    if (sinks == NONE) { return 0.0; }
    return exp(sink - max_score);
}

// Normalization of the weighted sums. Rows without visible positions are zeros; NaN stays NaN.
fn reciprocal(total: f32) -> f32 {
    if (total == 0.0) { return 0.0; }
    return 1.0 / total;
}
