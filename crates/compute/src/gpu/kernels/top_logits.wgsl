// The KEEP largest of the numbers of a row, of equal ones those with the lower ids, level by level: a workgroup keeps the
// best of at most WG PER numbers, which are logits (FIRST) or what the level before kept. The workgroup of the LAST level
// puts them in order.
//
// The least key that is kept is found bit by bit, from counts; where there are more as large as it than are wanted, so is the
// bound of the ids. Which candidate lies where is undefined until the last level; which there are is not.
// Grid: a workgroup of WG threads for each row and each WG PER of its `count` numbers.

struct Params {
    logits: View, ids: View, values: View,
    rows: u32, width: u32, count: u32, segments: u32, take: u32, put: u32,
}
var<immediate> p: Params;
// Word 1: the complement of the first row that has a NaN.
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;
// Keys and ids.
@group(0) @binding(2) var<storage, read_write> candidates: array<vec2<u32>>;

var<workgroup> kept: array<vec2<u32>, KEEP>;
var<workgroup> places: atomic<u32>;
var<private> keys: array<u32, PER>;
var<private> ids: array<u32, PER>;

// Numbers whose key is at least `least`.
fn count_from(least: u32) -> u32 {
    var count = 0u;
    for (var i = 0u; i < PER; i++) { count += select(0u, 1u, keys[i] >= least); }
    return u32(group_sum(f32(count)));
}

// Numbers of such a key with an id below `bound`.
fn count_below(key: u32, bound: u32) -> u32 {
    var count = 0u;
    for (var i = 0u; i < PER; i++) { count += select(0u, 1u, keys[i] == key && ids[i] < bound); }
    return u32(group_sum(f32(count)));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let row = group / p.segments;
    if (row >= p.rows) { return; }
    let first = group % p.segments * (WG * PER);
    let logits = p.logits.at + row * p.logits.row;
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
    }
    if (wrong) { atomicMax(&report[1], ~row); }
    if (index == 0u) { atomicStore(&places, 0u); }
    for (var i = index; i < KEEP; i += WG) { kept[i] = vec2<u32>(NO_KEY, 0xffffffffu); }

    var least = NO_KEY + 1u;
    var bound = 0xffffffffu;
    if (count_from(least) > KEEP) {
        least = 0u;
        var found = 0u;
        for (var bit = 0x80000000u; bit > 0u && found != KEEP; bit >>= 1u) {
            let n = count_from(least | bit);
            if (n >= KEEP) {
                least |= bit;
                found = n;
            }
        }
        if (found != KEEP) {
            let wanted = KEEP - count_from(least + 1u);
            bound = 0u;
            for (var bit = 1u << 23u; bit > 0u; bit >>= 1u) {
                if (count_below(least, bound | bit) <= wanted) { bound |= bit; }
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < PER; i++) {
        if (keys[i] > least || (keys[i] == least && ids[i] < bound)) {
            kept[atomicAdd(&places, 1u)] = vec2<u32>(keys[i], ids[i]);
        }
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
                a[p.ids.at + row * p.ids.row + rank] = f32(own.y);
                a[p.values.at + row * p.values.row + rank] = a[logits + own.y];
            }
        }
    }
}
