//! GEMV: products of one to four rows.

use moeflux_ops::{
    Activation, BATCH_INVARIANT_ROWS, Buffer, Error, MatrixShape, PerPlane, View, Weight,
    seam::MatrixLocation,
};

use super::{
    super::{
        context::OpContext,
        gemm::{
            self,
            few_rows::{self, FewRowsMatrix, FewRowsProduct},
        },
        norm::{NormDispatch, NormKind},
        operands::{BankUses, WeightShards},
        weight_format::Block32,
    },
    experts::{ExpertStage, StageKind, encode_stage},
};
use crate::{
    kernel::{Constants, Kernel, kernel},
    params::{
        ExpertsDownSumParams, ExpertsGemvParams, GemvFusedMatrixParams, GemvFusedParams,
        GemvMatrixParams, GemvParams,
    },
    store::{DeviceBuffer, weights::WeightShard},
};

/// Number of kernels of a product: one per [`Block32`] with f32 activations, then one for each with
/// integers.
const KERNELS: usize = 2 * Block32::COUNT - 2;

/// One kernel per [`Block32`] with f32 activations, then those with integer activations. Each codec
/// comes with the place of its scales.
macro_rules! kernels {
    ($name:literal, $root:literal, $params:ident, $binds:tt, $bindings:tt) => {
        [
            kernels!(@ $name, "q4", "planes", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "q8", "planes", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "quants", "planes", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "e2m1", "planes", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "simple_blocks", "blocks", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "k_quants", "blocks", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "codebooks", "blocks", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "few_bits", "blocks", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "plain", "planes", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "e4m3", "planes", "f32", $root, $params, $binds, $bindings),
            kernels!(@ $name, "q4", "planes", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "q8", "planes", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "quants", "planes", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "e2m1", "planes", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "simple_blocks", "blocks", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "k_quants", "blocks", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "codebooks", "blocks", "int", $root, $params, $binds, $bindings),
            kernels!(@ $name, "few_bits", "blocks", "int", $root, $params, $binds, $bindings),
        ]
    };
    (
        @ $name:literal, $codec:literal, $scales:literal, $activations:literal,
        $root:literal, $params:ident,
        { $($interface:ident: $file:literal),* }, $bindings:tt
    ) => {
        kernel!(
            concat!($name, " ", $codec, " ", $activations),
            $root,
            $params,
            {
                codec: concat!("codec/", $codec),
                scales: concat!("codec/scales_in_", $scales),
                activations: concat!("gemv/activations_", $activations),
                $($interface: $file),*
            },
            $bindings
        )
    };
}

pub(crate) static GEMV: [Kernel; KERNELS] = kernels!(
    "gemv",
    "gemv/gemv",
    GemvParams,
    { matrices: "gemv/matrix_single" },
    [Write, Read, Read]
);
pub(crate) static GEMV_FUSED: [Kernel; KERNELS] = kernels!(
    "gemv_fused",
    "gemv/gemv",
    GemvFusedParams,
    { matrices: "gemv/matrices_fused" },
    [Write, Read, Read]
);
pub(crate) static EXPERTS_GEMV: [Kernel; KERNELS] = kernels!(
    "experts_gemv",
    "experts/experts_gemv",
    ExpertsGemvParams,
    { assignments: "experts/assignments_given" },
    [Write, Read, Read, Read]
);
pub(crate) static EXPERTS_GEMV_ROUTED: [Kernel; KERNELS] = kernels!(
    "experts_gemv routed",
    "experts/experts_gemv",
    ExpertsGemvParams,
    { assignments: "experts/assignments_routed", scratch: "router/scratch_workgroup" },
    [Write, Read, Read, Read, Write]
);
pub(crate) static EXPERTS_DOWN_SUM: [Kernel; KERNELS] = kernels!(
    "experts_down_sum",
    "experts/experts_down_sum",
    ExpertsDownSumParams,
    {},
    [Write, Read, Read, Read]
);

/// Threads of a workgroup.
pub(super) const THREADS: u32 = 256;
/// Maximum number of threads that share rows of weights.
const MAX_ROW_THREADS: u32 = 32;
/// Rows of a matrix from which on row groups take several rows each, whatever their length: there
/// are enough row groups to fill any GPU.
const LARGE_MATRIX_ROWS: usize = 1 << 15;
/// Rows of a matrix up to which row groups with f32 activations take few rows each, although each
/// group then loads `x` separately.
const SMALL_MATRIX_ROWS: usize = 1 << 10;
/// Workgroups of a product that fill any GPU. Larger products use a grid-stride loop, so that `x`
/// is staged less often.
pub(super) const FULL_GRID: usize = 528;
/// Workgroups for matrices of at least [`LARGE_MATRIX_ROWS`] rows. More of them, because occupancy
/// varies by kernel and a partly filled last wave is then a smaller share of the time.
const FULL_GRID_LARGE: usize = 3 * FULL_GRID;
/// Maximum rows times outputs for which more rows than [`BATCH_INVARIANT_ROWS`] are normed in the
/// prologue of products. Each workgroup of a row norms it again, which costs less than a separate
/// dispatch where few do, as those of a router.
const MAX_NORMED_OUTPUTS: usize = 1 << 14;
/// Maximum number of matrices that share a dispatch.
const MAX_MATRICES: usize = 4;

/// Format of activations in workgroup memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum ActivationFormat {
    F32,
    /// 16-bit integers, with a scale for each 32.
    I16,
    /// 8-bit integers, with a scale for each 32.
    I8,
}

impl ActivationFormat {
    /// Format for most products.
    pub(super) const fn default_for(exact: bool) -> Self {
        if exact { Self::F32 } else { Self::I16 }
    }

    /// Format for gate and up of experts. They are half of the bytes that a token reads, and the
    /// second byte of activations affects logits least there.
    pub(super) const fn for_gate_up(exact: bool) -> Self {
        if exact { Self::F32 } else { Self::I8 }
    }

    /// Format in which a kernel for `block` stages activations: f32 without integer products.
    fn supported(self, ctx: &OpContext<'_>, block: Block32) -> Self {
        if ctx.target().dot8 && block.is_integer() { self } else { Self::F32 }
    }

    /// Bytes of workgroup memory for `cols` activations, with their scales and sums.
    pub(super) const fn workgroup_bytes(self, cols: usize) -> usize {
        match self {
            Self::F32 => 4 * cols,
            Self::I16 => 2 * cols + cols / 2,
            Self::I8 => cols + cols / 2,
        }
    }
}

/// Kernel for a matrix shape and its constants.
#[derive(Clone)]
pub(super) struct GemvConfig {
    /// Index in arrays of kernels.
    pub(super) kernel: usize,
    pub(super) block: Block32,
    /// Threads of a row group, and rows that it computes at a time.
    pub(super) row_threads: u32,
    pub(super) rows: usize,
    pub(super) activations: ActivationFormat,
    pub(super) constants: Constants,
}

impl GemvConfig {
    /// Config for whole rows of a matrix; `None` if only the general kernel supports the shape, or
    /// rows do not fit into workgroup memory.
    pub(super) fn for_rows(
        ctx: &OpContext<'_>,
        shape: MatrixShape,
        activations: ActivationFormat,
    ) -> Option<Self> {
        section_cols(ctx, shape, activations).filter(|cols| *cols == shape.cols)?;
        Self::for_section(ctx, shape, activations, shape.cols)
    }

    /// Config for `cols` inputs of each row, at most [`section_cols`].
    pub(super) fn for_section(
        ctx: &OpContext<'_>,
        shape: MatrixShape,
        activations: ActivationFormat,
        cols: usize,
    ) -> Option<Self> {
        let block = Block32::for_shape(shape)?;
        let activations = activations.supported(ctx, block);
        let is_integer = activations != ActivationFormat::F32;
        let section = MatrixShape { cols, ..shape };
        let (row_threads, rows) = row_groups(section, ctx.target().team, is_integer);
        let kernel = if is_integer { Block32::COUNT + block.index() } else { block.index() };
        let bytes = if activations == ActivationFormat::I16 { 2 } else { 1 };
        let constants = Constants::new(&[("X_BYTES", bytes)]).blocks(shape, cols);
        Some(Self { kernel, block, row_threads, rows, activations, constants })
    }
}

/// Inputs of a row that fit into workgroup memory at once: all, or whole blocks of weights. `None`
/// if only the general kernel supports the shape.
pub(in crate::ops) fn section_cols(
    ctx: &OpContext<'_>,
    shape: MatrixShape,
    activations: ActivationFormat,
) -> Option<usize> {
    let activations = activations.supported(ctx, Block32::for_shape(shape)?);
    let max = x_bytes(ctx) * 32 / activations.workgroup_bytes(32);
    let block = shape.format.block().cols.max(32);
    let max = max / block * block;
    let sections = shape.cols.div_ceil(max.max(1)).max(1);
    (max > 0).then(|| shape.cols.div_ceil(sections).next_multiple_of(block).min(shape.cols))
}

/// Bytes of workgroup memory for `x`. Without subgroups, teams exchange values through the rest.
pub(super) fn x_bytes(ctx: &OpContext<'_>) -> usize {
    ctx.workgroup_bytes() as usize - 4096
}

/// Threads of a row group and rows that it computes at a time, so that its threads can load all of
/// the rows at once.
pub(in crate::ops) fn row_groups(shape: MatrixShape, team: u32, is_integer: bool) -> (u32, usize) {
    let blocks = (shape.cols / 32).max(1);
    // A row of 24 blocks is split into three for each of eight threads.
    let whole = if blocks < 64 { 1 << blocks.trailing_zeros().max(3) } else { MAX_ROW_THREADS };
    let row_threads = MAX_ROW_THREADS.min(team).min(whole);
    let loads = blocks.div_ceil(row_threads as usize).next_power_of_two().clamp(1, 4);
    let rows = match is_integer {
        true if shape.rows >= LARGE_MATRIX_ROWS => (4 / loads).max(2),
        false if shape.rows > SMALL_MATRIX_ROWS => 4,
        _ => 4 / loads,
    };
    (row_threads, rows)
}

/// Grid of a product with a grid-stride loop.
#[derive(Clone, Copy)]
pub(super) struct RowGrid {
    pub(super) workgroups: usize,
    /// Row blocks that a workgroup computes.
    pub(super) blocks_per_group: usize,
}

impl RowGrid {
    /// Grid for `rows` rows, of at most about `full` workgroups.
    pub(super) fn new(rows: usize, rows_per_block: usize, full: usize) -> Self {
        let blocks = rows.div_ceil(rows_per_block);
        let blocks_per_group = blocks.div_ceil(full).max(1);
        Self { workgroups: blocks.div_ceil(blocks_per_group), blocks_per_group }
    }
}

/// Encodes [`Op::MatMul`](moeflux_ops::Op::MatMul). Returns false if these kernels do not support
/// the shape.
pub(in crate::ops) fn encode_matmul(
    ctx: &mut OpContext<'_>,
    operands: MatMulOperands,
) -> Result<bool, Error> {
    let MatMulOperands { x, weight, bias, exact, out } = operands;
    let WeightShards { shape, shards } = WeightShards::new(ctx.store, weight)?;
    let activations = ActivationFormat::default_for(exact);
    let Some(section) = section_cols(ctx, shape, activations) else { return Ok(false) };
    for (arena, shard) in shards {
        let bias = bias.map(|b| ctx.store.buffer_offset(b)).transpose()?;
        let bias = bias.map(|b| b + shard.first_row as u32);
        let out = out.columns(shard.first_row, shard.rows);
        for first in (0..shape.cols).step_by(section) {
            let cols = section.min(shape.cols - first);
            let Some(config) = GemvConfig::for_section(ctx, shape, activations, cols) else {
                return Ok(false);
            };
            let product = GemvProduct {
                config,
                shape,
                exact,
                x: x.columns(first, cols),
                arena: arena.clone(),
                shard: shard.advance(plane_bytes(shape, first).map(|bytes| bytes as u32)),
                // The first section writes `out`, the others add to it.
                bias: bias.filter(|_| first == 0),
                accumulate: first > 0,
                out,
            };
            encode_products(ctx, None, &[product], None)?;
        }
    }
    Ok(true)
}

/// Bytes of `cols` inputs of a row, by plane.
pub(super) fn plane_bytes(shape: MatrixShape, cols: usize) -> PerPlane<usize> {
    shape.format.planes(cols).map(|plane| plane.row_bytes)
}

/// Operands of [`Op::MatMul`](moeflux_ops::Op::MatMul).
#[derive(Clone, Copy)]
pub(crate) struct MatMulOperands {
    pub(crate) x: View,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Buffer>,
    /// Whether the op or the device demands f32 activations.
    pub(crate) exact: bool,
    pub(crate) out: View,
}

/// RMSNorm of a few rows, which may be the prologue of products.
#[derive(Clone, Copy)]
pub(crate) struct NormPrologue {
    pub(crate) x: View,
    pub(crate) weight: Buffer,
    pub(crate) eps: f32,
    pub(crate) out: View,
}

impl NormPrologue {
    /// Encodes it as a separate dispatch.
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        let &Self { x, weight, eps, out } = self;
        NormDispatch {
            kind: NormKind::Rms,
            x,
            out,
            operand: None,
            weight: Some(weight),
            per_head: false,
            bias: None,
            eps,
        }
        .encode(ctx)
    }
}

/// Norm of heads from sums of squares, as the prologue of a product.
#[derive(Clone, Copy)]
pub(crate) struct HeadNormPrologue {
    /// Heads that are not normed yet.
    pub(crate) heads: View,
    /// View with `count` partial sums of squares at the start of each head.
    pub(crate) sums: View,
    pub(crate) count: usize,
    pub(crate) eps: f32,
}

/// Computation on `x` before the products.
#[derive(Clone, Copy)]
pub(crate) enum Prologue {
    Norm(NormPrologue),
    HeadNorm(HeadNormPrologue),
}

/// Product of `x` with rows of a weight matrix in one arena.
pub(crate) struct GemvProduct {
    config: GemvConfig,
    shape: MatrixShape,
    /// Whether activations stay f32.
    exact: bool,
    x: View,
    arena: DeviceBuffer,
    shard: WeightShard,
    /// Offset of the bias in the activations.
    bias: Option<u32>,
    /// Whether it adds to `out`.
    accumulate: bool,
    out: View,
}

impl GemvProduct {
    /// Product with a weight that is one shard; `None` if these kernels do not support the shape.
    pub(crate) fn new(
        ctx: &OpContext<'_>,
        operands: MatMulOperands,
    ) -> Result<Option<Self>, Error> {
        let MatMulOperands { x, weight, bias, exact, out } = operands;
        let matrix = ctx.store.matrix(weight)?;
        let [shard] = matrix.shards[..] else { return Ok(None) };
        let (shape, activations) = (matrix.shape, ActivationFormat::default_for(exact));
        let Some(config) = GemvConfig::for_rows(ctx, shape, activations) else { return Ok(None) };
        let bias = bias.map(|b| ctx.store.buffer_offset(b)).transpose()?;
        let arena = ctx.store.arena(&shard);
        Ok(Some(Self { config, shape, exact, x, arena, shard, bias, accumulate: false, out }))
    }

    /// Whether `norm` can be its prologue.
    pub(crate) fn accepts_norm(&self, ctx: &OpContext<'_>, norm: &NormPrologue) -> bool {
        let few = norm.x.rows <= BATCH_INVARIANT_ROWS
            || norm.x.rows * self.shard.rows <= MAX_NORMED_OUTPUTS
            || self.is_few_rows(ctx);
        few && self.x == norm.out && norm.x.is_dense() && norm.out.is_dense()
    }

    /// Whether it is a GEMM of many rows.
    pub(crate) fn is_gemm(&self, ctx: &OpContext<'_>) -> bool {
        !self.exact && gemm::pays(ctx, self.shape, self.x.rows) && !self.is_few_rows(ctx)
    }

    /// Whether it is a GEMM of few rows.
    fn is_few_rows(&self, ctx: &OpContext<'_>) -> bool {
        let whole = self.x.width == self.shape.cols && !self.accumulate;
        let integers = self.config.activations != ActivationFormat::F32;
        !self.exact && whole && few_rows::accepts(ctx, self.x.rows, self.shard.rows, integers)
    }

    /// Whether `norm` can be its prologue.
    pub(crate) fn accepts_head_norm(&self, ctx: &OpContext<'_>, norm: &HeadNormPrologue) -> bool {
        let View { heads, width, .. } = norm.heads;
        let staged = self.config.activations.workgroup_bytes(self.shape.cols);
        self.x.split(heads) == norm.heads
            && width.is_multiple_of(16)
            && heads <= THREADS as usize
            && staged + 4 * heads <= x_bytes(ctx)
    }

    /// Whether `x += y` can be its epilogue, where `x` is the residual stream.
    pub(crate) fn accepts_residual(&self, prologue: Option<&Prologue>, x: View, y: View) -> bool {
        let read = prologue.map(|prologue| match prologue {
            Prologue::Norm(norm) => norm.x.buffer,
            Prologue::HeadNorm(norm) => norm.sums.buffer,
        });
        self.out == y
            && x.buffer != y.buffer
            && x.buffer != self.x.buffer
            && read.is_none_or(|read| read != x.buffer)
    }

    /// Whether rows of the output are dense, if they have a bias: parameters of products that share
    /// a dispatch have no word for both bias and row stride.
    fn has_dense_bias(&self) -> bool {
        self.bias.is_none() || self.x.rows == 1 || self.out.row_stride == self.shard.rows
    }

    /// Whether it can share a dispatch with others.
    pub(crate) fn can_share(&self, ctx: &OpContext<'_>, others: &[Self]) -> bool {
        others.len() < MAX_MATRICES
            && others.iter().all(|other| self.is_few_rows(ctx) == other.is_few_rows(ctx))
            && others.iter().all(|other| {
                self.x == other.x
                    && self.config.kernel == other.config.kernel
                    && self.config.constants == other.config.constants
                    && self.arena.id == other.arena.id
                    && self.bias.is_some() == other.bias.is_some()
                    && self.exact == other.exact
                    && self.out.buffer != other.out.buffer
                    && [self, other].iter().all(|product| product.has_dense_bias())
                    && other.shard.rows.is_multiple_of(4)
            })
    }
}

/// Encodes products as one dispatch. `residual` also receives the output of the only product.
pub(crate) fn encode_products(
    ctx: &mut OpContext<'_>,
    prologue: Option<&Prologue>,
    products: &[GemvProduct],
    residual: Option<View>,
) -> Result<(), Error> {
    let Some(GemvProduct { config, x, arena, bias, accumulate, .. }) = products.first() else {
        return Ok(());
    };
    if !matches!(prologue, Some(Prologue::HeadNorm(_)))
        && products.iter().all(|product| product.is_few_rows(ctx))
    {
        return encode_few_rows(ctx, prologue, products, residual);
    }
    let &GemvConfig { kernel, block, row_threads, ref constants, .. } = config;
    let rows_at_once = products.iter().map(|p| p.config.rows).max().unwrap_or(4);
    let rows: usize = products.iter().map(|p| p.shard.rows).sum();
    let full = if rows < LARGE_MATRIX_ROWS { FULL_GRID } else { FULL_GRID_LARGE };
    let grid = RowGrid::new(rows, rows_at_once * (THREADS / row_threads) as usize, full);
    let (norm, head_norm) = match prologue {
        Some(Prologue::Norm(norm)) => (Some(norm), None),
        Some(Prologue::HeadNorm(norm)) => (None, Some(norm)),
        None => (None, None),
    };
    debug_assert!(products.len() == 1 || (residual.is_none() && head_norm.is_none()));
    let store = &*ctx.store;
    let constants = constants
        .clone()
        .with("WG", THREADS)
        .with("ROW_THREADS", row_threads)
        .with("ROWS", rows_at_once as u32)
        .with("MATRICES", products.len() as u32)
        .with("BIAS_MODE", if *accumulate { 2 } else { bias.is_some().into() })
        .with("NORM", norm.is_some().into())
        .with("HEAD_WIDTH", head_norm.map_or(0, |norm| norm.heads.width) as u32)
        .with("HEAD_SQUARES", head_norm.map_or(0, |norm| norm.count) as u32)
        .with("RESIDUAL", residual.is_some().into());
    // Of the norm's input and output, or else of `x`.
    let (x_view, normed) = match norm {
        Some(norm) => (norm.x, store.view_offset(x)?),
        None => (*x, 0),
    };
    let eps = norm.map(|norm| norm.eps).or(head_norm.map(|norm| norm.eps)).unwrap_or_default();
    let norm_weight = store.optional_offset(norm.map(|norm| norm.weight))?;
    let offset = |view: Option<View>| view.map_or(Ok(0), |view| store.view_offset(&view));
    let row_stride = |view: Option<View>| view.map_or(0, |view| view.row_stride as u32);
    let buffers = [store.activations(), arena, arena];
    let groups = x.rows * grid.workgroups;
    if let [GemvProduct { shard, bias, out, .. }] = products {
        let squares = head_norm.map(|norm| norm.sums);
        let [weights, scales, biases] = shard.planes;
        let params = GemvParams {
            x: store.view_offset(&x_view)?,
            x_row_stride: x_view.row_stride as u32,
            normed,
            rows: x.rows as u32,
            workgroups: grid.workgroups as u32,
            steps: grid.blocks_per_group as u32,
            matrix: GemvMatrixParams {
                weights: weights / block.load_bytes() as u32,
                scales,
                biases,
                out: store.view_offset(out)?,
                out_row_stride: out.row_stride as u32,
                bias: bias.unwrap_or(0),
                rows: shard.rows as u32,
            },
            norm_weight,
            eps,
            residual: offset(residual)?,
            residual_row_stride: row_stride(residual),
            squares: offset(squares)?,
            squares_row_stride: row_stride(squares),
        };
        return ctx.recorder.dispatch(&GEMV[kernel], &constants, &buffers, &params, groups);
    }
    let mut matrices = [GemvFusedMatrixParams::default(); MAX_MATRICES];
    let mut end_row = 0;
    for (matrix, GemvProduct { shard, bias, out, .. }) in matrices.iter_mut().zip(products) {
        end_row += shard.rows as u32;
        let [weights, scales, biases] = shard.planes;
        *matrix = GemvFusedMatrixParams {
            weights: weights / block.load_bytes() as u32,
            scales,
            biases,
            out: store.view_offset(out)?,
            end_row,
            bias_or_row_stride: bias.unwrap_or(out.row_stride as u32),
        };
    }
    let [m0, m1, m2, m3] = matrices;
    let params = GemvFusedParams {
        x: store.view_offset(&x_view)?,
        x_row_stride: x_view.row_stride as u32,
        normed,
        rows: x.rows as u32,
        workgroups: grid.workgroups as u32,
        steps: grid.blocks_per_group as u32,
        m0,
        m1,
        m2,
        m3,
        norm_weight,
        eps,
    };
    ctx.recorder.dispatch(&GEMV_FUSED[kernel], &constants, &buffers, &params, groups)
}

/// Encodes products as a GEMM of few rows. `residual` also receives the output of the only product.
fn encode_few_rows(
    ctx: &mut OpContext<'_>,
    prologue: Option<&Prologue>,
    products: &[GemvProduct],
    residual: Option<View>,
) -> Result<(), Error> {
    let Some(GemvProduct { shape, x, arena, .. }) = products.first() else { return Ok(()) };
    let norm = match prologue {
        Some(Prologue::Norm(norm)) => Some(norm),
        _ => None,
    };
    let matrix = |product: &GemvProduct| FewRowsMatrix {
        planes: product.shard.planes,
        outputs: product.shard.rows,
        bias: product.bias,
        out: product.out,
    };
    let matrices: Vec<_> = products.iter().map(matrix).collect();
    let product =
        FewRowsProduct { x: *x, norm, shape: *shape, arena, matrices: &matrices, residual };
    few_rows::encode(ctx, &product)
}

/// Whether products are the gate and up projections of a GLU of few rows.
pub(crate) fn is_glu(products: &[GemvProduct], [gate, up]: [View; 2]) -> bool {
    let [first, second] = products else { return false };
    first.x.rows <= BATCH_INVARIANT_ROWS
        && first.out == gate
        && second.out == up
        && first.shard.rows == second.shard.rows
        && first.bias.is_none()
        && second.bias.is_none()
}

/// Encodes gate and up projections fused with their GLU.
pub(crate) fn encode_glu(
    ctx: &mut OpContext<'_>,
    products: &[GemvProduct],
    activation: Activation,
    out: View,
) -> Result<(), Error> {
    let [gate, up] = products else { return Ok(()) };
    let matrix = |GemvProduct { shape, shard, .. }: &GemvProduct| MatrixLocation {
        shape: *shape,
        planes: shard.planes.map(|offset| offset as usize),
        bias: None,
        first: 0,
        step: 1,
    };
    let words = ctx.recorder.upload_buffer().clone();
    let uses = BankUses::of_matrix(gate.arena.clone(), words, gate.x.rows);
    let stage = ExpertStage {
        uses: &uses,
        x: gate.x,
        out,
        kind: StageKind::GateUp,
        matrices: &[matrix(gate), matrix(up)],
        activation: activation.into(),
        router: None,
    };
    encode_stage(ctx, gate.config.clone(), &stage, false)
}
