// Reduction of ROWS sums over ROW_THREADS neighbouring threads of a team, through workgroup
// memory. All threads of a workgroup call this together.
// implements: @row_sums
// needs: @team
// constants: ROW_THREADS, WG

var<workgroup> row_partials: array<vec4<f32>, WG>;

fn sum_row_threads(x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    row_partials[thread] = x;
    for (var distance = ROW_THREADS / 2u; distance > 0u; distance /= 2u) {
        workgroupBarrier();
        if (thread % ROW_THREADS < distance) { row_partials[thread] += row_partials[thread + distance]; }
    }
    workgroupBarrier();
    return row_partials[thread / ROW_THREADS * ROW_THREADS];
}
