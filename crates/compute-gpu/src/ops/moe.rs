//! Routed experts of a layer: choice of GEMM, GEMV or the general kernel, and uses by bank.

use moeflux_ops::{
    BATCH_INVARIANT_ROWS, Error, ExpertMatrices, ExpertUses, Op, View, seam::MatrixLocation,
};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{AssignmentParams, ExpertsGemvAnyParams, MatrixParams, ViewParams},
    },
    context::OpContext,
    gemm,
    gemv::{
        DownProjection,
        experts::{ExpertStage, StageKind, can_fuse_router, encode_experts},
    },
    operands::{BankUses, GluCode, UsesKind},
    topk::RouterTopK,
    weight_format::BiasSource,
};

pub(crate) static EXPERTS_GEMV_ANY: Kernel = kernel!(
    "experts_gemv_any",
    "experts/experts_gemv_any",
    ExpertsGemvAnyParams,
    [Write, Read, Read]
);

const THREADS: u32 = 256;

/// Encodes [`Op::Experts`]. `router` is the top-k of its rows, encoded before or with it.
///
/// Returns the down projection without encoding it if it may be fused with the sum that follows.
pub(crate) fn encode(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
    router: Option<&RouterTopK>,
) -> Result<Option<Box<DownProjection>>, Error> {
    let &Op::Experts { x, shape, activation, uses, inner, out, .. } = op else { return Ok(None) };
    let layout = shape.layout()?;
    let ExpertMatrices { gate, up, down } = layout.locations();
    let gate_up = [gate.unwrap_or(up), up];
    let (kind, inward) = match gate {
        Some(_) => (StageKind::GateUp, &gate_up[..]),
        None => (StageKind::Up, &gate_up[1..]),
    };
    let can_fuse = |ctx: &OpContext<'_>, router: &RouterTopK| match uses {
        ExpertUses::Routed { ids, table } if router.is_fusible() && ids == router.ids => {
            let is_of_one_bank = ctx.store.gpu_table(table)?.is_of_one_bank();
            Ok(is_of_one_bank && can_fuse_router(ctx, inward, router))
        }
        _ => Ok::<_, Error>(false),
    };
    let fused_router = match router {
        Some(router) if can_fuse(ctx, router)? => Some(router),
        Some(router) => {
            router.encode(ctx)?;
            None
        }
        None => None,
    };
    if !ctx.exact && gemm::encode_experts(ctx, op)? {
        return Ok(None);
    }
    let activation = GluCode::from(activation);
    let banks = uses_by_bank(ctx, uses)?;
    // The next op may be the sum over the experts of each row.
    let few = x.rows <= BATCH_INVARIANT_ROWS;
    let may_sum = match uses {
        ExpertUses::Routed { table, .. } => few && ctx.store.gpu_table(table)?.is_of_one_bank(),
        ExpertUses::Listed(_) => false,
    };
    let may_sum = may_sum && banks.len() == 1;
    for uses in &banks {
        let inner = inner.slice(uses.first_row, uses.count);
        let inward_stage = ExpertStage {
            uses,
            x,
            out: inner,
            kind,
            matrices: inward,
            activation,
            router: fused_router,
        };
        let down_stage = ExpertStage {
            x: inner,
            out,
            kind: StageKind::Down,
            matrices: &[down],
            router: None,
            ..inward_stage
        };
        if encode_experts(ctx, &inward_stage)? {
            if may_sum && let Some(down) = DownProjection::new(ctx, uses, down, [inner, out]) {
                return Ok(Some(Box::new(down)));
            }
            if encode_experts(ctx, &down_stage)? {
                continue;
            }
        }
        let gate = gate.map(|gate| (0, gate, x, inner));
        let others = [(1, up, x, inner), (2, down, inner, out)];
        for (stage, matrix, src, dst) in gate.into_iter().chain(others) {
            let dst = View { rows: out.rows, ..dst };
            let stage = GeneralStage { stage, matrix, src, dst, activation };
            encode_general(ctx, uses, &stage)?;
        }
    }
    Ok(None)
}

/// One matrix of experts for the general kernel.
struct GeneralStage {
    /// `STAGE`: 0 gate, 1 up and activation, 2 down.
    stage: u32,
    matrix: MatrixLocation,
    src: View,
    dst: View,
    activation: GluCode,
}

/// Encodes one matrix of experts with the general kernel.
fn encode_general(
    ctx: &mut OpContext<'_>,
    uses: &BankUses,
    stage: &GeneralStage,
) -> Result<(), Error> {
    let &GeneralStage { stage, matrix, src, dst, activation } = stage;
    let MatrixLocation { shape, planes, bias, first, step } = matrix;
    let params = ExpertsGemvAnyParams {
        x: ViewParams::new(ctx.store, &src)?,
        out: ViewParams::new(ctx.store, &dst)?,
        m: MatrixParams::new(planes.map(|offset| offset as u32), shape),
        assignments: uses.params,
        count: uses.count as u32,
        first_row: first as u32,
        row_step: step as u32,
        outputs: shape.rows as u32,
        cols: shape.cols as u32,
        bias: bias.map_or(0, |(_, offset)| offset as u32),
        alpha: activation.alpha,
        limit: activation.limit,
    };
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("ASSIGNMENTS", uses.kind as u32),
        ("STAGE", stage),
        ("ACTIVATION", activation.kind),
        ("BIAS_SCALAR", BiasSource::of_matrix(bias).code()),
    ])
    .format(shape.format);
    let blocks = shape.rows.div_ceil((THREADS / ctx.target().team) as usize);
    let buffers = [ctx.store.activations(), &uses.bank, &uses.words];
    ctx.recorder.dispatch(&EXPERTS_GEMV_ANY, &constants, &buffers, &params, uses.count * blocks)
}

/// Groups expert uses by bank.
fn uses_by_bank(ctx: &mut OpContext<'_>, uses: ExpertUses<'_>) -> Result<Vec<BankUses>, Error> {
    let (store, recorder) = (&*ctx.store, &mut *ctx.recorder);
    match uses {
        ExpertUses::Listed(uses) => {
            recorder.reserve_upload(uses.len() * 3 * store.host_reads())?;
            let mut banks = Vec::new();
            let mut first_row = 0;
            for run in uses.chunk_by(|a, b| a.slot.bank == b.slot.bank) {
                let bank = run[0].slot.bank.index;
                let reads = if store.is_on_host(bank) { store.host_reads() } else { 1 };
                // Other experts first, whose results are overwritten.
                for shift in (0..reads).rev() {
                    let mut words = Vec::with_capacity(run.len() * 3);
                    for used in run {
                        let offset = store.slot_offset(store.other_slot(used.slot, shift)?);
                        words.extend([offset, used.row as u32, used.out_row as u32]);
                    }
                    let list = recorder.upload(words);
                    banks.push(BankUses {
                        bank: store.bank_buffer(bank)?,
                        count: run.len(),
                        first_row,
                        kind: UsesKind::Listed,
                        words: recorder.upload_buffer().clone(),
                        params: AssignmentParams { list, row_stride: 0, k: 1, bank: 0 },
                        table_entries: 0,
                        one_row: false,
                    });
                }
                first_row += run.len();
            }
            Ok(banks)
        }
        ExpertUses::Routed { ids, table } => {
            let list = store.view_offset(&ids)?;
            let table = store.gpu_table(table)?;
            let bank_uses = |bank: &u16| {
                Ok(BankUses {
                    bank: store.bank_buffer(*bank)?,
                    count: ids.rows * ids.width,
                    first_row: 0,
                    kind: UsesKind::Routed,
                    words: table.buffer.clone(),
                    params: AssignmentParams {
                        list,
                        row_stride: ids.row_stride as u32,
                        k: ids.width as u32,
                        bank: (*bank).into(),
                    },
                    table_entries: if table.is_of_one_bank() { table.slots.len() } else { 0 },
                    one_row: ids.rows == 1,
                })
            };
            // Other experts first, whose results are overwritten.
            let slowed = table.other_slots.iter().flat_map(|words| {
                let on_host = table.banks.iter().filter(|bank| store.is_on_host(**bank));
                on_host.map(move |bank| (bank, words))
            });
            let slowed = slowed.map(|(bank, words)| {
                Ok(BankUses { words: words.clone(), table_entries: 0, ..bank_uses(bank)? })
            });
            slowed.chain(table.banks.iter().map(bank_uses)).collect()
        }
    }
}
