// Sums over parts of PART neighbouring threads of a team: behind team_subgroup.wgsl. All threads of a workgroup call them together.

fn part_sum(x: vec4<f32>) -> vec4<f32> {
    var sum = x;
    for (var d = PART / 2u; d > 0u; d /= 2u) { sum += subgroupShuffleXor(sum, d); }
    return sum;
}
