// Lightning indexer, selection: lists of the `top_k` entries with the highest scores, in ascending
// order. On ties the later entry wins. A row at position p sees (p + 1) / ratio entries; with at
// most `top_k` of them it selects all, and reads no scores.
// A list without a window has the positions of its entries, then those after the last visible
// entry, up to p. A list with a window has the last `window` positions, modulo `ring`, then the
// entries, numbered from `ring` on. Then -1, up to `width` numbers.
// Radix select: the threshold is found digit by digit, from counts of the scores that agree so
// far. Then each thread counts the selected positions of its range, and prefix sums give the
// places to write to.
// The positions of the rows are in `words`, from offset `table` on.
// WG: 256. Grid: a workgroup for each row.
// needs: common/common
// constants: WG

struct Params {
    scores: View, out: View,
    rows: u32, table: u32, width: u32, ratio: u32, top_k: u32, window: u32, ring: u32,
}
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
    let position = words[p.table + row];
    let visible = (position + 1u) / p.ratio;
    let chosen = min(visible, p.top_k);
    let out = p.out.offset + row * p.out.row_stride;
    // Numbers before the entries, numbers of an entry, number of entry 0.
    let recent = min(p.window, position + 1u);
    let each = select(1u, p.ratio, p.window == 0u);
    let base = select(p.ring, 0u, p.window == 0u);
    // Positions after the last visible entry, and where they are in the list.
    let open = select(0u, (position + 1u) % p.ratio, p.window == 0u);
    let tail = recent + chosen * each;
    for (var i = index; i < p.width; i += WG) {
        var number = -1.0;
        if (i < recent) {
            number = f32((position + 1u - recent + i) % p.ring);
        } else if (i < tail) {
            // All entries; otherwise they are selected below.
            if (visible > p.top_k) { continue; }
            number = f32(base + i - recent);
        } else if (i - tail < open) {
            number = f32(visible * p.ratio + i - tail);
        }
        act[out + i] = number;
    }
    if (visible <= p.top_k) { return; }
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
            for (var j = 0u; j < each; j++) {
                act[out + recent + place * each + j] = f32(base + i * each + j);
            }
            place += 1u;
        }
    }
}
