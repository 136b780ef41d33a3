// Names the `n` positions with the highest scores, in ascending order; of equal scores the later position is taken first.
// Where a row sees no more than `n`, all of them, then -1.
// The lowest score that is taken is found digit by digit, from counts of the scores that agree so far; then each thread
// counts what is taken among neighbouring positions of its own, and prefix sums say where it writes.
// WG: 256. Grid: a workgroup for each row.
// needs: common/common
// constants: WG

struct Params { scores: View, out: View, rows: u32, position: u32, n: u32 }
var<immediate> p: Params;

var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> sums: array<vec2<u32>, WG>;
var<workgroup> chosen: vec3<u32>;

// A number's place among all, as a whole number; zeros of both signs are equal.
fn order(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits == 0x80000000u) { return bits; }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

// Sums over this and all threads before it.
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
    let seen = p.position + row + 1u;
    let out = p.out.at + row * p.out.row;
    if (seen <= p.n) {
        for (var i = index; i < p.n; i += WG) { a[out + i] = select(-1.0, f32(i), i < seen); }
        return;
    }
    let scores = p.scores.at + row * p.scores.row;
    var least = 0u;
    var wanted = p.n;
    var surplus = 0u;
    for (var shift = 24u; shift < 32u; shift -= 8u) {
        atomicStore(&counts[index], 0u);
        workgroupBarrier();
        for (var i = index; i < seen; i += WG) {
            let x = order(a[scores + i]);
            // What is above the digit agrees; nothing is above the first.
            if (((x ^ least) >> shift) < 256u) { atomicAdd(&counts[(x >> shift) & 255u], 1u); }
        }
        workgroupBarrier();
        // Scores with this digit or a higher one: thread 0 looks at the highest.
        let digit = 255u - index;
        let of_digit = atomicLoad(&counts[digit]);
        let up_to = prefix_sum(index, vec2(of_digit, 0u)).x;
        if (up_to >= wanted && up_to - of_digit < wanted) {
            chosen = vec3(digit, wanted - (up_to - of_digit), up_to - wanted);
        }
        workgroupBarrier();
        least |= chosen.x << shift;
        wanted = chosen.y;
        surplus = chosen.z;
        workgroupBarrier();
    }
    // Of scores equal to the lowest, the first `surplus` ones are not taken.
    let share = (seen + WG - 1u) / WG;
    let begin = min(seen, index * share);
    let end = min(seen, begin + share);
    var mine = vec2<u32>();
    for (var i = begin; i < end; i++) {
        let x = order(a[scores + i]);
        mine += select(vec2<u32>(), vec2(1u, 0u), x > least);
        mine += select(vec2<u32>(), vec2(0u, 1u), x == least);
    }
    let before = prefix_sum(index, mine) - mine;
    var equal = before.y;
    var at = before.x + max(equal, surplus) - surplus;
    for (var i = begin; i < end; i++) {
        let x = order(a[scores + i]);
        var taken = x > least;
        if (x == least) {
            taken = equal >= surplus;
            equal += 1u;
        }
        if (taken) {
            a[out + at] = f32(i);
            at += 1u;
        }
    }
}
