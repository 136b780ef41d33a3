//! The router.

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::{Buffer, Error, Op, Router, Scoring, View};

static TOP_K: Kernel = kernel!("topk", ["common", "precise", "order", "words_group", "topk"], [Write, Write]);
static TOP_K_OF_MANY: Kernel =
    kernel!("topk_of_many", ["common", "precise", "order", "words_scratch", "topk"], [Write, Write, Write]);

/// Words that a workgroup has in its own memory on every adapter, less what sums need.
const WORDS: usize = 7 << 10;

/// How a workgroup finds the `k` best of `n` numbers.
#[derive(Clone, Copy)]
struct Layout {
    /// Numbers of a block.
    block: usize,
    /// Words of the workgroup, a multiple of four.
    words: usize,
}

/// The blocks that take the fewest comparisons.
fn layout(n: usize, k: usize, groups: usize) -> Layout {
    let whole = n.next_multiple_of(4);
    let of = |block: usize| {
        let blocks = n.div_ceil(block);
        let candidates = if blocks == 1 { 0 } else { blocks * k.min(block) };
        // Numbers are compared by at least a subgroup of threads at a time.
        let cost = (blocks * block).max(64) * block + candidates.next_multiple_of(64) * candidates;
        let kept = (blocks * k.min(block)).next_multiple_of(4);
        let words = blocks * block + 2 * (kept + groups + k);
        (cost, Layout { block, words: words.next_multiple_of(4) })
    };
    let halves = std::iter::successors(Some(32), |block| Some(block * 2)).take_while(|block| *block < whole);
    let best = halves.map(of).chain([of(whole)]).min_by_key(|(cost, _)| *cost);
    best.map_or(of(whole).1, |(_, layout)| layout)
}

/// The constants of `topk_rank.wgsl`, and the words that a workgroup needs.
fn constants(logits: &View, router: &Router, ids: &View) -> ([(&'static str, u32); 10], usize) {
    let (n, k) = (logits.width, ids.width);
    let (groups, chosen) = router.groups.map_or((0, 0), |groups| (groups.count, groups.chosen));
    let Layout { block, words } = layout(n, k, groups);
    let all = [
        ("N", n as u32),
        ("K", k as u32),
        ("BLOCK", block as u32),
        ("WORDS", words as u32),
        ("GROUPS", groups as u32),
        ("CHOSEN", chosen as u32),
        ("SOFTMAX", (router.scoring == Scoring::Softmax).into()),
        ("CORRECTED", router.correction.is_some().into()),
        ("NORMALIZE", router.normalize.into()),
        ("SCALED", router.expert_scale.is_some().into()),
    ];
    (all, words)
}

/// Runs [`Op::TopK`].
pub(super) fn top_k(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopK { logits, router, ids, weights } = op else { return Ok(()) };
    let store = &gpu.store;
    let start = |buffer: Option<Buffer>| buffer.map_or(Ok(0), |buffer| store.start(buffer));
    let params = Params::new()
        .view(store.place(&logits)?, &logits)
        .view(store.place(&ids)?, &ids)
        .view(store.place(&weights)?, &weights)
        .u(start(router.correction)?)
        .u(start(router.expert_scale)?)
        .n(logits.rows)
        .f(router.scale);
    let (ranking, words) = constants(&logits, &router, &ids);
    let threads = logits.width.next_power_of_two().clamp(64, 512) as u32;
    let constants = Constants::new(&ranking).with("WG", threads);
    let (activations, report) = (gpu.activations(), gpu.report.clone());
    if words <= WORDS {
        return gpu.dispatch(&TOP_K, constants, &[&activations, &report], &params, logits.rows);
    }
    let scratch = gpu.scratch(words * logits.rows)?;
    gpu.dispatch(&TOP_K_OF_MANY, constants, &[&activations, &report, &scratch], &params, logits.rows)
}
