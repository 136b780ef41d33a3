// The KEEP largest of the numbers of a row, of equal ones those with the lower ids, level by level: a workgroup keeps the
// best of at most WG PER numbers, which are logits (FIRST) or what the level before kept. The workgroup of the LAST level
// puts them in order.
//
// The least key that is kept is found digit by digit, from counts of the keys that agree so far: first among the largest
// keys of the threads, below which nothing is kept, so that few are left to be counted. Where more are as large as it than
// are wanted, so is the largest id. Which candidate lies where is undefined until the last level; which there are is not.
// Grid: a workgroup of WG threads for each row and each WG PER of its `count` numbers.
// needs: common/common, common/sort_key
// constants: FIRST, KEEP, LAST, PER, WG

struct Params {
    logits: View, best: View,
    rows: u32, width: u32, count: u32, segments: u32, take: u32, put: u32,
}
var<immediate> p: Params;
// Word 1: the complement of the first row that has a NaN.
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;
// Keys and ids.
@group(0) @binding(2) var<storage, read_write> candidates: array<vec2<u32>>;

// Bits of a digit, and numbers that are looked for.
const DIGIT = 4u;
const DIGITS = 1u << DIGIT;
const LOOKED_FOR = 3u;

var<workgroup> kept: array<vec2<u32>, KEEP>;
var<workgroup> places: atomic<u32>;
// How many numbers have which digit: by number that is looked for, place and digit.
var<workgroup> counts: array<atomic<u32>, LOOKED_FOR * 32u / DIGIT * DIGITS>;
// What a number is looked for among; zeros are none.
var<private> among: array<u32, PER>;
// Whether there are more such numbers than were wanted.
var<private> too_many: bool;

// The `wanted`th largest of all threads' numbers; 1 if there are no more than so many.
fn least_of(wanted: u32, looked_for: u32) -> u32 {
    var least = 0u;
    var left = wanted;
    too_many = false;
    for (var place = 32u / DIGIT; place > 0u; place--) {
        let shift = (place - 1u) * DIGIT;
        let at = (looked_for * (32u / DIGIT) + place - 1u) * DIGITS;
        for (var i = 0u; i < PER; i++) {
            let x = among[i];
            // In two steps, because no shift goes by 32.
            if (x != 0u && (((x ^ least) >> shift) >> DIGIT) == 0u) {
                atomicAdd(&counts[at + ((x >> shift) & (DIGITS - 1u))], 1u);
            }
        }
        workgroupBarrier();
        var digit = DIGITS;
        var of_digit = 0u;
        var before = 0u;
        while (digit > 0u && before + of_digit < left) {
            digit--;
            before += of_digit;
            of_digit = atomicLoad(&counts[at + digit]);
        }
        if (before + of_digit < left) { return 1u; }
        least |= digit << shift;
        left -= before;
        // All that have this digit are wanted.
        if (of_digit == left) { return max(least, 1u); }
    }
    too_many = true;
    return least;
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
    let first = group % p.segments * (WG * PER);
    let logits = p.logits.at + row * p.logits.row;
    var keys: array<u32, PER>;
    var ids: array<u32, PER>;
    var largest = 0u;
    var wrong = false;
    for (var i = 0u; i < PER; i++) {
        let at = first + i * WG + index;
        keys[i] = NO_KEY;
        ids[i] = 0xffffffffu;
        if (at < p.count) {
            if (FIRST == 1u) {
                let x = a[logits + at];
                wrong = wrong || is_nan(x);
                keys[i] = key_of(x);
                ids[i] = at;
            } else {
                let candidate = candidates[p.take + row * p.count + at];
                keys[i] = candidate.x;
                ids[i] = candidate.y;
            }
        }
        largest = max(largest, keys[i]);
        among[i] = 0u;
    }
    if (wrong) { atomicMax(&report[1], ~row); }
    if (index == 0u) { atomicStore(&places, 0u); }
    for (var i = index; i < LOOKED_FOR * 32u / DIGIT * DIGITS; i += WG) { atomicStore(&counts[i], 0u); }
    for (var i = index; i < KEEP; i += WG) { kept[i] = vec2<u32>(NO_KEY, 0xffffffffu); }
    workgroupBarrier();

    var least = 1u;
    if (KEEP <= WG) {
        among[0] = largest;
        least = least_of(KEEP, 0u);
    }
    for (var i = 0u; i < PER; i++) { among[i] = select(0u, keys[i], keys[i] >= least); }
    least = max(least, least_of(KEEP, 1u));
    var least_place = 0u;
    if (too_many) {
        // As many of equal keys as are wanted: those with the lowest ids, whose complements are the largest.
        var larger = 0u;
        for (var digit = 0u; digit < 32u / DIGIT * DIGITS; digit++) {
            let place = digit / DIGITS * DIGIT;
            let own = (least >> place) & (DIGITS - 1u);
            if (digit % DIGITS > own) { larger += atomicLoad(&counts[32u / DIGIT * DIGITS + digit]); }
        }
        for (var i = 0u; i < PER; i++) { among[i] = select(0u, ~ids[i], keys[i] == least); }
        least_place = least_of(KEEP - larger, 2u);
    }
    for (var i = 0u; i < PER; i++) {
        let before = keys[i] > least || (keys[i] == least && ~ids[i] >= least_place);
        if (before && keys[i] != NO_KEY) { kept[atomicAdd(&places, 1u)] = vec2<u32>(keys[i], ids[i]); }
    }
    workgroupBarrier();
    for (var i = index; i < KEEP; i += WG) {
        let own = kept[i];
        if (LAST == 0u) {
            candidates[p.put + group * KEEP + i] = own;
        } else {
            var rank = 0u;
            for (var j = 0u; j < KEEP; j++) {
                let other = kept[j];
                rank += select(0u, 1u, other.x > own.x || (other.x == own.x && other.y < own.y));
            }
            if (own.y < p.width) {
                let at = p.best.at + row * p.best.row + rank;
                a[at] = f32(own.y);
                a[at + KEEP] = a[logits + own.y];
            }
        }
    }
}
