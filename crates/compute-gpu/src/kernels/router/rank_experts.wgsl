// Top-k of a router: the TOP_K largest of EXPERTS logits or (corrected) scores of a row, in rank
// order, on ties the lower id first; and their weights.
// A rank is the count of larger keys, so all ranks are found at once: first within blocks of
// SORT_BLOCK, where keys of rank TOP_K or more are dropped, then among the remaining candidates.
// Both keep the order of ids.
// ROUTER_FLAGS: bits for softmax, correction, normalized weights, expert scales, groups that score
// their two best, a sparse mixer of the band with the bits BAND_BITS, square roots of softplus, ids
// that are given in place of the top k, and ranks by the logits. EXPERT_GROUPS: groups of experts,
// of which the best TOP_GROUPS count; 0 for none. SHARED_EXPERT: 1 appends a shared expert, id
// EXPERTS, with weight 1; 2 with the sigmoid of its gate; 0 none.
// Word 0 of `report` is the complement of the first row that has a NaN. All threads of a workgroup
// call these functions together.
// needs: common/common, common/exp_log, common/sort_key, @team, @scratch, router/routing
// constants: BAND_BITS, EXPERTS, EXPERT_GROUPS, ROUTER_FLAGS, SHARED_EXPERT, SORT_BLOCK, TOP_GROUPS
// constants: TOP_K, WG

var<private> max_logit: f32;
var<private> exp_sum: f32;

const SOFTMAX = ROUTER_FLAGS & 1u;
const CORRECTED = ROUTER_FLAGS >> 1u & 1u;
const NORMALIZE = ROUTER_FLAGS >> 2u & 1u;
const SCALED = ROUTER_FLAGS >> 3u & 1u;
const TWO_BEST = ROUTER_FLAGS >> 4u & 1u;
const SPARSE_MIXER = ROUTER_FLAGS >> 5u & 1u;
const SQRT_SOFTPLUS = ROUTER_FLAGS >> 6u & 1u;
const GIVEN = ROUTER_FLAGS >> 7u & 1u;
const BY_LOGIT = ROUTER_FLAGS >> 8u & 1u;
const SORT_BLOCKS = (EXPERTS + SORT_BLOCK - 1u) / SORT_BLOCK;
const BLOCK_TOP = min(TOP_K, SORT_BLOCK);
// Experts of a group.
const GROUP_SIZE = EXPERTS / max(EXPERT_GROUPS, 1u);
const PADDED_EXPERTS = SORT_BLOCKS * SORT_BLOCK;
// Layout of the scratch words; the keys come first. `layout` in Rust counts the same.
const CANDIDATES = PADDED_EXPERTS;
const CANDIDATE_VECS = (SORT_BLOCKS * BLOCK_TOP + 3u) / 4u;
const CANDIDATE_IDS = CANDIDATES + 4u * CANDIDATE_VECS;
const GROUP_KEYS = CANDIDATE_IDS + 4u * CANDIDATE_VECS;
const GROUP_FLAGS = GROUP_KEYS + EXPERT_GROUPS;
const TOP_IDS = GROUP_FLAGS + EXPERT_GROUPS;
const SCORES = TOP_IDS + TOP_K;
const SCRATCH_WORDS = (SCORES + TOP_K + 3u) / 4u * 4u;

// Whether the softmax's sum over all experts is needed.
const FULL_SOFTMAX = SOFTMAX == 1u && (NORMALIZE == 0u || CORRECTED == 1u);

fn logistic(x: f32) -> f32 {
    return 1.0 / (1.0 + exp_of(-x));
}

fn score(x: f32, max_logit: f32, exp_sum: f32) -> f32 {
    if (SOFTMAX == 1u) { return exp_of(x - max_logit) / exp_sum; }
    if (SQRT_SOFTPLUS == 1u) { return sqrt(max(x, 0.0) + log1p_of(exp_of(-abs(x)))); }
    return logistic(x);
}

// Number of keys among `vecs` vectors that come before the key at `index` among them.
fn count_before(start: u32, vecs: u32, index: u32) -> u32 {
    let key = scratch_word(4u * start + index);
    var count = vec4<u32>(0u);
    for (var i = 0u; i < vecs; i++) {
        // An equal key comes before if its index is lower.
        let indices = vec4<u32>(4u * i) + vec4<u32>(0u, 1u, 2u, 3u);
        let threshold = vec4<u32>(key) - select(vec4<u32>(0u), vec4<u32>(1u), indices < vec4<u32>(index));
        count += select(vec4<u32>(0u), vec4<u32>(1u), scratch_vec(start + i) > threshold);
    }
    return count.x + count.y + count.z + count.w;
}

// Masks the experts of groups that are not among the best.
fn mask_groups() {
    for (var group = thread; group < EXPERT_GROUPS; group += WG) {
        var largest = 0u;
        var second_largest = 0u;
        for (var i = group * GROUP_SIZE; i < (group + 1u) * GROUP_SIZE; i++) {
            let key = scratch_word(i);
            second_largest = max(second_largest, min(largest, key));
            largest = max(largest, key);
        }
        var group_score = from_sort_key(largest);
        if (TWO_BEST == 1u && GROUP_SIZE > 1u) { group_score += from_sort_key(second_largest); }
        set_scratch(GROUP_KEYS + group, sort_key(group_score));
    }
    scratch_barrier();
    for (var group = thread; group < EXPERT_GROUPS; group += WG) {
        let key = scratch_word(GROUP_KEYS + group);
        var rank = 0u;
        for (var i = 0u; i < EXPERT_GROUPS; i++) {
            let other = scratch_word(GROUP_KEYS + i);
            rank += select(0u, 1u, other > key || (other == key && i < group));
        }
        set_scratch(GROUP_FLAGS + group, select(0u, 1u, rank < TOP_GROUPS));
    }
    scratch_barrier();
    for (var i = thread; i < EXPERTS; i += WG) {
        if (scratch_word(GROUP_FLAGS + i / GROUP_SIZE) == 0u) { set_scratch(i, NO_KEY); }
    }
    scratch_barrier();
}

// Finds the top k of a row: their ids are the words from TOP_IDS on.
fn find_top_k(r: Routing, row: u32) {
    scratch_begin(row);
    max_logit = 0.0;
    exp_sum = 1.0;
    if (FULL_SOFTMAX) {
        max_logit = -3.4e38;
        for (var i = thread; i < EXPERTS; i += WG) { max_logit = max(max_logit, act[r.logits + i]); }
        max_logit = group_max(max_logit);
        exp_sum = 0.0;
        for (var i = thread; i < EXPERTS; i += WG) { exp_sum += exp_of(act[r.logits + i] - max_logit); }
        exp_sum = group_sum(exp_sum);
    }

    // A softmax of infinities has no scores; without a correction none are compared.
    var has_nan = SOFTMAX == 1u && CORRECTED == 1u && abs(max_logit) > 3.3e38;
    for (var i = thread; i < PADDED_EXPERTS; i += WG) {
        var key = NO_KEY;
        if (i < EXPERTS) {
            var x = act[r.logits + i];
            has_nan = has_nan || is_nan(x);
            if (BY_LOGIT == 0u) { x = score(x, max_logit, exp_sum); }
            if (CORRECTED == 1u) {
                let correction = act[r.correction + i];
                has_nan = has_nan || is_nan(correction);
                x += correction;
            }
            key = sort_key(x);
        }
        set_scratch(i, key);
    }
    if (has_nan) { atomicMax(&report[0], ~row); }
    scratch_barrier();
    if (GIVEN == 1u) {
        for (var i = thread; i < TOP_K; i += WG) { set_scratch(TOP_IDS + i, u32(clamp(act[r.ids + i], 0.0, f32(EXPERTS - 1u)))); }
        scratch_barrier();
        return;
    }
    if (EXPERT_GROUPS > 0u) { mask_groups(); }

    for (var i = thread; i < PADDED_EXPERTS; i += WG) {
        let block = i / SORT_BLOCK;
        let rank = count_before(block * (SORT_BLOCK / 4u), SORT_BLOCK / 4u, i % SORT_BLOCK);
        if (rank < BLOCK_TOP) {
            if (SORT_BLOCKS == 1u) {
                set_scratch(TOP_IDS + rank, i);
            } else {
                set_scratch(CANDIDATES + block * BLOCK_TOP + rank, scratch_word(i));
                set_scratch(CANDIDATE_IDS + block * BLOCK_TOP + rank, i);
            }
        }
    }
    if (SORT_BLOCKS > 1u) {
        for (var i = SORT_BLOCKS * BLOCK_TOP + thread; i < 4u * CANDIDATE_VECS; i += WG) { set_scratch(CANDIDATES + i, NO_KEY); }
        scratch_barrier();
        for (var i = thread; i < SORT_BLOCKS * BLOCK_TOP; i += WG) {
            let rank = count_before(CANDIDATES / 4u, CANDIDATE_VECS, i);
            if (rank < TOP_K) { set_scratch(TOP_IDS + rank, scratch_word(CANDIDATE_IDS + i)); }
        }
    }
    scratch_barrier();
}

// Weight of the expert at `rank` in a sparse mixer: its softmax over the experts of no lower rank
// and a logit near its own.
fn sparse_weight(r: Routing, rank: u32) -> f32 {
    let chosen = act[r.logits + scratch_word(TOP_IDS + rank)];
    var sum = 0.0;
    for (var i = 0u; i < EXPERTS; i++) {
        let x = act[r.logits + i];
        var counts = chosen - x <= bitcast<f32>(BAND_BITS) * max(abs(x), chosen);
        for (var lower = 0u; lower < rank; lower++) { counts = counts && scratch_word(TOP_IDS + lower) != i; }
        if (counts) { sum += exp_of(x - chosen); }
    }
    return 1.0 / sum;
}

// Writes ids and weights of the selected experts.
fn write_weights(r: Routing) {
    // Normalized weights of a plain softmax need only the selected logits.
    if (SOFTMAX == 1u && !FULL_SOFTMAX) { 
        max_logit = act[r.logits + scratch_word(TOP_IDS)];
        // Ids that are given are not in order.
        for (var i = 1u; i < TOP_K * GIVEN; i++) { max_logit = max(max_logit, act[r.logits + scratch_word(TOP_IDS + i)]); }
    }
    for (var rank = thread; rank < TOP_K; rank += WG) {
        var weight = 0.0;
        if (SPARSE_MIXER == 1u) {
            weight = sparse_weight(r, rank);
        } else {
            weight = score(act[r.logits + scratch_word(TOP_IDS + rank)], max_logit, exp_sum);
        }
        set_scratch(SCORES + rank, bitcast<u32>(weight));
    }
    scratch_barrier();
    var sum = 1.0;
    if (NORMALIZE == 1u) {
        sum = 0.0;
        for (var rank = 0u; rank < TOP_K; rank++) { sum += bitcast<f32>(scratch_word(SCORES + rank)); }
        sum = max(sum, 1e-20);
    }
    for (var rank = thread; rank < TOP_K; rank += WG) {
        let expert = scratch_word(TOP_IDS + rank);
        var weight = bitcast<f32>(scratch_word(SCORES + rank)) / sum * r.scale;
        if (SCALED == 1u) { weight *= act[r.expert_scale + expert]; }
        act[r.ids + rank] = f32(expert);
        act[r.weights + rank] = weight;
    }
    if (SHARED_EXPERT > 0u && thread == 0u) {
        act[r.ids + TOP_K] = f32(EXPERTS);
        var weight = 1.0;
        if (SHARED_EXPERT == 2u) { weight = logistic(act[r.gate]); }
        act[r.weights + TOP_K] = weight;
    }
}
