// Causal depthwise convolution of one row, as in conv1d.wgsl, fused before the delta rule: each
// workgroup computes the query, the key and the values that it needs.
// implements: @convolution
// needs: common/common, recurrent/delta_net, @inputs
// constants: KEY_HEADS, KEY_RUN, K_WIDTH, ROW_THREADS, TAPS, V_WIDTH, WG

// Inputs of a channel, the newest last, and their weights.
struct Taps { x: array<f32, TAPS>, w: array<f32, TAPS> }

// Start of the inputs of a sequence.
fn conv_start(sequence: u32) -> u32 { return p.conv_x + sequence * p.q.row_stride; }

fn load_taps(sequence: u32, offset: u32) -> Taps {
    let channel = offset - conv_start(sequence);
    var taps: Taps;
    // @unroll
    for (var j = 0u; j < TAPS; j++) {
        taps.w[j] = act[p.conv_weight + channel * TAPS + j];
        if (j + 1u < TAPS) {
            taps.x[j] = load_input(sequence, j * p.channels + channel);
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

fn store_inputs(sequence: u32, taps: Taps, offset: u32) {
    let channel = offset - conv_start(sequence);
    // @unroll
    for (var j = 1u; j < TAPS; j++) { store_input(sequence, (j - 1u) * p.channels + channel, taps.x[j]); }
}

// Convolves the channels of a workgroup. The first workgroup of each channel also writes its next
// state.
fn convolve(sequence: u32, head: u32, value: u32, index: u32) {
    let key_head = head / KEY_RUN % KEY_HEADS;
    let is_first = key_head * KEY_RUN == head && value == 0u;
    // All loads are issued before the first store.
    for (var i = index; i < max(K_WIDTH, GROUP_VALUES); i += WG) {
        let offset = vec3<u32>(sequence * p.q.row_stride)
            + vec3<u32>(p.q.offset + key_head * p.q.head_stride, p.k.offset + key_head * p.k.head_stride, p.v.offset + head * p.v.head_stride + value)
            + min(vec3<u32>(i), vec3<u32>(K_WIDTH - 1u, K_WIDTH - 1u, min(GROUP_VALUES, V_WIDTH - value) - 1u));
        let q = load_taps(sequence, offset.x);
        let k = load_taps(sequence, offset.y);
        let v = load_taps(sequence, offset.z);
        if (i < K_WIDTH) {
            let vec = i / (4u * ROW_THREADS) * ROW_THREADS + i % ROW_THREADS;
            q_rows[vec][i / ROW_THREADS % 4u] = convolved(q);
            k_rows[vec][i / ROW_THREADS % 4u] = convolved(k);
            if (is_first) {
                store_inputs(sequence, q, offset.x);
                store_inputs(sequence, k, offset.y);
            }
        }
        if (i < GROUP_VALUES && value + i < V_WIDTH) {
            v_rows[i] = convolved(v);
            store_inputs(sequence, v, offset.z);
        }
    }
    // Past the end, vectors are zero.
    for (var i = K_WIDTH + index; i < 4u * K_VECS * ROW_THREADS; i += WG) {
        let vec = i / (4u * ROW_THREADS) * ROW_THREADS + i % ROW_THREADS;
        q_rows[vec][i / ROW_THREADS % 4u] = 0.0;
        k_rows[vec][i / ROW_THREADS % 4u] = 0.0;
    }
}
