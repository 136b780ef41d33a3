// Sums over LANES neighbouring threads, a power of two up to 16 that divides a subgroup. All threads of a workgroup call them
// together.
// implements: @pair_sum
// constants: LANES

fn lanes_begin(index: u32) {}

fn lanes_sum(x: vec2<f32>) -> vec2<f32> {
    var sum = x;
    // Step by step: compilers do not unroll a loop of doublings, and then one sum waits for another.
    if (LANES > 1u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 1u), subgroupShuffleXor(sum.y, 1u)); }
    if (LANES > 2u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 2u), subgroupShuffleXor(sum.y, 2u)); }
    if (LANES > 4u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 4u), subgroupShuffleXor(sum.y, 4u)); }
    if (LANES > 8u) { sum += vec2<f32>(subgroupShuffleXor(sum.x, 8u), subgroupShuffleXor(sum.y, 8u)); }
    return sum;
}
