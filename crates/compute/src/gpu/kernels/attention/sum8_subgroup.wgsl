// Sums over LANES neighbouring threads of a subgroup, 8 to 32, of eight numbers that each of them has. Of the threads, those
// from i LANES / 8 on get sum i. All threads of a workgroup call it together.
// implements: @sum8
// needs: @team
// constants: LANES

fn sum_of_eight(low: vec4<f32>, high: vec4<f32>) -> f32 {
    // Each step halves the numbers: a thread passes on those that it does not sum.
    let one = (thread & (LANES / 2u)) != 0u;
    let four = select(low, high, one) + subgroupShuffleXor(select(high, low, one), LANES / 2u);
    let two = (thread & (LANES / 4u)) != 0u;
    let pair = select(four.xy, four.zw, two) + subgroupShuffleXor(select(four.zw, four.xy, two), LANES / 4u);
    let three = (thread & (LANES / 8u)) != 0u;
    var sum = select(pair.x, pair.y, three) + subgroupShuffleXor(select(pair.y, pair.x, three), LANES / 8u);
    if (LANES > 8u) { sum += subgroupShuffleXor(sum, LANES / 16u); }
    if (LANES > 16u) { sum += subgroupShuffleXor(sum, LANES / 32u); }
    return sum;
}
