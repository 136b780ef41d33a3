// Top-KEEP of the logits of a row, on ties the lower ids, level by level: a workgroup keeps the
// best of up to WG THREAD_VALUES candidates, which are logits (FIRST_LEVEL) or the results of the
// previous level. LAST_LEVEL sorts them.
// Radix select: the threshold is found digit by digit, from counts of the keys that agree so far;
// first among the maxima of the threads, below which nothing is kept, so few keys are left to
// count. On ties at the threshold, a second search finds the largest id. The order of candidates
// is undefined until the last level; the set is not.
// Grid: a workgroup of WG threads for each row and each WG THREAD_VALUES of its `count`
// candidates.
// needs: common/common, common/sort_key
// constants: FIRST_LEVEL, KEEP, LAST_LEVEL, THREAD_VALUES, WG

struct Params {
    logits: View, best: View,
    rows: u32, width: u32, count: u32, segments: u32, src: u32, dst: u32,
}
var<immediate> p: Params;
// Word 1: the complement of the first row that has a NaN.
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;
// Sort keys and ids.
@group(0) @binding(2) var<storage, read_write> candidates: array<vec2<u32>>;

// Bits of a digit, and number of searches.
const DIGIT_BITS = 4u;
const DIGITS = 1u << DIGIT_BITS;
const SEARCHES = 3u;

var<workgroup> kept: array<vec2<u32>, KEEP>;
var<workgroup> kept_count: atomic<u32>;
// Histogram of digits, by search, digit position and digit.
var<workgroup> counts: array<atomic<u32>, SEARCHES * 32u / DIGIT_BITS * DIGITS>;
// Keys of this thread to search; zeros are none.
var<private> searched: array<u32, THREAD_VALUES>;
// Whether more keys equal the threshold than are wanted.
var<private> has_ties: bool;

// The `wanted`th largest key of all threads; 1 if there are no more than `wanted`.
fn nth_largest(wanted: u32, search: u32) -> u32 {
    var threshold = 0u;
    var remaining = wanted;
    has_ties = false;
    for (var digit_index = 32u / DIGIT_BITS; digit_index > 0u; digit_index--) {
        let shift = (digit_index - 1u) * DIGIT_BITS;
        let at = (search * (32u / DIGIT_BITS) + digit_index - 1u) * DIGITS;
        for (var i = 0u; i < THREAD_VALUES; i++) {
            let x = searched[i];
            // In two steps, as a shift by 32 is undefined.
            if (x != 0u && (((x ^ threshold) >> shift) >> DIGIT_BITS) == 0u) {
                atomicAdd(&counts[at + ((x >> shift) & (DIGITS - 1u))], 1u);
            }
        }
        workgroupBarrier();
        var digit = DIGITS;
        var with_digit = 0u;
        var higher = 0u;
        while (digit > 0u && higher + with_digit < remaining) {
            digit--;
            higher += with_digit;
            with_digit = atomicLoad(&counts[at + digit]);
        }
        if (higher + with_digit < remaining) { return 1u; }
        threshold |= digit << shift;
        remaining -= higher;
        // All keys with this digit are wanted.
        if (with_digit == remaining) { return max(threshold, 1u); }
    }
    has_ties = true;
    return threshold;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let row = group / p.segments;
    if (row >= p.rows) { return; }
    let first = group % p.segments * (WG * THREAD_VALUES);
    let logits = p.logits.offset + row * p.logits.row_stride;
    var keys: array<u32, THREAD_VALUES>;
    var ids: array<u32, THREAD_VALUES>;
    var largest = 0u;
    var has_nan = false;
    for (var i = 0u; i < THREAD_VALUES; i++) {
        let at = first + i * WG + index;
        keys[i] = NO_KEY;
        ids[i] = 0xffffffffu;
        if (at < p.count) {
            if (FIRST_LEVEL == 1u) {
                let x = act[logits + at];
                has_nan = has_nan || is_nan(x);
                keys[i] = sort_key(x);
                ids[i] = at;
            } else {
                let previous = candidates[p.src + row * p.count + at];
                keys[i] = previous.x;
                ids[i] = previous.y;
            }
        }
        largest = max(largest, keys[i]);
        searched[i] = 0u;
    }
    if (has_nan) { atomicMax(&report[1], ~row); }
    if (index == 0u) { atomicStore(&kept_count, 0u); }
    for (var i = index; i < SEARCHES * 32u / DIGIT_BITS * DIGITS; i += WG) { atomicStore(&counts[i], 0u); }
    for (var i = index; i < KEEP; i += WG) { kept[i] = vec2<u32>(NO_KEY, 0xffffffffu); }
    workgroupBarrier();

    var threshold = 1u;
    if (KEEP <= WG) {
        searched[0] = largest;
        threshold = nth_largest(KEEP, 0u);
    }
    for (var i = 0u; i < THREAD_VALUES; i++) { searched[i] = select(0u, keys[i], keys[i] >= threshold); }
    threshold = max(threshold, nth_largest(KEEP, 1u));
    var id_threshold = 0u;
    if (has_ties) {
        // Of equal keys, those with the lowest ids are kept: their complements are the
        // largest.
        var above = 0u;
        for (var digit = 0u; digit < 32u / DIGIT_BITS * DIGITS; digit++) {
            let shift = digit / DIGITS * DIGIT_BITS;
            let threshold_digit = (threshold >> shift) & (DIGITS - 1u);
            if (digit % DIGITS > threshold_digit) { above += atomicLoad(&counts[32u / DIGIT_BITS * DIGITS + digit]); }
        }
        for (var i = 0u; i < THREAD_VALUES; i++) { searched[i] = select(0u, ~ids[i], keys[i] == threshold); }
        id_threshold = nth_largest(KEEP - above, 2u);
    }
    for (var i = 0u; i < THREAD_VALUES; i++) {
        let is_kept = keys[i] > threshold || (keys[i] == threshold && ~ids[i] >= id_threshold);
        if (is_kept && keys[i] != NO_KEY) { kept[atomicAdd(&kept_count, 1u)] = vec2<u32>(keys[i], ids[i]); }
    }
    workgroupBarrier();
    for (var i = index; i < KEEP; i += WG) {
        let candidate = kept[i];
        if (LAST_LEVEL == 0u) {
            candidates[p.dst + group * KEEP + i] = candidate;
        } else {
            var rank = 0u;
            for (var j = 0u; j < KEEP; j++) {
                let other = kept[j];
                rank += select(0u, 1u, other.x > candidate.x || (other.x == candidate.x && other.y < candidate.y));
            }
            if (candidate.y < p.width) {
                let at = p.best.offset + row * p.best.row_stride + rank;
                act[at] = f32(candidate.y);
                act[at + KEEP] = act[logits + candidate.y];
            }
        }
    }
}
