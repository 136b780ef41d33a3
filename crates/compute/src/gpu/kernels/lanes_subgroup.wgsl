// Sums over LANES neighbouring threads, a power of two that divides a subgroup. All threads of a workgroup call them together.

fn lanes_begin(index: u32) {}

fn lanes_sum(x: vec2<f32>) -> vec2<f32> {
    var sum = x;
    for (var far = 1u; far < LANES; far *= 2u) {
        sum += vec2<f32>(subgroupShuffleXor(sum.x, far), subgroupShuffleXor(sum.y, far));
    }
    return sum;
}
