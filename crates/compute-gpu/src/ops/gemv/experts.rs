//! GEMV of routed experts: gate and up fused with the GLU, down, and down fused with the sum.

use moeflux_ops::{Error, Shared, View, seam::MatrixLocation};

use super::gemv::{
    ActivationFormat, EXPERTS_DOWN_SUM, EXPERTS_GEMV, EXPERTS_GEMV_ROUTED, FULL_GRID, GemvConfig,
    RowGrid, THREADS, plane_bytes, section_cols, x_bytes,
};
use crate::{
    ops::{
        context::OpContext,
        operands::{BankUses, GluCode},
        topk::RouterTopK,
        weight_format::{BiasSource, Block32},
    },
    params::{ExpertsDownSumParams, ExpertsGemvParams, RoutingParams, SlotMatrixParams},
};

/// Workgroup sizes of the kernel that sums experts, and the number of workgroups that makes each
/// worthwhile. The first that fits is used: a workgroup stages the inputs of all experts of a row,
/// so fewer are better. With f32 activations only the last is used, as threads keep more of them
/// and adapters may lack the registers.
const SUM_THREADS: [(u32, usize); 3] = [(1024, 128), (512, 0), (THREADS, 0)];

/// `STAGE` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StageKind {
    /// Gate and up.
    GateUp = 0,
    /// Up without a gate.
    Up = 1,
    Down = 2,
}

/// One stage of the experts of a few rows.
#[derive(Clone, Copy)]
pub(crate) struct ExpertStage<'a> {
    pub(crate) uses: &'a BankUses,
    pub(crate) x: View,
    pub(crate) out: View,
    pub(crate) kind: StageKind,
    /// Gate and up, or one of up and down.
    pub(crate) matrices: &'a [MatrixLocation],
    pub(crate) activation: GluCode,
    /// Router top-k of the rows, if fused with the stage.
    pub(crate) router: Option<&'a RouterTopK>,
}

impl ExpertStage<'_> {
    /// First and last matrix, which are the same for a stage of one.
    fn first_and_last(&self) -> Option<[&MatrixLocation; 2]> {
        Some([self.matrices.first()?, self.matrices.last()?])
    }
}

/// Encodes a stage of experts. Returns false if these kernels do not support the shapes.
pub(crate) fn encode_experts(
    ctx: &mut OpContext<'_>,
    stage: &ExpertStage<'_>,
) -> Result<bool, Error> {
    let Some([first, last]) = stage.first_and_last() else { return Ok(false) };
    if first.shape != last.shape {
        return Ok(false);
    }
    let (shape, is_down) = (first.shape, stage.kind == StageKind::Down);
    let activations = match is_down {
        false => ActivationFormat::for_gate_up(ctx.exact),
        true => ActivationFormat::default_for(ctx.exact),
    };
    let Some(section) = section_cols(ctx, shape, activations) else { return Ok(false) };
    // An activation of partial sums is not the sum of partial activations.
    if !is_aligned(first) || !is_aligned(last) || (section < shape.cols && !is_down) {
        return Ok(false);
    }
    let matrix = *first;
    for first_col in (0..shape.cols).step_by(section) {
        let cols = section.min(shape.cols - first_col);
        let Some(config) = GemvConfig::for_section(ctx, shape, activations, cols) else {
            return Ok(false);
        };
        if cols == shape.cols {
            encode_stage(ctx, config, stage, false)?;
            continue;
        }
        let offsets = plane_bytes(shape, first_col);
        let planes = std::array::from_fn(|i| matrix.planes[i] + offsets[i]);
        let bias = matrix.bias.filter(|_| first_col == 0);
        let section = [MatrixLocation { planes, bias, ..matrix }];
        let x = stage.x.columns(first_col, cols);
        let stage = ExpertStage { matrices: &section, x, ..*stage };
        encode_stage(ctx, config, &stage, first_col > 0)?;
    }
    Ok(true)
}

/// Whether router top-k can be fused with the stage of gate and up, or of up alone.
pub(crate) fn can_fuse_router(
    ctx: &OpContext<'_>,
    matrices: &[MatrixLocation],
    router: &RouterTopK,
) -> bool {
    let activations = ActivationFormat::for_gate_up(ctx.exact);
    let Some(shape) = matrices.first().map(|matrix| matrix.shape) else { return false };
    let Some(config) = GemvConfig::for_rows(ctx, shape, activations) else {
        return false;
    };
    let staged = config.activations.workgroup_bytes(shape.cols);
    // Without subgroups, sums over a workgroup need a value of each thread too.
    let ranking = router.workgroup_bytes() + 4 * THREADS as usize;
    matrices.iter().all(|matrix| matrix.shape == shape && is_aligned(matrix))
        && staged + ranking <= x_bytes(ctx)
}

/// Whether the planes of a matrix are aligned as its kernel requires.
fn is_aligned(matrix: &MatrixLocation) -> bool {
    Block32::for_planes(matrix.shape, matrix.planes).is_some()
        && matrix.bias.is_none_or(|(_, offset)| offset.is_multiple_of(4))
}

/// Parameters of a matrix in a slot.
fn slot_matrix(matrix: &MatrixLocation, block: Block32) -> SlotMatrixParams {
    let [weights, scales, biases] = matrix.planes;
    SlotMatrixParams {
        weights: (weights / block.load_bytes()) as u32,
        scales: scales as u32,
        biases: biases as u32,
        bias: matrix.bias.map_or(0, |(_, offset)| offset as u32),
    }
}

/// Encodes a stage with one config. `accumulate`: it adds to `out`.
pub(super) fn encode_stage(
    ctx: &mut OpContext<'_>,
    config: GemvConfig,
    stage: &ExpertStage<'_>,
    accumulate: bool,
) -> Result<(), Error> {
    let Some([first, last]) = stage.first_and_last() else { return Ok(()) };
    let is_gate_up = stage.kind == StageKind::GateUp;
    let GemvConfig { kernel, block, row_threads, rows, constants, .. } = config;
    let (rows, outputs) = if is_gate_up { (rows.max(2), rows.max(2) / 2) } else { (rows, rows) };
    let grid = RowGrid::new(
        first.shape.rows,
        outputs * (THREADS / row_threads) as usize,
        (FULL_GRID / stage.uses.count).max(1),
    );
    let bias = match first.bias {
        None if accumulate => BiasSource::Output,
        bias => BiasSource::of_matrix(bias),
    };
    let constants = constants
        .with("WG", THREADS)
        .with("ROW_THREADS", row_threads)
        .with("ROWS", rows as u32)
        .with("ACTIVATION", stage.activation.kind)
        .with("ROW_STEP", first.step as u32)
        .with("STAGE", stage.kind as u32)
        .with("WORKGROUPS", if stage.uses.one_row { grid.workgroups as u32 } else { 0 })
        .with("BIAS_SCALAR", bias.code());
    let store = &*ctx.store;
    let params = ExpertsGemvParams {
        x: store.view_offset(&stage.x)?,
        x_row_stride: stage.x.row_stride as u32,
        out: store.view_offset(&stage.out)?,
        out_row_stride: stage.out.row_stride as u32,
        assignments: stage.uses.params,
        count: stage.uses.count as u32,
        workgroups: grid.workgroups as u32,
        steps: grid.blocks_per_group as u32,
        outputs: first.shape.rows as u32,
        matrix: slot_matrix(first, block),
        up: slot_matrix(last, block),
        up_first: last.first as u32,
        alpha: stage.activation.alpha,
        limit: stage.activation.limit,
        routing: match stage.router {
            Some(router) => router.row_params(store)?,
            None => RoutingParams::default(),
        },
    };
    let BankUses { bank, words, .. } = stage.uses;
    let groups = stage.uses.count * grid.workgroups;
    let Some(router) = stage.router else {
        let entries = stage.uses.table_entries;
        // With f32 activations the barrier after loading the table costs more than it saves.
        let fits = config.activations != ActivationFormat::F32
            && entries <= THREADS as usize
            && config.activations.workgroup_bytes(stage.x.width) + entries * 4 <= x_bytes(ctx);
        let constants = constants
            .with("ASSIGNMENTS", stage.uses.kind as u32)
            .with("TABLE_ENTRIES", if fits { entries as u32 } else { 0 });
        let buffers = [store.activations(), bank, bank, words];
        return ctx.recorder.dispatch(&EXPERTS_GEMV[kernel], &constants, &buffers, &params, groups);
    };
    let constants =
        router.constants().iter().fold(constants, |all, (name, value)| all.with(name, *value));
    let report = ctx.recorder.report().clone();
    let buffers = [store.activations(), bank, bank, words, &report];
    ctx.recorder.dispatch(&EXPERTS_GEMV_ROUTED[kernel], &constants, &buffers, &params, groups)
}

/// Weights and shared expert of the sum over the experts of each row.
#[derive(Clone, Copy)]
pub(crate) struct ExpertSum {
    /// Router weights of the experts.
    pub(crate) weights: View,
    pub(crate) shared: Option<Shared>,
    /// Receives the sum.
    pub(crate) out: View,
}

/// Down projection of the experts that a router chose for a few rows. It can be fused with their
/// sum.
pub(crate) struct DownProjection {
    uses: BankUses,
    config: GemvConfig,
    /// Output of the gate and up stage, a row per expert.
    inner: View,
    /// Output of the down projection, a row per expert.
    parts: View,
    matrix: MatrixLocation,
    /// Threads of a workgroup, and row blocks that it computes of every expert.
    threads: u32,
    blocks: usize,
}

impl DownProjection {
    /// `None` if the fused kernel does not support the shapes.
    pub(crate) fn new(
        ctx: &OpContext<'_>,
        uses: &BankUses,
        matrix: MatrixLocation,
        [inner, parts]: [View; 2],
    ) -> Option<Self> {
        let activations = ActivationFormat::default_for(ctx.exact);
        let config = GemvConfig::for_rows(ctx, matrix.shape, activations)?;
        let (k, cols) = (uses.params.k as usize, matrix.shape.cols);
        let max_threads = match config.activations {
            ActivationFormat::F32 => THREADS,
            ActivationFormat::I16 | ActivationFormat::I8 => ctx.max_threads(),
        };
        if inner.row_stride != cols || !is_aligned(&matrix) {
            return None;
        }
        let sizes = SUM_THREADS.into_iter().filter(|(threads, _)| *threads <= max_threads);
        let mut plans = sizes.map(|(threads, min_groups)| {
            let blocks = ((threads / config.row_threads) as usize / k).max(1);
            (threads, min_groups, blocks)
        });
        let (threads, _, blocks) = plans.find(|&(threads, min_groups, blocks)| {
            let outputs = blocks * config.rows;
            let bytes = config.activations.workgroup_bytes(k * cols) + k * outputs * 4;
            bytes <= x_bytes(ctx)
                && k.max(outputs) <= threads as usize
                && matrix.shape.rows.div_ceil(outputs) >= min_groups
        })?;
        Some(Self { uses: uses.clone(), config, inner, parts, matrix, threads, blocks })
    }

    /// Whether the sum of `parts` into `out` can be fused.
    pub(crate) fn accepts_sum(&self, parts: View, out: View) -> bool {
        parts == self.parts
            && out.rows * self.uses.params.k as usize == self.uses.count
            && out.buffer != parts.buffer
            && out.buffer != self.inner.buffer
    }

    /// Encodes it without the sum.
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        let stage = ExpertStage {
            uses: &self.uses,
            x: self.inner,
            out: self.parts,
            kind: StageKind::Down,
            matrices: &[self.matrix],
            activation: GluCode::default(),
            router: None,
        };
        encode_stage(ctx, self.config.clone(), &stage, false)
    }

    /// Encodes it fused with the sum, which is added to `out`.
    pub(crate) fn encode_with_sum(
        &self,
        ctx: &mut OpContext<'_>,
        sum: ExpertSum,
    ) -> Result<(), Error> {
        let ExpertSum { weights, shared, out } = sum;
        let GemvConfig { kernel, block, row_threads, rows, ref constants, .. } = self.config;
        let MatrixLocation { shape, bias, .. } = self.matrix;
        let gate = shared.and_then(|s| s.gate);
        let store = &*ctx.store;
        let offset = |view: Option<View>| view.map_or(Ok(0), |view| store.view_offset(&view));
        let stride = |view: Option<View>| view.map_or(0, |view| view.row_stride as u32);
        let k = self.uses.params.k as usize;
        let row_groups = shape.rows.div_ceil(self.blocks * rows);
        let params = ExpertsDownSumParams {
            x: store.view_offset(&self.inner)?,
            assignments: self.uses.params,
            outputs: shape.rows as u32,
            down: slot_matrix(&self.matrix, block),
            expert_out: store.view_offset(&self.parts)?,
            expert_out_row_stride: self.parts.row_stride as u32,
            weights: store.view_offset(&weights)?,
            shared_out: offset(shared.map(|s| s.out))?,
            gate: offset(gate)?,
            out: store.view_offset(&out)?,
            rows: out.rows as u32,
            row_groups: row_groups as u32,
            x_stride: (self.inner.row_stride * k) as u32,
            weights_stride: weights.row_stride as u32,
            shared_stride: stride(shared.map(|s| s.out)),
            gate_stride: stride(gate),
            out_stride: out.row_stride as u32,
        };
        let constants = constants
            .clone()
            .with("WG", self.threads)
            .with("ROW_THREADS", row_threads)
            .with("ROWS", rows as u32)
            .with("TOP_K", k as u32)
            .with("ROW_GROUPS", self.blocks as u32)
            .with("BIAS_SCALAR", BiasSource::of_matrix(bias).code())
            .with("SHARED", shared.is_some().into())
            .with("GATED", gate.is_some().into());
        let BankUses { bank, words, .. } = &self.uses;
        let buffers = [store.activations(), bank, bank, words];
        let groups = out.rows * row_groups;
        ctx.recorder.dispatch(&EXPERTS_DOWN_SUM[kernel], &constants, &buffers, &params, groups)
    }
}
