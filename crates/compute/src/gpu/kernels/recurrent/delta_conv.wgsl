// A causal depthwise convolution, as conv1d.wgsl has it, of one row, ahead of delta_net.wgsl: each workgroup makes the query, the key and
// the values that it needs.
// implements: @convolution
// needs: common/common, recurrent/delta_net
// constants: KEYS, LANES, TAPS, VALUES, WG

@group(0) @binding(3) var<storage, read> inputs: array<f32>;
@group(0) @binding(4) var<storage, read_write> next_inputs: array<f32>;

// The inputs of a channel, the newest last, and their weights.
struct Taps { x: array<f32, TAPS>, w: array<f32, TAPS> }

fn taps_of(at: u32) -> Taps {
    let channel = at - p.x;
    var taps: Taps;
    // @unroll
    for (var j = 0u; j < TAPS; j++) {
        taps.w[j] = a[p.taps + channel * TAPS + j];
        if (j + 1u < TAPS) {
            taps.x[j] = inputs[j * p.channels + channel];
        } else {
            taps.x[j] = a[at];
        }
    }
    return taps;
}

fn convolved(taps: Taps) -> f32 {
    var sum = 0.0;
    // @unroll
    for (var j = 0u; j < TAPS; j++) { sum = fma(taps.w[j], taps.x[j], sum); }
    return silu(sum);
}

fn keep_inputs(taps: Taps, at: u32) {
    // @unroll
    for (var j = 1u; j < TAPS; j++) { next_inputs[(j - 1u) * p.channels + at - p.x] = taps.x[j]; }
}

// Convolves what the workgroup needs; those of a channel's workgroups that come first also write its next state.
fn convolve(head: u32, value: u32, index: u32) {
    let key_head = head / p.heads_of_key;
    let is_first = head % p.heads_of_key == 0u && value == 0u;
    // All of it is asked for before anything is written.
    for (var i = index; i < max(KEYS, PART); i += WG) {
        let at = vec3<u32>(p.q.at + key_head * p.q.head, p.k.at + key_head * p.k.head, p.v.at + head * p.v.head + value)
            + min(vec3<u32>(i), vec3<u32>(KEYS - 1u, KEYS - 1u, min(PART, VALUES - value) - 1u));
        let q = taps_of(at.x);
        let k = taps_of(at.y);
        let v = taps_of(at.z);
        if (i < KEYS) {
            let place = i / (4u * LANES) * LANES + i % LANES;
            queries[place][i / LANES % 4u] = convolved(q);
            keys[place][i / LANES % 4u] = convolved(k);
            if (is_first) {
                keep_inputs(q, at.x);
                keep_inputs(k, at.y);
            }
        }
        if (i < PART && value + i < VALUES) {
            values[i] = convolved(v);
            keep_inputs(v, at.z);
        }
    }
    // What is behind a vector's end counts as zero.
    for (var i = KEYS + index; i < 4u * FOURS * LANES; i += WG) {
        let place = i / (4u * LANES) * LANES + i % LANES;
        queries[place][i / LANES % 4u] = 0.0;
        keys[place][i / LANES % 4u] = 0.0;
    }
}
