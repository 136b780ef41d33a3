// Sums of pairs over ROW_THREADS neighbouring threads, through workgroup memory, for adapters
// without subgroups. All threads of a workgroup call this together.
// implements: @pair_sum
// constants: ROW_THREADS, WG

var<workgroup> pair_values: array<vec2<f32>, WG>;
var<private> pair_thread: u32;

fn pair_sum_begin(index: u32) {
    pair_thread = index;
}

fn pair_sum(x: vec2<f32>) -> vec2<f32> {
    workgroupBarrier();
    pair_values[pair_thread] = x;
    workgroupBarrier();
    let first = pair_thread / ROW_THREADS * ROW_THREADS;
    var sum = vec2<f32>(0.0);
    for (var i = 0u; i < ROW_THREADS; i++) { sum += pair_values[first + i]; }
    return sum;
}
