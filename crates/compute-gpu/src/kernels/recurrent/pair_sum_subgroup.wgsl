// Sums of pairs over ROW_THREADS neighbouring threads, a power of two up to 16 that divides a
// subgroup. All threads of a workgroup call this together.
// implements: @pair_sum
// constants: ROW_THREADS

fn pair_sum_begin(index: u32) {}

fn pair_sum(x: vec2<f32>) -> vec2<f32> {
    var sum = x;
    // Written out: compilers do not unroll a loop of doublings, and then each sum waits for
    // the one before.
    if (ROW_THREADS > 1u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 1u), subgroupShuffleXor(sum.y, 1u)); }
    if (ROW_THREADS > 2u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 2u), subgroupShuffleXor(sum.y, 2u)); }
    if (ROW_THREADS > 4u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 4u), subgroupShuffleXor(sum.y, 4u)); }
    if (ROW_THREADS > 8u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 8u), subgroupShuffleXor(sum.y, 8u)); }
    return sum;
}
