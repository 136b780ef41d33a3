// Transposed reduction: sums eight values over KEY_THREADS neighbouring threads (8 to 32) of a
// subgroup. Threads from i KEY_THREADS / 8 on get sum i. All threads of a workgroup call this
// together.
// implements: @sum8
// needs: @team
// constants: KEY_THREADS

fn sum8(low: vec4<f32>, high: vec4<f32>) -> f32 {
    // Each step halves the values: a thread passes on the half that it does not sum.
    let upper_half = (thread & (KEY_THREADS / 2u)) != 0u;
    let four = select(low, high, upper_half) + subgroupShuffleXor(select(high, low, upper_half), KEY_THREADS / 2u);
    let upper_quarter = (thread & (KEY_THREADS / 4u)) != 0u;
    let pair = select(four.xy, four.zw, upper_quarter) + subgroupShuffleXor(select(four.zw, four.xy, upper_quarter), KEY_THREADS / 4u);
    let upper_eighth = (thread & (KEY_THREADS / 8u)) != 0u;
    var sum = select(pair.x, pair.y, upper_eighth) + subgroupShuffleXor(select(pair.y, pair.x, upper_eighth), KEY_THREADS / 8u);
    if (KEY_THREADS > 8u) { sum += subgroupShuffleXor(sum, KEY_THREADS / 16u); }
    if (KEY_THREADS > 16u) { sum += subgroupShuffleXor(sum, KEY_THREADS / 32u); }
    return sum;
}
