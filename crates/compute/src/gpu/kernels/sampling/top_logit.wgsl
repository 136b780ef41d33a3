// The largest of the numbers of a row, of equal ones that with the lowest id, level by level: a workgroup keeps the best of at
// most WG PER numbers, which are logits (FIRST) or what the level before kept. The workgroup of the LAST level writes it.
// Grid: a workgroup of WG threads, a multiple of FOLD, for each row and each WG PER of its `count` numbers.
// needs: common/common, common/sort_key
// constants: FIRST, LAST, PER, WG

struct Params {
    logits: View, best: View,
    rows: u32, width: u32, count: u32, segments: u32, take: u32, put: u32,
}
var<immediate> p: Params;
// Word 1: the complement of the first row that has a NaN.
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;
// Keys and ids.
@group(0) @binding(2) var<storage, read_write> candidates: array<vec2<u32>>;

// Threads that fold those of all threads, before one folds theirs.
const FOLD = 16u;

var<workgroup> of_threads: array<vec2<u32>, WG>;
var<workgroup> of_some: array<vec2<u32>, FOLD>;

fn better(x: vec2<u32>, y: vec2<u32>) -> vec2<u32> {
    return select(x, y, y.x > x.x || (y.x == x.x && y.y < x.y));
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
    let first = group % p.segments * (WG * PER) + index;
    let logits = p.logits.at + row * p.logits.row;
    var best = vec2<u32>(NO_KEY, 0xffffffffu);
    var wrong = false;
    for (var i = 0u; i < PER; i++) {
        let at = first + i * WG;
        if (at < p.count) {
            if (FIRST == 1u) {
                let x = a[logits + at];
                wrong = wrong || is_nan(x);
                best = better(best, vec2<u32>(key_of(x), at));
            } else {
                best = better(best, candidates[p.take + row * p.count + at]);
            }
        }
    }
    if (wrong) { atomicMax(&report[1], ~row); }
    of_threads[index] = best;
    workgroupBarrier();
    if (index < FOLD) {
        for (var i = index + FOLD; i < WG; i += FOLD) { best = better(best, of_threads[i]); }
        of_some[index] = best;
    }
    workgroupBarrier();
    if (index > 0u) { return; }
    for (var i = 1u; i < FOLD; i++) { best = better(best, of_some[i]); }
    if (LAST == 0u) {
        candidates[p.put + group] = best;
    } else {
        let at = p.best.at + row * p.best.row;
        a[at] = f32(best.y);
        a[at + 1u] = a[logits + best.y];
    }
}
