// Mixing weights of a residual of STREAMS streams from their logits, in place: pre, post, and a
// matrix that Sinkhorn's iteration makes doubly stochastic. MATRIX: 1 if there are post and matrix.
// Grid: a workgroup of WG threads, at least one for each element of the matrix, for each row.
// needs: common/common
// constants: MATRIX, STREAMS, WG

struct Params { logits: View, scale: u32, base: u32, rows: u32, iterations: u32, eps: f32 }
var<immediate> p: Params;
const ELEMENTS = STREAMS * STREAMS;
var<workgroup> elements: array<f32, ELEMENTS>;

fn logit(row: u32, i: u32) -> f32 {
    let part = min(i / STREAMS, 2u);
    return act[p.logits.offset + row * p.logits.row_stride + i] * act[p.scale + part] + act[p.base + i];
}

// Sum of STREAMS elements from `first` on.
fn sum_of(first: u32, stride: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < STREAMS; i++) { sum += elements[first + i * stride]; }
    return sum;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let row = group_index(id, count);
    if (row >= p.rows) { return; }
    let out = p.logits.offset + row * p.logits.row_stride;
    if (index < STREAMS) {
        act[out + index] = sigmoid(logit(row, index)) + p.eps;
        if (MATRIX == 1u) {
            act[out + STREAMS + index] = 2.0 * sigmoid(logit(row, STREAMS + index));
        }
    }
    if (MATRIX == 0u) { return; }
    let element = min(index, ELEMENTS - 1u);
    let first_of_row = element / STREAMS * STREAMS;
    var value = logit(row, 2u * STREAMS + element);
    elements[element] = value;
    workgroupBarrier();
    var largest = elements[first_of_row];
    for (var i = 1u; i < STREAMS; i++) { largest = max(largest, elements[first_of_row + i]); }
    workgroupBarrier();
    value = exp(value - largest);
    elements[element] = value;
    workgroupBarrier();
    value = value / sum_of(first_of_row, 1u) + p.eps;
    for (var i = 0u; i < p.iterations; i++) {
        if (i > 0u) {
            workgroupBarrier();
            elements[element] = value;
            workgroupBarrier();
            value /= sum_of(first_of_row, 1u) + p.eps;
        }
        workgroupBarrier();
        elements[element] = value;
        workgroupBarrier();
        value /= sum_of(element % STREAMS, STREAMS) + p.eps;
    }
    if (index < ELEMENTS) { act[out + 2u * STREAMS + index] = value; }
}
