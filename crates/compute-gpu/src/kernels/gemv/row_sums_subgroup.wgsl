// Reduction of ROWS sums over ROW_THREADS neighbouring threads of a subgroup. All threads of a
// workgroup call this together.
// implements: @row_sums
// needs: @team
// constants: ROWS, ROW_THREADS

fn sum_row_threads(x: vec4<f32>) -> vec4<f32> {
    if (ROWS == 1u) {
        var sum = x.x;
        for (var distance = ROW_THREADS / 2u; distance > 0u; distance /= 2u) { sum += subgroupShuffleXor(sum, distance); }
        return vec4<f32>(sum, 0.0, 0.0, 0.0);
    }
    if (ROWS == 2u) {
        var sum = x.xy;
        for (var distance = ROW_THREADS / 2u; distance > 0u; distance /= 2u) { sum += subgroupShuffleXor(sum, distance); }
        return vec4<f32>(sum, 0.0, 0.0);
    }
    var sum = x;
    for (var distance = ROW_THREADS / 2u; distance > 0u; distance /= 2u) { sum += subgroupShuffleXor(sum, distance); }
    return sum;
}
