//! GEMM: tiles of many rows, of dense and of expert weights.

use std::collections::BTreeMap;

use moeflux_ops::{
    AdapterKind, Affine, BlockScaled, BlockType, Element, Error, ExpertMatrices, ExpertUse,
    ExpertUses, Format, MatrixShape, Op, SlotTable, View, seam::MatrixLocation,
};

use super::super::{
    context::OpContext,
    gemv::{MatMulOperands, NormPrologue},
    operands::{GluCode, WeightShards},
    weight_format::{BiasSource, Block32},
};
use crate::{
    kernel::{Constants, Kernel, kernel},
    params::{ActivationsF16Params, GemmParams, MatrixParams, SortAssignmentsParams, ViewParams},
    store::DeviceBuffer,
};

pub(crate) static ACTIVATIONS_F16: Kernel =
    kernel!("activations_f16", "gemm/activations_f16", ActivationsF16Params, [Write, Write]);
pub(crate) static SORT_ASSIGNMENTS: Kernel = kernel!(
    "sort_assignments",
    "gemm/sort_assignments",
    SortAssignmentsParams,
    [Write, Read, Write]
);
/// Number of kernels with one way to multiply.
const KERNELS: usize = Block32::COUNT + 1;

/// Kernels with one way to multiply: one per [`Block32`], in its order, and one for all other
/// layouts. Each codec comes with the file that dequantizes its blocks.
macro_rules! kernels {
    ($root:literal, $name:literal, [$($codec:literal, $dequantize:literal;)*]) => {
        [
            $(kernel!(
                concat!($name, " ", $codec),
                $root,
                GemmParams,
                {
                    weights: "gemm/weights_blocks",
                    codec: concat!("codec/", $codec),
                    dequantize: concat!("gemm/dequantize_", $dequantize),
                },
                [Write, Read, Read, Read, Read, Read]
            ),)*
            kernel!(
                concat!($name, " any"),
                $root,
                GemmParams,
                { weights: "gemm/weights_any" },
                [Write, Read, Read, Read, Read, Read]
            ),
        ]
    };
}

/// Kernels on cooperative matrices.
macro_rules! cooperative {
    ($root:literal, $name:literal) => {
        kernels!($root, $name, [
            "q4", "q4";
            "q8", "q8";
            "quants", "quants";
            "e2m1", "minifloat";
            "simple_blocks", "blocks";
            "k_quants", "blocks";
            "codebooks", "blocks";
            "few_bits", "blocks";
            "plain", "plain";
            "e4m3", "minifloat";
        ])
    };
}

pub(crate) static COOPERATIVE: [Kernel; KERNELS] =
    cooperative!("gemm/gemm_cooperative", "gemm_cooperative");
pub(crate) static FEW_ROWS: [Kernel; KERNELS] = cooperative!("gemm/gemm_few_rows", "gemm_few_rows");
pub(crate) static REGISTERS: [Kernel; KERNELS] = kernels!("gemm/gemm_registers", "gemm_registers", [
    "q4", "quants";
    "q8", "quants";
    "quants", "quants";
    "e2m1", "minifloat";
    "simple_blocks", "blocks";
    "k_quants", "blocks";
    "codebooks", "blocks";
    "few_bits", "blocks";
    "plain", "plain";
    "e4m3", "minifloat";
]);
/// Index of the kernel for layouts without a [`Block32`].
const ANY_LAYOUT: usize = Block32::COUNT;

/// Minimum rows for GEMM: of a matrix, and of the input of experts, each of which gets few of them.
const MIN_ROWS: usize = 16;
const MIN_EXPERT_ROWS: usize = 32;
/// Minimum rows of a tile.
const MIN_TILE_ROWS: usize = 16;
/// f16 rows are zero-padded to a multiple of this.
const PADDED_COLS: usize = 64;
/// Threads of a workgroup without cooperative matrices.
const THREADS: u32 = 256;
/// Tiles of cooperative matrices. A subgroup computes 64 outputs of 16 to 64 rows.
const SMALL: TileShape = TileShape { rows: 64, outputs: 64, step: 64, subgroups: 4 };
const MEDIUM: TileShape = TileShape { rows: 64, outputs: 128, step: 64, subgroups: 4 };
const WIDE: TileShape = TileShape { rows: 64, outputs: 256, step: 32, subgroups: 8 };
const LARGE: TileShape = TileShape { rows: 128, outputs: 256, step: 32, subgroups: 8 };
/// Tiles for adapters with little workgroup memory.
const LOW_MEMORY_WIDE: TileShape = TileShape { rows: 32, outputs: 256, step: 32, subgroups: 4 };
const LOW_MEMORY: TileShape = TileShape { rows: 64, outputs: 128, step: 32, subgroups: 4 };
/// Bytes of workgroup memory that the kernels for few rows need.
pub(super) const COOPERATIVE_BYTES: usize = 46 << 10;
/// Number of tiles that keeps a card busy.
const BUSY_TILES: usize = 90;
/// Workgroups that a card computes at once; fewer take as long.
const FULL_GRID: usize = 264;
/// Mean rows of an expert up to which tiles are wide instead of large.
const MAX_WIDE_ROWS: usize = 40;

/// Rows times outputs of a matrix from which GEMM beats GEMV on a card with cooperative matrices.
/// GEMM is slower the longer a weight takes to dequantize.
const fn min_outputs(block: Option<Block32>) -> usize {
    match block {
        Some(Block32::Q4 | Block32::Q8) => 64 << 10,
        Some(Block32::E2m1) => 44 << 10,
        _ => 36 << 10,
    }
}

/// Mean uses of an expert from which GEMM beats GEMV on such a card, as the kernel benchmark shows
/// for 16 to 64 rows with 128 experts on an H200: fewest for formats whose GEMV is bound by
/// arithmetic.
fn min_uses(format: Format) -> f64 {
    match format {
        Format::Blocks(kind) => match kind {
            BlockType::Q4_0
            | BlockType::Q4_1
            | BlockType::Q5_0
            | BlockType::Q5_1
            | BlockType::Q8_0 => 7.5,
            BlockType::Q2K | BlockType::Q4K => 6.0,
            BlockType::Q5K => 5.0,
            _ => 3.5,
        },
        Format::Affine(Affine { bits: 4, .. }) => 8.0,
        Format::Affine(Affine { bits: 8, .. }) => 6.0,
        Format::Affine(_) => 5.5,
        Format::BlockScaled(BlockScaled { element: Element::E2M1, .. }) | Format::Plain(_) => 4.0,
        Format::BlockScaled(_) | Format::ScaledBlocks(_) => 3.5,
    }
}

/// Whether `rows` rows of a matrix are a GEMM of many rows.
pub(crate) fn pays(ctx: &OpContext<'_>, shape: MatrixShape, rows: usize) -> bool {
    rows >= MIN_ROWS && (!has_measured_thresholds(ctx) || pays_for_rows(shape, rows))
}

/// Whether GEMM with cooperative matrices is faster for `rows` rows of a matrix.
fn pays_for_rows(shape: MatrixShape, rows: usize) -> bool {
    rows * shape.rows >= min_outputs(Block32::for_shape(shape))
}

/// Whether GEMM with cooperative matrices is faster for `uses` uses of experts. `inward`: shape of
/// gate and up together, or of up alone.
fn pays_for_uses(inward: MatrixShape, uses: usize, experts: usize) -> bool {
    let tiles_per_expert = inward.rows.div_ceil(WIDE.outputs as usize).max(1);
    uses as f64 >= experts.max(FULL_GRID / tiles_per_expert) as f64 * min_uses(inward.format)
}

/// Size of a tile: rows by outputs, `step` inputs at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileShape {
    rows: u32,
    outputs: u32,
    step: u32,
    subgroups: u32,
}

/// Kernels and the tile that a workgroup computes.
#[derive(Clone, Copy, Debug)]
struct GemmTile {
    kernels: &'static [Kernel; KERNELS],
    rows: u32,
    outputs: u32,
    step: u32,
    threads: u32,
}

impl GemmTile {
    /// Tile for one matrix. Smaller ones where large ones would leave a part of the card idle.
    fn for_matrix(ctx: &OpContext<'_>, rows: usize, outputs: usize) -> Self {
        let busy = |tile: TileShape| {
            rows.div_ceil(tile.rows as usize) * outputs.div_ceil(tile.outputs as usize)
                >= BUSY_TILES
        };
        let shape = match () {
            () if !busy(MEDIUM) => SMALL,
            () if rows > MEDIUM.rows as usize && busy(LARGE) => LARGE,
            () => MEDIUM,
        };
        Self::supported(ctx, rows, shape)
    }

    /// Tile for experts. One with more uses than rows of a tile has its weights dequantized again.
    fn for_experts(ctx: &OpContext<'_>, uses: usize, experts: usize) -> Self {
        let rows = uses.div_ceil(experts);
        Self::supported(ctx, rows, if rows > MAX_WIDE_ROWS { LARGE } else { WIDE })
    }

    /// Tile for about `rows` rows, of this shape if the adapter supports it.
    fn supported(ctx: &OpContext<'_>, rows: usize, shape: TileShape) -> Self {
        let target = ctx.target();
        let bytes = ctx.workgroup_bytes();
        if !target.cooperative || !target.team.is_multiple_of(32) || bytes < 32 << 10 {
            let rows = match rows {
                ..=16 => 16,
                17..=32 => 32,
                _ if bytes < 20 << 10 => 32,
                _ => 64,
            };
            return Self { kernels: &REGISTERS, rows, outputs: 64, step: 32, threads: THREADS };
        }
        let TileShape { rows, outputs, step, subgroups } = match rows {
            _ if bytes >= 48 << 10 || shape == SMALL => shape,
            ..=32 => LOW_MEMORY_WIDE,
            _ => LOW_MEMORY,
        };
        Self { kernels: &COOPERATIVE, rows, outputs, step, threads: subgroups * target.team }
    }
}

/// f16 activations in scratch: word offsets of scales and rows, and words of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct F16Rows {
    pub(super) scales: usize,
    pub(super) rows: usize,
    pub(super) row_words: usize,
}

/// Words of an f16 row.
const fn row_words(cols: usize) -> usize {
    cols.next_multiple_of(PADDED_COLS) / 2
}

impl F16Rows {
    /// Rows at the start of the scratch, after their scales.
    pub(super) const fn at_start(rows: usize, row_words: usize) -> Self {
        Self { scales: 0, rows: rows.next_multiple_of(4), row_words }
    }

    /// Words of scratch for `rows` rows at its start.
    pub(super) const fn words(&self, rows: usize) -> usize {
        self.rows + rows * self.row_words
    }
}

/// Encodes [`Op::MatMul`]. Returns false if it has too few rows for GEMM.
pub(in crate::ops) fn encode_matmul(
    ctx: &mut OpContext<'_>,
    operands: MatMulOperands,
) -> Result<bool, Error> {
    let MatMulOperands { x, weight, bias, out, .. } = operands;
    let f16_rows = F16Rows::at_start(x.rows, row_words(x.width));
    let scratch_words = f16_rows.words(x.rows);
    let WeightShards { shape, shards } = WeightShards::new(ctx.store, weight)?;
    if !pays(ctx, shape, x.rows) || !ctx.store.can_bind(scratch_words) {
        return Ok(false);
    }
    let scratch = ctx.scratch(scratch_words)?;
    convert_rows(ctx, x, None, &scratch, f16_rows)?;
    let bias = bias.map(|b| ctx.store.buffer_offset(b)).transpose()?;
    for (arena, shard) in shards {
        let product = GemmProduct {
            tile: GemmTile::for_matrix(ctx, x.rows, shard.rows),
            uses: TileUses { kind: TileKind::Matrix, tiles: 0, list: 0, bank: 0 },
            rows: x.rows,
            shape,
            planes: shard.planes,
            up: None,
            bias: match bias {
                None => GemmBias::NONE,
                Some(bias) => GemmBias {
                    source: BiasSource::Activations,
                    offsets: [bias + shard.first_row as u32, 0],
                },
            },
            activation: GluCode::default(),
            outputs: shard.rows,
        };
        let buffers = GemmBuffers { weights: &arena, scratch: &scratch, words: &scratch };
        let out = out.columns(shard.first_row, shard.rows);
        encode_product(ctx, &product, buffers, f16_rows, out)?;
    }
    Ok(true)
}

/// Encodes [`Op::Experts`]. Returns false if it has too few rows for GEMM, or gate and up differ in
/// shape.
pub(in crate::ops) fn encode_experts(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<bool, Error> {
    let &Op::Experts { x, shape, activation, experts, uses, inner, out, .. } = op else {
        return Ok(false);
    };
    let [x_words, inner_words] = [x.width, inner.width].map(row_words);
    // Words of the tile table of routed uses, of scales, and of f16 rows.
    let routed = match uses {
        ExpertUses::Routed { table, .. } => Some(ctx.store.gpu_table(table)?.slots.len()),
        ExpertUses::Listed(_) => None,
    };
    let scratch_words = |uses: usize| {
        let table = routed.map_or(0, |experts| 2 * uses + (uses / MIN_TILE_ROWS + experts) * 4);
        let scales = x.rows.max(uses).next_multiple_of(4);
        (table.next_multiple_of(4), scales, (x.rows * x_words).max(uses * inner_words))
    };
    // The decision is the same for all ops among which the uses of a prefill chunk are divided.
    let max_words = scratch_words(out.rows);
    let inner_matrices = 1 + usize::from(shape.gate.is_some());
    let outputs = inner_matrices * inner.width;
    let inward = MatrixShape { rows: outputs, ..shape.up };
    let too_few = match has_measured_thresholds(ctx) {
        true => x.rows < MIN_ROWS || !pays_for_uses(inward, out.rows, experts),
        false => x.rows < MIN_EXPERT_ROWS,
    };
    if too_few
        || shape.gate.is_some_and(|gate| gate != shape.up)
        || !ctx.store.can_bind(max_words.0 + max_words.1 + max_words.2)
    {
        return Ok(false);
    }
    let count = uses.len();
    if count == 0 {
        return Ok(true);
    }
    let (table_words, scale_words, f16_words) = scratch_words(count);
    let scratch = ctx.scratch(table_words + scale_words + f16_words)?;
    let f16_rows =
        |row_words| F16Rows { scales: table_words, rows: table_words + scale_words, row_words };
    let (tile, plan) = match uses {
        ExpertUses::Listed(uses) => {
            let experts = uses.chunk_by(|a, b| a.slot == b.slot).count();
            let tile = GemmTile::for_experts(ctx, count, experts);
            (tile, plan_listed_tiles(ctx, uses, tile.rows as usize)?)
        }
        ExpertUses::Routed { ids, table } => {
            let tile = GemmTile::for_experts(ctx, count, routed.unwrap_or(1));
            (tile, plan_routed_tiles(ctx, ids, table, tile.rows, &scratch)?)
        }
    };
    let ExpertMatrices { gate, up, down } = shape.layout()?.locations();
    let first = gate.unwrap_or(up);
    convert_rows(ctx, x, None, &scratch, f16_rows(x_words))?;
    for bank in &plan.banks {
        let product = GemmProduct {
            tile,
            uses: bank.uses(TileKind::GateUp, plan.list),
            rows: bank.tiles,
            shape: first.shape,
            planes: first.planes.map(|offset| offset as u32),
            up: gate.is_some().then_some(&up),
            bias: GemmBias::of_matrices([&first, &up]),
            activation: activation.into(),
            outputs,
        };
        let buffers = GemmBuffers { weights: &bank.buffer, scratch: &scratch, words: &plan.words };
        encode_product(ctx, &product, buffers, f16_rows(x_words), inner)?;
    }
    let inner_rows = View { rows: count, ..inner };
    convert_rows(ctx, inner_rows, None, &scratch, f16_rows(inner_words))?;
    for bank in &plan.banks {
        let product = GemmProduct {
            tile,
            uses: bank.uses(TileKind::Down, plan.list),
            rows: bank.tiles,
            shape: down.shape,
            planes: down.planes.map(|offset| offset as u32),
            up: None,
            bias: GemmBias::of_matrices([&down, &down]),
            activation: GluCode::default(),
            outputs: out.width,
        };
        let buffers = GemmBuffers { weights: &bank.buffer, scratch: &scratch, words: &plan.words };
        encode_product(ctx, &product, buffers, f16_rows(inner_words), out)?;
    }
    Ok(true)
}

/// Bias of one or two matrices.
#[derive(Clone, Copy, Debug)]
struct GemmBias {
    source: BiasSource,
    offsets: [u32; 2],
}

impl GemmBias {
    const NONE: Self = Self { source: BiasSource::None, offsets: [0; 2] };

    /// Biases stored with two matrices.
    fn of_matrices(matrices: [&MatrixLocation; 2]) -> Self {
        match matrices.map(|matrix| matrix.bias) {
            [Some((scalar, first)), Some((_, second))] => {
                Self { source: BiasSource::Weights(scalar), offsets: [first as u32, second as u32] }
            }
            _ => Self::NONE,
        }
    }
}

/// `ALIGNED` of `weights_any.wgsl`: whether rows and quants start at whole words.
fn is_word_aligned(shape: MatrixShape, weights: u32) -> bool {
    let whole = match shape.format {
        Format::Affine(Affine { bits, .. }) => bits % 4 == 0,
        Format::Plain(_) | Format::BlockScaled(_) => true,
        Format::Blocks(_) | Format::ScaledBlocks(_) => false,
    };
    whole && weights.is_multiple_of(4) && shape.format.row_bytes(shape.cols).is_multiple_of(4)
}

/// `ASSIGNMENTS` of `gemm_tile.wgsl`: which rows a tile reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TileKind {
    /// Rows of `x` to rows of `out`; the weights are in an arena.
    Matrix = 0,
    /// Rows of `x` to `inner`, in the order of the list of uses.
    GateUp = 1,
    /// Rows of `inner` to rows of `out`.
    Down = 2,
}

/// Kind of a product's tiles and where they are listed.
#[derive(Clone, Copy, Debug)]
struct TileUses {
    kind: TileKind,
    /// First word of the tile table.
    tiles: u32,
    /// First word of the list of uses.
    list: u32,
    bank: u32,
}

/// Tiles of the experts of one bank.
struct BankTiles {
    buffer: DeviceBuffer,
    bank: u16,
    /// First word of the tile table.
    table: u32,
    /// Entries of the table.
    tiles: usize,
}

impl BankTiles {
    const fn uses(&self, kind: TileKind, list: u32) -> TileUses {
        TileUses { kind, tiles: self.table, list, bank: self.bank as u32 }
    }
}

/// Tiles of an op, by bank.
struct TilePlan {
    /// Buffer with the tile tables and the list of uses.
    words: DeviceBuffer,
    list: u32,
    banks: Vec<BankTiles>,
}

/// Plans the tiles of listed uses on the host.
fn plan_listed_tiles(
    ctx: &mut OpContext<'_>,
    uses: &[ExpertUse],
    tile_rows: usize,
) -> Result<TilePlan, Error> {
    let mut banks: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
    let mut first = 0;
    for run in uses.chunk_by(|a, b| a.slot == b.slot) {
        let slot = run[0].slot;
        let entries = banks.entry(slot.bank.index).or_default();
        for tile in run.chunks(tile_rows) {
            let offset = ctx.store.slot_offset(slot);
            entries.extend([offset, slot.bank.index.into(), first as u32, tile.len() as u32]);
            first += tile.len();
        }
    }
    let recorder = &mut *ctx.recorder;
    recorder.reserve_upload(uses.len() * 2 + banks.values().map(Vec::len).sum::<usize>())?;
    let list = recorder.upload(uses.iter().flat_map(|u| [u.row as u32, u.out_row as u32]));
    let banks = banks.into_iter().map(|(bank, entries)| {
        let tiles = entries.len() / 4;
        let buffer = ctx.store.bank_buffer(bank)?;
        Ok(BankTiles { buffer, bank, table: recorder.upload(entries), tiles })
    });
    let banks = banks.collect::<Result<_, Error>>()?;
    Ok(TilePlan { words: recorder.upload_buffer().clone(), list, banks })
}

/// Plans the tiles of routed uses on the card, which sorts the router's ids by expert. List and
/// table are at the start of the scratch.
fn plan_routed_tiles(
    ctx: &mut OpContext<'_>,
    ids: View,
    table: SlotTable,
    tile_rows: u32,
    scratch: &DeviceBuffer,
) -> Result<TilePlan, Error> {
    let table = ctx.store.gpu_table(table)?;
    let experts = table.slots.len();
    let uses = ids.rows * ids.width;
    let params = SortAssignmentsParams {
        ids: ctx.store.view_offset(&ids)?,
        ids_row_stride: ids.row_stride as u32,
        k: ids.width as u32,
        assignments: uses as u32,
        list: 0,
        table: 2 * uses as u32,
        experts: experts as u32,
    };
    let constants = Constants::new(&[("WG", THREADS), ("TILE_M", tile_rows)]);
    let buffers = [ctx.store.activations(), &table.buffer, scratch];
    ctx.recorder.dispatch(&SORT_ASSIGNMENTS, &constants, &buffers, &params, experts)?;
    let bank_tiles = |bank: &u16| {
        let tiles = uses / tile_rows as usize + experts;
        let buffer = ctx.store.bank_buffer(*bank)?;
        Ok(BankTiles { buffer, bank: *bank, table: 2 * uses as u32, tiles })
    };
    let banks = table.banks.iter().map(bank_tiles).collect::<Result<_, Error>>()?;
    Ok(TilePlan { words: scratch.clone(), list: 0, banks })
}

/// One dispatch of `gemm_tile.wgsl`.
struct GemmProduct<'a> {
    tile: GemmTile,
    uses: TileUses,
    /// Rows, or entries of a tile table.
    rows: usize,
    /// Shape and plane offsets of the matrix, or of gate.
    shape: MatrixShape,
    planes: [u32; 3],
    up: Option<&'a MatrixLocation>,
    bias: GemmBias,
    activation: GluCode,
    /// Outputs; gate and up outputs are counted together.
    outputs: usize,
}

/// Buffers of a dispatch besides the activations.
#[derive(Clone, Copy)]
struct GemmBuffers<'a> {
    weights: &'a DeviceBuffer,
    /// f16 rows and their scales.
    scratch: &'a DeviceBuffer,
    /// Tile tables and list of uses.
    words: &'a DeviceBuffer,
}

/// Whether thresholds beyond [`MIN_ROWS`] and [`MIN_EXPERT_ROWS`] apply. They were measured with
/// cooperative matrices. Software adapters compute one workgroup after another, so only the amount
/// of work counts.
fn has_measured_thresholds(ctx: &OpContext<'_>) -> bool {
    ctx.target().cooperative && ctx.card.adapter.kind != AdapterKind::Software
}

/// Converts rows to f16 in scratch, each with a scale: those of `x`, or of a norm whose output `x`
/// is.
pub(super) fn convert_rows(
    ctx: &mut OpContext<'_>,
    x: View,
    norm: Option<&NormPrologue>,
    scratch: &DeviceBuffer,
    dst: F16Rows,
) -> Result<(), Error> {
    let store = &*ctx.store;
    let params = ActivationsF16Params {
        x: ViewParams::new(store, &norm.map_or(x, |norm| norm.x))?,
        rows: x.rows as u32,
        width: x.width as u32,
        factors: dst.scales as u32,
        x_f16: dst.rows as u32,
        words: dst.row_words as u32,
        normed: norm.map_or(Ok(0), |norm| store.view_offset(&norm.out))?,
        norm_weight: store.optional_offset(norm.map(|norm| norm.weight))?,
        eps: norm.map_or(0.0, |norm| norm.eps),
    };
    // Few rows wait for the slowest thread.
    let threads = if x.rows <= MIN_EXPERT_ROWS { ctx.max_threads().min(1024) } else { THREADS };
    let constants = Constants::new(&[("WG", threads), ("NORM", norm.is_some().into())]);
    let buffers = [store.activations(), scratch];
    ctx.recorder.dispatch(&ACTIVATIONS_F16, &constants, &buffers, &params, x.rows)
}

/// Encodes one product of f16 rows.
fn encode_product(
    ctx: &mut OpContext<'_>,
    product: &GemmProduct<'_>,
    buffers: GemmBuffers<'_>,
    x: F16Rows,
    out: View,
) -> Result<(), Error> {
    let &GemmProduct { tile, uses, rows, shape, planes, up, bias, activation, outputs } = product;
    let up_planes = up.map_or(planes, |up| up.planes.map(|offset| offset as u32));
    let (row_step, up_first) = up.map_or((1, 0), |up| (up.step, up.first));
    let blocks = [planes, up_planes]
        .map(|planes| Block32::for_planes(shape, planes.map(|offset| offset as usize)));
    let kernel = if let [Some(block), Some(_)] = blocks { block.index() } else { ANY_LAYOUT };
    let aligned = is_word_aligned(shape, planes[0]) && is_word_aligned(shape, up_planes[0]);
    let [up_weights, up_scales, up_biases] = up_planes;
    let [bias_offset, up_bias] = bias.offsets;
    let params = GemmParams {
        out: ViewParams::new(ctx.store, &out)?,
        m: MatrixParams::new(planes, shape),
        up_weights,
        up_scales,
        up_biases,
        // Rows of `x` are read by vectors of four f16 values, two words.
        x: (x.rows / 2) as u32,
        x_row_vecs: (x.row_words / 2) as u32,
        factors: x.scales as u32,
        rows: rows as u32,
        outputs: outputs as u32,
        cols: shape.cols as u32,
        table: uses.tiles,
        list: uses.list,
        bank: uses.bank,
        row_step: row_step as u32,
        up_first: up_first as u32,
        bias: bias_offset,
        up_bias,
        alpha: activation.alpha,
        limit: activation.limit,
    };
    let constants = Constants::new(&[
        ("WG", tile.threads),
        ("TILE_M", tile.rows),
        ("TILE_N", tile.outputs),
        ("TILE_K", tile.step),
        ("ASSIGNMENTS", uses.kind as u32),
        ("GATED", up.is_some().into()),
        ("ACTIVATION", activation.kind),
        ("BIAS", bias.source.code()),
        ("ALIGNED", aligned.into()),
    ])
    .format(shape.format);
    let tiles = match uses.kind {
        TileKind::Matrix => rows.div_ceil(tile.rows as usize),
        TileKind::GateUp | TileKind::Down => rows,
    };
    let groups = tiles * outputs.div_ceil(tile.outputs as usize);
    let GemmBuffers { weights, scratch, words } = buffers;
    let buffers = [ctx.store.activations(), weights, scratch, scratch, words, weights];
    ctx.recorder.dispatch(&tile.kernels[kernel], &constants, &buffers, &params, groups)
}

#[cfg(test)]
mod tests {
    use super::{super::few_rows, *};
    use crate::kernel::{Target, tests::valid};
    use moeflux_ops::Scalar;

    /// Cases from measurements.
    #[test]
    fn few_uses_of_many_experts_use_gemv() {
        let gate = |rows, cols, format| MatrixShape { rows, cols, format };
        let gate_up = |rows: usize, cols, format| gate(2 * rows, cols, format);
        let qwen3 = gate_up(768, 2048, affine(4));
        let cases = [
            (qwen3, 48 * 8, 128, false),
            (qwen3, 128 * 8, 128, true),
            (gate_up(512, 2048, affine(4)), 96 * 8, 256, false),
            (gate_up(512, 2048, affine(4)), 256 * 8, 256, true),
            (gate_up(2880, 2880, Format::MXFP4), 16 * 4, 32, false),
            (gate_up(2880, 2880, Format::MXFP4), 32 * 4, 32, true),
            (gate_up(768, 2048, Format::Blocks(BlockType::Q4_0)), 64 * 8, 128, false),
            (gate_up(768, 2048, Format::Blocks(BlockType::Q4K)), 64 * 8, 128, false),
            (gate_up(768, 2048, Format::Blocks(BlockType::Q6K)), 48 * 8, 128, false),
            (gate_up(768, 2048, Format::Blocks(BlockType::Q6K)), 64 * 8, 128, true),
            // Too few experts to fill a card.
            (qwen3, 16 * 8, 16, false),
            (qwen3, 128 * 8, 16, true),
        ];
        for (gate, uses, experts, tiles) in cases {
            assert_eq!(
                pays_for_uses(gate, uses, experts),
                tiles,
                "{gate:?}, {uses} uses of {experts}"
            );
        }
        assert!(
            !pays_for_rows(gate(2048, 4096, affine(4)), 24)
                && pays_for_rows(gate(2048, 4096, affine(4)), 32)
        );
    }

    #[test]
    fn tiles_of_few_rows_are_valid() {
        let target = Target { team: 32, subgroups: true, dot8: true, f16: true, cooperative: true };
        let formats = [4, 8].map(affine).into_iter().chain([Format::MXFP4, Format::MXFP8]);
        for format in formats.chain([BlockType::Q6K, BlockType::IQ3S].map(Format::Blocks)) {
            let block = Block32::for_shape(MatrixShape { rows: 1, cols: 256, format })
                .expect("whole blocks");
            for tile_rows in [16, 32] {
                let constants = few_rows::constants(tile_rows, BiasSource::None, true);
                let kernel = &FEW_ROWS[block.index()];
                valid(&target.text(kernel, &constants.format(format)), COOPERATIVE_BYTES as u32);
            }
        }
    }

    #[test]
    fn cooperative_tiles_are_valid() {
        let target = Target { team: 32, subgroups: true, dot8: true, f16: true, cooperative: true };
        let plain = [Scalar::F32, Scalar::F16, Scalar::BF16].map(Format::Plain);
        let formats = [Format::MXFP4, Format::NVFP4, Format::MXFP8].into_iter().chain(plain);
        let blocks = [BlockType::Q5_1, BlockType::Q6K, BlockType::IQ3S, BlockType::TQ1_0];
        let formats = formats.chain(blocks.map(Format::Blocks));
        for format in formats.chain([2, 3, 4, 5, 6, 8].map(affine)) {
            let block = Block32::for_shape(MatrixShape { rows: 1, cols: 64, format })
                .expect("whole blocks");
            let low_memory = [SMALL, LOW_MEMORY_WIDE, LOW_MEMORY].map(|shape| (shape, 32 << 10));
            let large = [MEDIUM, WIDE, LARGE].map(|shape| (shape, 48 << 10));
            for (TileShape { rows, outputs, step, subgroups }, memory) in
                low_memory.into_iter().chain(large)
            {
                let constants = Constants::new(&[
                    ("WG", subgroups * target.team),
                    ("TILE_M", rows),
                    ("TILE_N", outputs),
                    ("TILE_K", step),
                    ("ASSIGNMENTS", 1),
                    ("GATED", 1),
                    ("ACTIVATION", 0),
                    ("BIAS", 9),
                    ("ALIGNED", 1),
                ]);
                for kernel in [&COOPERATIVE[block.index()], &COOPERATIVE[ANY_LAYOUT]] {
                    valid(&target.text(kernel, &constants.clone().format(format)), memory);
                }
            }
        }
    }

    fn affine(bits: u8) -> Format {
        Format::Affine(Affine { bits, group: 64, scale: Scalar::BF16 })
    }
}
