// Transposed reduction: sums eight values over KEY_THREADS neighbouring threads (8 to 32), through
// workgroup memory. Threads from i KEY_THREADS / 8 on get sum i. All threads of a workgroup call
// this together.
// implements: @sum8
// needs: @team
// constants: KEY_THREADS, WG

var<workgroup> sum8_values: array<array<f32, 8>, WG>;

fn sum8(low: vec4<f32>, high: vec4<f32>) -> f32 {
    workgroupBarrier();
    sum8_values[thread] = array(low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w);
    workgroupBarrier();
    let start = thread / KEY_THREADS * KEY_THREADS;
    let sum_index = thread % KEY_THREADS / (KEY_THREADS / 8u);
    var sum = 0.0;
    for (var i = 0u; i < KEY_THREADS; i++) { sum += sum8_values[start + i][sum_index]; }
    return sum;
}
