// Ranking: of a row the K largest of N numbers, which are logits or (corrected) scores, in rank order, of equal
// ones the lower id first; and their weights.
//
// A number's rank is the count of those that come before it, so all ranks are found at once: first in blocks of BLOCK,
// where a number of rank K or more is out, then among what is left, the candidates. Both keep the order of ids.
// RANKS: bits for softmax, correction, normalised weights and scales of experts. GROUPS of experts, of which CHOSEN count; or
// none.
// Word 0 of `report` is the complement of the first row that has a NaN.
// All threads of a workgroup call these together.
// needs: common/common, common/exp_log, common/sort_key, @team, @scratch
// constants: BESIDES, BLOCK, CHOSEN, GROUPS, K, N, RANKS, WG

// BESIDES: 1 where a shared expert, number N, comes behind them with weight 1, 2 where that is the sigmoid of its gate; else 0.

// Where numbers of a row begin: logits, chosen ids, their weights, the shared expert's gate; corrections and scales of experts.
struct Ranking { logits: u32, ids: u32, weights: u32, gate: u32, correction: u32, expert_scale: u32, scale: f32 }

var<private> most: f32;
var<private> total: f32;

const SOFTMAX = RANKS & 1u;
const CORRECTED = RANKS >> 1u & 1u;
const NORMALIZE = RANKS >> 2u & 1u;
const SCALED = RANKS >> 3u;
const BLOCKS = (N + BLOCK - 1u) / BLOCK;
const KEPT = min(K, BLOCK);
// Experts of a group.
const GROUP_SIZE = N / max(GROUPS, 1u);
const KEYS = BLOCKS * BLOCK;
// Where in the workgroup's words what begins; the keys come first. `layout` of topk.rs counts the same.
const CANDIDATES = KEYS;
const CANDIDATES_4 = (BLOCKS * KEPT + 3u) / 4u;
const CANDIDATE_IDS = CANDIDATES + 4u * CANDIDATES_4;
const GROUP_KEYS = CANDIDATE_IDS + 4u * CANDIDATES_4;
const GROUP_FLAGS = GROUP_KEYS + GROUPS;
const BEST = GROUP_FLAGS + GROUPS;
const SCORES = BEST + K;
const WORDS = (SCORES + K + 3u) / 4u * 4u;

// Whether the softmax's sum over all experts matters.
const WHOLE = SOFTMAX == 1u && (NORMALIZE == 0u || CORRECTED == 1u);

fn logistic(x: f32) -> f32 {
    return 1.0 / (1.0 + exp_of(-x));
}

fn score(x: f32, most: f32, total: f32) -> f32 {
    if (SOFTMAX == 1u) { return exp_of(x - most) / total; }
    return logistic(x);
}

// How many of the keys of `fours` fours of words come before the one at `place` among them.
fn before(start: u32, fours: u32, place: u32) -> u32 {
    let key = word(4u * start + place);
    var count = vec4<u32>(0u);
    for (var i = 0u; i < fours; i++) {
        // An equal key comes before if its place does.
        let at = vec4<u32>(4u * i) + vec4<u32>(0u, 1u, 2u, 3u);
        let least = vec4<u32>(key) - select(vec4<u32>(0u), vec4<u32>(1u), at < vec4<u32>(place));
        count += select(vec4<u32>(0u), vec4<u32>(1u), four_words(start + i) > least);
    }
    return count.x + count.y + count.z + count.w;
}

// Leaves experts of groups that are not among the best without a key.
fn choose_groups() {
    for (var group = thread; group < GROUPS; group += WG) {
        var first = 0u;
        var second = 0u;
        for (var i = group * GROUP_SIZE; i < (group + 1u) * GROUP_SIZE; i++) {
            let key = word(i);
            second = max(second, min(first, key));
            first = max(first, key);
        }
        var worth = number_of(first);
        if (GROUP_SIZE > 1u) { worth += number_of(second); }
        set_word(GROUP_KEYS + group, key_of(worth));
    }
    words_written();
    for (var group = thread; group < GROUPS; group += WG) {
        let key = word(GROUP_KEYS + group);
        var rank = 0u;
        for (var i = 0u; i < GROUPS; i++) {
            let other = word(GROUP_KEYS + i);
            rank += select(0u, 1u, other > key || (other == key && i < group));
        }
        set_word(GROUP_FLAGS + group, select(0u, 1u, rank < CHOSEN));
    }
    words_written();
    for (var i = thread; i < N; i += WG) {
        if (word(GROUP_FLAGS + i / GROUP_SIZE) == 0u) { set_word(i, NO_KEY); }
    }
    words_written();
}

// Finds the best of a row: their ids are the words from BEST on.
fn rank_row(r: Ranking, row: u32) {
    words_begin(row);
    most = 0.0;
    total = 1.0;
    if (WHOLE) {
        most = -3.4e38;
        for (var i = thread; i < N; i += WG) { most = max(most, a[r.logits + i]); }
        most = group_max(most);
        total = 0.0;
        for (var i = thread; i < N; i += WG) { total += exp_of(a[r.logits + i] - most); }
        total = group_sum(total);
    }

    // A softmax of infinities has no scores; without a correction none are compared.
    var wrong = SOFTMAX == 1u && CORRECTED == 1u && abs(most) > 3.3e38;
    for (var i = thread; i < KEYS; i += WG) {
        var key = NO_KEY;
        if (i < N) {
            var x = a[r.logits + i];
            wrong = wrong || is_nan(x);
            if (SOFTMAX == 0u || CORRECTED == 1u) { x = score(x, most, total); }
            if (CORRECTED == 1u) {
                let correction = a[r.correction + i];
                wrong = wrong || is_nan(correction);
                x += correction;
            }
            key = key_of(x);
        }
        set_word(i, key);
    }
    if (wrong) { atomicMax(&report[0], ~row); }
    words_written();
    if (GROUPS > 0u) { choose_groups(); }

    for (var i = thread; i < KEYS; i += WG) {
        let block = i / BLOCK;
        let rank = before(block * (BLOCK / 4u), BLOCK / 4u, i % BLOCK);
        if (rank < KEPT) {
            if (BLOCKS == 1u) {
                set_word(BEST + rank, i);
            } else {
                set_word(CANDIDATES + block * KEPT + rank, word(i));
                set_word(CANDIDATE_IDS + block * KEPT + rank, i);
            }
        }
    }
    if (BLOCKS > 1u) {
        for (var i = BLOCKS * KEPT + thread; i < 4u * CANDIDATES_4; i += WG) { set_word(CANDIDATES + i, NO_KEY); }
        words_written();
        for (var i = thread; i < BLOCKS * KEPT; i += WG) {
            let rank = before(CANDIDATES / 4u, CANDIDATES_4, i);
            if (rank < K) { set_word(BEST + rank, word(CANDIDATE_IDS + i)); }
        }
    }
    words_written();
}

// Writes ids and weights of what has been found.
fn weigh_row(r: Ranking) {
    // Weights of a plain softmax that are normalised need no more than the chosen.
    if (SOFTMAX == 1u && !WHOLE) { most = a[r.logits + word(BEST)]; }
    for (var rank = thread; rank < K; rank += WG) {
        set_word(SCORES + rank, bitcast<u32>(score(a[r.logits + word(BEST + rank)], most, total)));
    }
    words_written();
    var sum = 1.0;
    if (NORMALIZE == 1u) {
        sum = 0.0;
        for (var rank = 0u; rank < K; rank++) { sum += bitcast<f32>(word(SCORES + rank)); }
        sum = max(sum, 1e-20);
    }
    for (var rank = thread; rank < K; rank += WG) {
        let expert = word(BEST + rank);
        var weight = bitcast<f32>(word(SCORES + rank)) / sum * r.scale;
        if (SCALED == 1u) { weight *= a[r.expert_scale + expert]; }
        a[r.ids + rank] = f32(expert);
        a[r.weights + rank] = weight;
    }
    if (BESIDES > 0u && thread == 0u) {
        a[r.ids + K] = f32(N);
        var weight = 1.0;
        if (BESIDES == 2u) { weight = logistic(a[r.gate]); }
        a[r.weights + K] = weight;
    }
}
