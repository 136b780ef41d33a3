// Sums over LANES neighbouring threads by way of workgroup memory, for adapters without subgroups. All threads of a
// workgroup call them together.
// implements: @pair_sum
// constants: LANES, WG

var<workgroup> lane_numbers: array<vec2<f32>, WG>;
var<private> lanes_thread: u32;

fn lanes_begin(index: u32) {
    lanes_thread = index;
}

fn lanes_sum(x: vec2<f32>) -> vec2<f32> {
    workgroupBarrier();
    lane_numbers[lanes_thread] = x;
    workgroupBarrier();
    let first = lanes_thread / LANES * LANES;
    var sum = vec2<f32>(0.0);
    for (var i = 0u; i < LANES; i++) { sum += lane_numbers[first + i]; }
    return sum;
}
