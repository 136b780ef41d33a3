// Causal depthwise convolution of one row, as in conv1d.wgsl, fused before the delta rule: each
// workgroup computes the query, the key and the values that it needs.
// implements: @convolution
// needs: common/common, recurrent/delta_net
// constants: K_WIDTH, ROW_THREADS, TAPS, V_WIDTH, WG

@group(0) @binding(3) var<storage, read> inputs: array<f32>;
@group(0) @binding(4) var<storage, read_write> next_inputs: array<f32>;

// Inputs of a channel, the newest last, and their weights.
struct Taps { x: array<f32, TAPS>, w: array<f32, TAPS> }

fn load_taps(offset: u32) -> Taps {
    let channel = offset - p.conv_x;
    var taps: Taps;
    // @unroll
    for (var j = 0u; j < TAPS; j++) {
        taps.w[j] = act[p.conv_weight + channel * TAPS + j];
        if (j + 1u < TAPS) {
            taps.x[j] = inputs[j * p.channels + channel];
        } else {
            taps.x[j] = act[offset];
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

fn store_inputs(taps: Taps, offset: u32) {
    // @unroll
    for (var j = 1u; j < TAPS; j++) { next_inputs[(j - 1u) * p.channels + offset - p.conv_x] = taps.x[j]; }
}

// Convolves the channels of a workgroup. The first workgroup of each channel also writes its next
// state.
fn convolve(head: u32, value: u32, index: u32) {
    let key_head = head / p.key_run % p.key_heads;
    let is_first = key_head * p.key_run == head && value == 0u;
    // All loads are issued before the first store.
    for (var i = index; i < max(K_WIDTH, GROUP_VALUES); i += WG) {
        let offset = vec3<u32>(p.q.offset + key_head * p.q.head_stride, p.k.offset + key_head * p.k.head_stride, p.v.offset + head * p.v.head_stride + value)
            + min(vec3<u32>(i), vec3<u32>(K_WIDTH - 1u, K_WIDTH - 1u, min(GROUP_VALUES, V_WIDTH - value) - 1u));
        let q = load_taps(offset.x);
        let k = load_taps(offset.y);
        let v = load_taps(offset.z);
        if (i < K_WIDTH) {
            let vec = i / (4u * ROW_THREADS) * ROW_THREADS + i % ROW_THREADS;
            q_rows[vec][i / ROW_THREADS % 4u] = convolved(q);
            k_rows[vec][i / ROW_THREADS % 4u] = convolved(k);
            if (is_first) {
                store_inputs(q, offset.x);
                store_inputs(k, offset.y);
            }
        }
        if (i < GROUP_VALUES && value + i < V_WIDTH) {
            v_rows[i] = convolved(v);
            store_inputs(v, offset.z);
        }
    }
    // Past the end, vectors are zero.
    for (var i = K_WIDTH + index; i < 4u * K_VECS * ROW_THREADS; i += WG) {
        let vec = i / (4u * ROW_THREADS) * ROW_THREADS + i % ROW_THREADS;
        q_rows[vec][i / ROW_THREADS % 4u] = 0.0;
        k_rows[vec][i / ROW_THREADS % 4u] = 0.0;
    }
}
