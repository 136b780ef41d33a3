// The end of attention: a softmax whose parts are all known. NOTHING: the score of what is not seen; finite, since Metal's
// fast math knows no infinity.
// needs: common/common

const NOTHING = -1e30;
const NONE = 0xffffffffu;

// The score that a head's sink has; `sinks` is NONE where there are none.
fn sink_of(sinks: u32, head: u32) -> f32 {
    if (sinks == NONE) { return NOTHING; }
    return max(a[sinks + head], NOTHING);
}

// The weight of a sink, relative to the largest score.
fn sink_weight(sinks: u32, sink: f32, most: f32) -> f32 {
    if (sinks == NONE) { return 0.0; }
    return exp(sink - most);
}

// What sums of weighted values are multiplied by.
fn share_of(total: f32) -> f32 {
    if (total > 0.0) { return 1.0 / total; }
    return 0.0;
}
