// Lightning indexer, selection: the `top_k` positions with the highest scores, in ascending order.
// On ties the later position wins. Rows that see at most `top_k` positions select all of them,
// then -1.
// Radix select: the threshold is found digit by digit, from counts of the scores that agree so
// far. Then each thread counts the selected positions of its range, and prefix sums give the
// places to write to.
// WG: 256. Grid: a workgroup for each row.
// needs: common/common, attention/row_table
// constants: WG

struct Params { scores: View, out: View, rows: u32, table: u32, top_k: u32 }
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;

var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> sums: array<vec2<u32>, WG>;
var<workgroup> selected_digit: vec3<u32>;

// Order-preserving integer key of a float; both zeros are equal.
fn sort_key(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits == 0x80000000u) { return bits; }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

// Inclusive prefix sum over the threads.
fn prefix_sum(index: u32, x: vec2<u32>) -> vec2<u32> {
    var sum = x;
    for (var step = 1u; step < WG; step *= 2u) {
        sums[index] = sum;
        workgroupBarrier();
        if (index >= step) { sum += sums[index - step]; }
        workgroupBarrier();
    }
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
    let visible = row_position(p.table, row) + 1u;
    let out = p.out.offset + row * p.out.row_stride;
    if (visible <= p.top_k) {
        for (var i = index; i < p.top_k; i += WG) { act[out + i] = select(-1.0, f32(i), i < visible); }
        return;
    }
    let scores = p.scores.offset + row * p.scores.row_stride;
    var threshold = 0u;
    var wanted = p.top_k;
    var surplus = 0u;
    for (var shift = 24u; shift < 32u; shift -= 8u) {
        atomicStore(&counts[index], 0u);
        workgroupBarrier();
        for (var i = index; i < visible; i += WG) {
            let x = sort_key(act[scores + i]);
            // Digits above this one agree; the first digit has none above.
            if (((x ^ threshold) >> shift) < 256u) { atomicAdd(&counts[(x >> shift) & 255u], 1u); }
        }
        workgroupBarrier();
        // Scores with this digit or a higher one: thread 0 has the highest digit.
        let digit = 255u - index;
        let with_digit = atomicLoad(&counts[digit]);
        let up_to = prefix_sum(index, vec2(with_digit, 0u)).x;
        if (up_to >= wanted && up_to - with_digit < wanted) {
            selected_digit = vec3(digit, wanted - (up_to - with_digit), up_to - wanted);
        }
        workgroupBarrier();
        threshold |= selected_digit.x << shift;
        wanted = selected_digit.y;
        surplus = selected_digit.z;
        workgroupBarrier();
    }
    // Of the scores equal to the threshold, the first `surplus` are not selected.
    let per_thread = (visible + WG - 1u) / WG;
    let start = min(visible, index * per_thread);
    let end = min(visible, start + per_thread);
    var thread_counts = vec2<u32>();
    for (var i = start; i < end; i++) {
        let x = sort_key(act[scores + i]);
        thread_counts += select(vec2<u32>(), vec2(1u, 0u), x > threshold);
        thread_counts += select(vec2<u32>(), vec2(0u, 1u), x == threshold);
    }
    let counts_before = prefix_sum(index, thread_counts) - thread_counts;
    var equal = counts_before.y;
    var place = counts_before.x + max(equal, surplus) - surplus;
    for (var i = start; i < end; i++) {
        let x = sort_key(act[scores + i]);
        var is_selected = x > threshold;
        if (x == threshold) {
            is_selected = equal >= surplus;
            equal += 1u;
        }
        if (is_selected) {
            act[out + place] = f32(i);
            place += 1u;
        }
    }
}
