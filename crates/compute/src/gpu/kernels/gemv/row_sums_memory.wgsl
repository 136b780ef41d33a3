// ROWS sums over parts of PART neighbouring threads of a team: behind team_memory.wgsl. All threads of a workgroup call them together.
// implements: @row_sums
// needs: @team
// constants: PART, WG

var<workgroup> part_vectors: array<vec4<f32>, WG>;

fn part_sum(x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    part_vectors[thread] = x;
    for (var half = PART / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread % PART < half) { part_vectors[thread] += part_vectors[thread + half]; }
    }
    workgroupBarrier();
    return part_vectors[thread / PART * PART];
}
