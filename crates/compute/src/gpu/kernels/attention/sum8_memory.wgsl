// Sums over LANES neighbouring threads, 8 to 32, of eight numbers that each of them has, by way of workgroup memory. Of the
// threads, those from i LANES / 8 on get sum i. All threads of a workgroup call it together.
// implements: @sum8
// needs: @team
// constants: LANES, WG

var<workgroup> eights: array<array<f32, 8>, WG>;

fn sum_of_eight(low: vec4<f32>, high: vec4<f32>) -> f32 {
    workgroupBarrier();
    eights[thread] = array(low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w);
    workgroupBarrier();
    let start = thread / LANES * LANES;
    let which = thread % LANES / (LANES / 8u);
    var sum = 0.0;
    for (var i = 0u; i < LANES; i++) { sum += eights[start + i][which]; }
    return sum;
}
