//! Router top-k: the experts of each row and their weights.

use moeflux_ops::{
    BATCH_INVARIANT_ROWS, Error, ExpertGroups, GroupScore, Op, Router, Scoring, View,
};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{RouterTopKParams, RoutingParams, ViewParams},
        store::Store,
    },
    context::OpContext,
};

pub(crate) static ROUTER_TOP_K: Kernel = kernel!("router_topk", "router/router_topk", RouterTopKParams, { scratch: "router/scratch_workgroup" }, [Write, Write]);
pub(crate) static ROUTER_TOP_K_STORAGE: Kernel = kernel!("router_topk_storage", "router/router_topk", RouterTopKParams, { scratch: "router/scratch_storage" }, [Write, Write, Write]);

/// Words of workgroup memory on every adapter, less those for sums.
const MAX_WORKGROUP_WORDS: usize = 7 << 10;

/// How a workgroup finds the `k` largest of `n` values: it ranks the values of each block, then the
/// candidates of all blocks.
#[derive(Clone, Copy)]
struct TopKLayout {
    /// Values of a block.
    block: usize,
    /// Words of workgroup memory or scratch, a multiple of four.
    words: usize,
}

impl TopKLayout {
    /// Layout with the fewest comparisons.
    fn new(n: usize, k: usize, groups: usize) -> Self {
        let whole = n.next_multiple_of(4);
        let candidate = |block: usize| {
            let blocks = n.div_ceil(block);
            let candidates = if blocks == 1 { 0 } else { blocks * k.min(block) };
            // At least a subgroup of threads compares at a time.
            let cost =
                (blocks * block).max(64) * block + candidates.next_multiple_of(64) * candidates;
            let kept = (blocks * k.min(block)).next_multiple_of(4);
            let words = blocks * block + 2 * (kept + groups + k);
            (cost, Self { block, words: words.next_multiple_of(4) })
        };
        let powers = std::iter::successors(Some(32), |block| Some(block * 2))
            .take_while(|block| *block < whole);
        let best = powers.map(candidate).chain([candidate(whole)]).min_by_key(|(cost, _)| *cost);
        best.map_or(candidate(whole).1, |(_, layout)| layout)
    }
}

/// [`Op::TopK`].
#[derive(Clone, Copy)]
pub(crate) struct RouterTopK {
    logits: View,
    router: Router,
    pub(crate) ids: View,
    weights: View,
    layout: TopKLayout,
}

impl RouterTopK {
    /// `None` for other ops.
    pub(crate) fn from_op(op: &Op<'_>) -> Option<Self> {
        match *op {
            Op::TopK { logits, router, ids, weights } => {
                let k = ids.width - router.shared_count();
                let groups = router.groups.map_or(0, |groups| groups.count);
                let layout = TopKLayout::new(logits.width, k, groups);
                Some(Self { logits, router, ids, weights, layout })
            }
            _ => None,
        }
    }

    /// Whether it can be fused with experts: it has few rows, which follow one another.
    pub(crate) fn is_fusible(&self) -> bool {
        let Self { logits, ids, weights, .. } = self;
        let is_dense = |view: &View| view.row_stride == view.width;
        logits.rows == 1
            || logits.rows <= BATCH_INVARIANT_ROWS
                && [logits, ids, weights].into_iter().all(is_dense)
                && self
                    .router
                    .shared
                    .and_then(|shared| shared.gate)
                    .is_none_or(|gate| is_dense(&gate))
    }

    /// Constants of `rank_experts.wgsl`.
    pub(super) fn constants(&self) -> [(&'static str, u32); 8] {
        let Self { logits, router, ids, .. } = self;
        let ExpertGroups { count, chosen, score } = router.groups.unwrap_or(ExpertGroups {
            count: 0,
            chosen: 0,
            score: GroupScore::BestTwo,
        });
        let band = match router.scoring {
            Scoring::SparseMixer { band } => Some(band),
            _ => None,
        };
        let flags = [
            router.scoring == Scoring::Softmax,
            router.correction.is_some(),
            router.normalize,
            router.expert_scale.is_some(),
            score == GroupScore::BestTwo,
            band.is_some(),
            router.scoring == Scoring::SqrtSoftplus,
            router.given,
            router.selects_by_logit(),
        ];
        let flags = flags.iter().rev().fold(0, |bits, flag| bits * 2 + u32::from(*flag));
        [
            ("EXPERTS", logits.width as u32),
            ("TOP_K", (ids.width - router.shared_count()) as u32),
            (
                "SHARED_EXPERT",
                router.shared.map_or(0, |shared| 1 + u32::from(shared.gate.is_some())),
            ),
            ("SORT_BLOCK", self.layout.block as u32),
            ("EXPERT_GROUPS", count as u32),
            ("TOP_GROUPS", chosen as u32),
            ("ROUTER_FLAGS", flags),
            ("BAND_BITS", band.unwrap_or(0.0).to_bits()),
        ]
    }

    /// Bytes of workgroup memory when fused with experts, the slot table included.
    pub(super) const fn workgroup_bytes(&self) -> usize {
        (self.layout.words + self.logits.width) * 4
    }

    /// Gate of the shared expert; any view if there is none.
    fn shared_gate(&self) -> View {
        self.router.shared.and_then(|shared| shared.gate).unwrap_or(self.logits)
    }

    /// Parameters of the first row for a kernel that is fused with the router.
    pub(super) fn row_params(&self, store: &Store) -> Result<RoutingParams, Error> {
        let Self { logits, router, ids, weights, .. } = self;
        Ok(RoutingParams {
            logits: store.view_offset(logits)?,
            ids: store.view_offset(ids)?,
            weights: store.view_offset(weights)?,
            gate: store.view_offset(&self.shared_gate())?,
            correction: store.optional_offset(router.correction)?,
            expert_scale: store.optional_offset(router.expert_scale)?,
            scale: router.scale,
        })
    }

    /// Encodes it as a separate dispatch.
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        let Self { logits, router, ids, weights, .. } = self;
        let gate = self.shared_gate();
        let store = &*ctx.store;
        let params = RouterTopKParams {
            logits: ViewParams::new(store, logits)?,
            ids: ViewParams::new(store, ids)?,
            weights: ViewParams::new(store, weights)?,
            gate: ViewParams::new(store, &gate)?,
            correction: store.optional_offset(router.correction)?,
            expert_scale: store.optional_offset(router.expert_scale)?,
            rows: logits.rows as u32,
            scale: router.scale,
        };
        // At most as many as in a fused dispatch, so that sums over scores have the same order.
        let threads = logits.width.next_power_of_two().clamp(64, 256) as u32;
        let constants = Constants::new(&self.constants()).with("WG", threads);
        let words = self.layout.words;
        let report = ctx.recorder.report().clone();
        if words <= MAX_WORKGROUP_WORDS {
            let buffers = [ctx.store.activations(), &report];
            return ctx.recorder.dispatch(
                &ROUTER_TOP_K,
                &constants,
                &buffers,
                &params,
                logits.rows,
            );
        }
        let scratch = ctx.scratch(words * logits.rows)?;
        let buffers = [ctx.store.activations(), &report, &scratch];
        ctx.recorder.dispatch(&ROUTER_TOP_K_STORAGE, &constants, &buffers, &params, logits.rows)
    }
}
