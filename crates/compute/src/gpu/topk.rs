//! The router.

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::{Buffer, Error, Op, Router, Scoring, View};

pub(in crate::gpu) static TOP_K: Kernel = kernel!("router_topk", "router/router_topk", { scratch: "router/scratch_workgroup" }, [Write, Write]);
pub(in crate::gpu) static TOP_K_OF_MANY: Kernel = kernel!("router_topk_storage", "router/router_topk", { scratch: "router/scratch_storage" }, [Write, Write, Write]);

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
    let halves =
        std::iter::successors(Some(32), |block| Some(block * 2)).take_while(|block| *block < whole);
    let best = halves.map(of).chain([of(whole)]).min_by_key(|(cost, _)| *cost);
    best.map_or(of(whole).1, |(_, layout)| layout)
}

/// The experts of rows, by their logits.
#[derive(Clone, Copy)]
pub(super) struct Ranked {
    logits: View,
    router: Router,
    pub(super) ids: View,
    weights: View,
    layout: Layout,
}

impl Ranked {
    /// What [`Op::TopK`] asks for.
    pub(super) fn of(op: &Op<'_>) -> Option<Self> {
        match *op {
            Op::TopK { logits, router, ids, weights } => {
                let k = ids.width - router.besides();
                let layout =
                    layout(logits.width, k, router.groups.map_or(0, |groups| groups.count));
                Some(Self { logits, router, ids, weights, layout })
            }
            _ => None,
        }
    }

    /// The constants of `ranking.wgsl`.
    pub(super) fn constants(&self) -> [(&'static str, u32); 7] {
        let Self { logits, router, ids, .. } = self;
        let (groups, chosen) = router.groups.map_or((0, 0), |groups| (groups.count, groups.chosen));
        let ranks = [
            router.scoring == Scoring::Softmax,
            router.correction.is_some(),
            router.normalize,
            router.expert_scale.is_some(),
        ];
        let ranks = ranks.iter().rev().fold(0, |bits, is| bits * 2 + u32::from(*is));
        [
            ("EXPERTS", logits.width as u32),
            ("TOP_K", (ids.width - router.besides()) as u32),
            (
                "SHARED_EXPERT",
                router.shared.map_or(0, |shared| 1 + u32::from(shared.gate.is_some())),
            ),
            ("SORT_BLOCK", self.layout.block as u32),
            ("EXPERT_GROUPS", groups as u32),
            ("TOP_GROUPS", chosen as u32),
            ("ROUTER_FLAGS", ranks),
        ]
    }

    /// Bytes of workgroup memory where it is joined with experts, with those of all slots.
    pub(super) fn bytes(&self) -> usize {
        (self.layout.words + self.logits.width) * 4
    }

    /// Where the gate of the shared expert is; anywhere if there is none.
    fn gate(&self) -> View {
        self.router.shared.and_then(|shared| shared.gate).unwrap_or(self.logits)
    }

    /// Adds `Ranking` of `ranking.wgsl`, for one row.
    pub(super) fn params(&self, gpu: &GpuDevice, params: Params) -> Result<Params, Error> {
        let Self { logits, router, ids, weights, .. } = self;
        let place = |view: &View| gpu.store.place(view);
        let start = |buffer: Option<Buffer>| buffer.map_or(Ok(0), |buffer| gpu.store.start(buffer));
        let params =
            params.u(place(logits)?).u(place(ids)?).u(place(weights)?).u(place(&self.gate())?);
        Ok(params.u(start(router.correction)?).u(start(router.expert_scale)?).f(router.scale))
    }

    /// Runs it by itself.
    pub(super) fn run(&self, gpu: &mut GpuDevice) -> Result<(), Error> {
        let Self { logits, router, ids, weights, .. } = self;
        let store = &gpu.store;
        let start = |buffer: Option<Buffer>| buffer.map_or(Ok(0), |buffer| store.start(buffer));
        let params = Params::new()
            .view(store.place(logits)?, logits)
            .view(store.place(ids)?, ids)
            .view(store.place(weights)?, weights)
            .view(store.place(&self.gate())?, &self.gate())
            .u(start(router.correction)?)
            .u(start(router.expert_scale)?)
            .n(logits.rows)
            .f(router.scale);
        let threads = logits.width.next_power_of_two().clamp(64, 512) as u32;
        let constants = Constants::new(&self.constants()).with("WG", threads);
        let words = self.layout.words;
        let (activations, report) = (gpu.activations(), gpu.report.clone());
        if words <= WORDS {
            return gpu.dispatch(&TOP_K, constants, &[&activations, &report], &params, logits.rows);
        }
        let scratch = gpu.scratch(words * logits.rows)?;
        gpu.dispatch(
            &TOP_K_OF_MANY,
            constants,
            &[&activations, &report, &scratch],
            &params,
            logits.rows,
        )
    }
}
