// ROWS sums over parts of PART neighbouring threads of a team: behind team_subgroup.wgsl. All threads of a workgroup call them
// together.
// implements: @row_sums
// needs: @team
// constants: PART, ROWS

fn part_sum(x: vec4<f32>) -> vec4<f32> {
    if (ROWS == 1u) {
        var sum = x.x;
        for (var d = PART / 2u; d > 0u; d /= 2u) { sum += subgroupShuffleXor(sum, d); }
        return vec4<f32>(sum, 0.0, 0.0, 0.0);
    }
    if (ROWS == 2u) {
        var sum = x.xy;
        for (var d = PART / 2u; d > 0u; d /= 2u) { sum += subgroupShuffleXor(sum, d); }
        return vec4<f32>(sum, 0.0, 0.0);
    }
    var sum = x;
    for (var d = PART / 2u; d > 0u; d /= 2u) { sum += subgroupShuffleXor(sum, d); }
    return sum;
}
