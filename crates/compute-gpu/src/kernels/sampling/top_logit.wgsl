// Argmax over the logits of a row, on ties the lowest id, level by level: a workgroup reduces up
// to WG THREAD_VALUES candidates, which are logits (FIRST_LEVEL) or the results of the previous
// level. LAST_LEVEL writes the result.
// Grid: a workgroup of WG threads, a multiple of FOLD, for each row and each WG THREAD_VALUES of
// its `count` candidates.
// needs: common/common, common/sort_key
// constants: FIRST_LEVEL, LAST_LEVEL, THREAD_VALUES, WG

struct Params {
    logits: View, best: View,
    rows: u32, width: u32, count: u32, segments: u32, src: u32, dst: u32,
}
var<immediate> p: Params;
// Word 1: the complement of the first row that has a NaN.
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;
// Sort keys and ids.
@group(0) @binding(2) var<storage, read_write> candidates: array<vec2<u32>>;

// Threads that fold the results of all threads, before one folds theirs.
const FOLD = 16u;

var<workgroup> thread_best: array<vec2<u32>, WG>;
var<workgroup> folded: array<vec2<u32>, FOLD>;

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
    let first = group % p.segments * (WG * THREAD_VALUES) + index;
    let logits = p.logits.offset + row * p.logits.row_stride;
    var best = vec2<u32>(NO_KEY, 0xffffffffu);
    var has_nan = false;
    for (var i = 0u; i < THREAD_VALUES; i++) {
        let at = first + i * WG;
        if (at < p.count) {
            if (FIRST_LEVEL == 1u) {
                let x = act[logits + at];
                has_nan = has_nan || is_nan(x);
                best = better(best, vec2<u32>(sort_key(x), at));
            } else {
                best = better(best, candidates[p.src + row * p.count + at]);
            }
        }
    }
    if (has_nan) { atomicMax(&report[1], ~row); }
    thread_best[index] = best;
    workgroupBarrier();
    if (index < FOLD) {
        for (var i = index + FOLD; i < WG; i += FOLD) { best = better(best, thread_best[i]); }
        folded[index] = best;
    }
    workgroupBarrier();
    if (index > 0u) { return; }
    for (var i = 1u; i < FOLD; i++) { best = better(best, folded[i]); }
    if (LAST_LEVEL == 0u) {
        candidates[p.dst + group] = best;
    } else {
        let at = p.best.offset + row * p.best.row_stride;
        act[at] = f32(best.y);
        act[at + 1u] = act[logits + best.y];
    }
}
