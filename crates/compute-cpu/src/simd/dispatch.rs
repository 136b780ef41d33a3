//! Dispatch of matrix products by weight format, batch size and instruction set.

use std::ops::Range;

use moeflux_ops::{BlockType, Codec, Element, Format, Matrix, PerPlane, Scalar};

use super::scratch::{PackedKey, WorkerScratch};
use super::{
    activations::{F32Rows, Q8Row, Q8Rows, QuantLayout, QuantStorage, padded},
    gemm_f32::{F32TileSums, FloatTile, TILE_ROWS},
    gemm_q8::{GEMM_BATCH, TileChunk, TileScratch, UnpackedTile, tile_bytes, tile_scale_len},
    gemv_blocks,
    gemv_q8::{
        GEMV_ROWS, GemvActivations, GemvOut, MAX_GEMV_OUTPUTS, packed_activation_bytes,
        rows_widened_together,
    },
    kernels::Kernels,
    quant_rows::{GroupShape, PlaneRows, QuantRows, ScaleType},
    transcode::{BlockRows, CHUNK, TranscodedRoom, range_bits},
    unpack_affine::{AffineRow, AffineRows, AffineTile, QuantKind},
    unpack_mx::{BlockScaledRow, BlockScaledRows},
    unpack_plain::PlainRows,
    vector::{MAX_LANES, Q8_GROUP},
};

/// Bytes of a row of a matrix in each plane.
pub(super) type RowPlanes<'a> = PerPlane<&'a [u8]>;

/// Row of the CPU's table of weight formats: how rows become operands of the kernels.
pub(super) trait CpuCodec: Codec {
    /// Layout of int8 activations for rows of `cols` columns; `None` if products take f32 only.
    fn quant_layout(&self, _cols: usize) -> Option<QuantLayout> {
        None
    }

    /// Whether rows of `cols` columns are multiplied as they are with `batch` rows of f32
    /// activations. Otherwise they are dequantized to memory first.
    fn multiplies_packed(&self, _cols: usize, _batch: usize) -> bool {
        true
    }

    /// Operand of products with f32 activations, if [`CpuCodec::multiplies_packed`]: the first
    /// `count` of `rows`. `room` is for widened scales: twice the columns, for each row.
    fn packed_rows<'a>(
        &self,
        kernels: Kernels,
        rows: [RowPlanes<'a>; TILE_ROWS],
        count: usize,
        room: &'a mut [f32],
    ) -> RowFormat<'a>;

    /// Dequantizes a row, by default as the reference does. `scales` has room for its scales and
    /// biases.
    fn dequantize_row(
        &self,
        _kernels: Kernels,
        row: RowPlanes<'_>,
        _scales: &mut [f32],
        out: &mut [f32],
    ) {
        self.dequantize(row, out);
    }
}

/// The format's row of the CPU's table.
pub(super) fn cpu_codec(format: &Format) -> &dyn CpuCodec {
    match format {
        Format::Plain(scalar) => scalar,
        Format::Affine(affine) => affine,
        Format::BlockScaled(scaled) => scaled,
        Format::Blocks(kind) => kind,
        Format::ScaledBlocks(scaled) => scaled,
    }
}

/// Up to [`TILE_ROWS`] rows of a matrix of `cols` columns, prepared for products with f32
/// activations.
pub(crate) struct PackedRows<'a> {
    cols: usize,
    rows: RowFormat<'a>,
}

/// Operands of products with f32 activations, by kernel.
pub(super) enum RowFormat<'a> {
    /// Plain floats: stored ones, or dequantized rows.
    Float(PlainRows<'a>),
    /// Packed affine quants, for at most [`TILE_ROWS`] rows of activations.
    Affine(AffineRows<'a>),
    /// Block-scaled small floats, for at most [`TILE_ROWS`] rows of activations.
    BlockScaled(BlockScaledRows<'a>),
}

impl<'a> PackedRows<'a> {
    /// Rows `range` of a matrix for products with `batch` rows of f32 activations. Dequantizes them
    /// where that is faster. The scratch has room for the matrix's columns.
    pub(crate) fn new(
        kernels: Kernels,
        matrix: &Matrix<'a>,
        range: Range<usize>,
        batch: usize,
        scratch: &'a mut WorkerScratch,
    ) -> Self {
        let (first, count) = (range.start, range.len().min(TILE_ROWS));
        let cols = matrix.shape.cols;
        let codec = cpu_codec(&matrix.shape.format);
        if codec.multiplies_packed(cols, batch) {
            let stored = std::array::from_fn(|i| matrix.row(first + i.min(count - 1)));
            let rows = codec.packed_rows(kernels, stored, count, &mut scratch.tile_f32);
            return Self { cols, rows };
        }
        let (wide, scales) = scratch.tile_f32.split_at_mut(TILE_ROWS * cols);
        for (i, out) in wide.chunks_exact_mut(cols).enumerate().take(count) {
            codec.dequantize_row(kernels, matrix.row(first + i), scales, out);
        }
        let wide: &[u8] = bytemuck::cast_slice(wide);
        let rows = std::array::from_fn(|i| &wide[i.min(count - 1) * cols * 4..][..cols * 4]);
        Self { cols, rows: RowFormat::Float(PlainRows { scalar: Scalar::F32, rows, count }) }
    }

    /// Products with rows `indexes` of the activations, at most [`TILE_ROWS`]:
    /// `sums[row of weights][index in indexes]`. `prefetch`, set for the first rows of activations,
    /// prefetches the rows of weights that follow in memory.
    pub(crate) fn products(
        &self,
        kernels: Kernels,
        activations: &F32Rows<'_>,
        indexes: &[usize],
        prefetch: bool,
        sums: &mut F32TileSums,
    ) {
        assert!(indexes.len() <= TILE_ROWS);
        assert_eq!(activations.view.width, self.cols);
        let mut x = [&[][..]; TILE_ROWS];
        x.iter_mut().zip(indexes).for_each(|(x, i)| *x = activations.row(*i));
        let x = &x[..indexes.len()];
        match &self.rows {
            RowFormat::Float(PlainRows { scalar, rows, count }) => {
                kernels.gemm_f32(*scalar, FloatTile { rows: &rows[..*count], prefetch }, x, sums);
            }
            RowFormat::Affine(AffineRows { bits, group, rows }) => {
                kernels.gemm_affine(AffineTile { rows, bits: *bits, group: *group }, x, sums);
            }
            RowFormat::BlockScaled(BlockScaledRows { element, rows, count }) => {
                kernels.gemm_block_scaled(*element, &rows[..*count], x, sums);
            }
        }
    }
}

/// Quants that are transcoded at a time for the GEMV, unless a row has more: they stay in L1, with
/// the activations.
const TRANSCODED: usize = 4 << 10;

/// Rows `range` of a matrix of blocks.
fn block_rows<'a>(kind: BlockType, matrix: &Matrix<'a>, range: Range<usize>) -> BlockRows<'a> {
    let bytes = matrix.shape.format.row_bytes(matrix.shape.cols);
    let (first, step) = matrix.stored(range.start);
    let stored = (range.len().max(1) - 1) * step + 1;
    let stride = step * bytes;
    let rows = PlaneRows { bytes: &matrix.planes[0][first * bytes..][..stored * bytes], stride };
    BlockRows { kind, rows, count: range.len(), bytes, prefetch: None }
}

/// Rows `range` of a matrix of quants in planes.
fn quant_rows<'a>(
    matrix: &Matrix<'a>,
    range: Range<usize>,
    scale_type: ScaleType,
) -> QuantRows<'a> {
    let layouts = matrix.shape.format.planes(matrix.shape.cols);
    let (first, step) = matrix.stored(range.start);
    let stored = (range.len().max(1) - 1) * step + 1;
    let [quants, scales, biases] = std::array::from_fn(|i| {
        let row_bytes = layouts[i].row_bytes;
        PlaneRows {
            bytes: &matrix.planes[i][first * row_bytes..(first + stored) * row_bytes],
            stride: step * row_bytes,
        }
    });
    QuantRows {
        count: range.len(),
        quants,
        scale_bytes: layouts[1].row_bytes,
        scales,
        biases,
        scale_type,
    }
}

/// Room for transcoded rows of a GEMV: that of a tile is large enough.
struct BlockScratch<'a> {
    q: &'a mut [u8],
    /// Scales and biases.
    factors: &'a mut [f32],
}

/// Rows of int8 activations, selected and ordered by an index function.
pub(crate) struct Q8Batch<'a, F> {
    pub(crate) rows: &'a Q8Rows<'a>,
    pub(crate) count: usize,
    /// Row of `rows` that is row `i` of the batch.
    pub(crate) index: F,
}

impl Kernels {
    /// Products of up to [`TILE_ROWS`] rows of plain floats and of f32 activations.
    pub(super) fn gemm_f32(
        self,
        scalar: Scalar,
        w: FloatTile<'_>,
        x: &[&[f32]],
        sums: &mut F32TileSums,
    ) {
        let cols = x.first().map_or(0, |x| x.len());
        assert!(w.rows.len() <= TILE_ROWS && x.len() <= TILE_ROWS);
        assert!(w.rows.iter().all(|w| w.len() == cols * scalar.bytes()));
        assert!(x.iter().all(|x| x.len() == cols));
        // SAFETY: Simd contract: the table's ISA was detected; all rows have `cols` values.
        unsafe { (self.0.gemm_f32)(scalar, w, x, sums) }
    }

    /// Products of [`TILE_ROWS`] rows of affine quants and up to as many rows of f32 activations.
    fn gemm_affine(self, w: AffineTile<'_>, x: &[&[f32]], sums: &mut F32TileSums) {
        let AffineTile { rows, bits, group } = w;
        let cols = x.first().map_or(0, |x| x.len());
        assert!(x.len() <= TILE_ROWS && x.iter().all(|x| x.len() == cols));
        assert!(group.is_power_of_two() && group >= Q8_GROUP && cols.is_multiple_of(group));
        assert!(
            rows.iter().all(|w| w.q.len() == cols * bits / 8
                && w.scales.len().min(w.biases.len()) == cols / group)
        );
        // SAFETY: Simd contract: the table's ISA was detected; the lengths were checked, and groups
        // are whole vectors of every ISA.
        unsafe { (self.0.gemm_affine)(w, x, sums) }
    }

    /// Products of up to [`TILE_ROWS`] rows of block-scaled floats and of f32 activations.
    pub(super) fn gemm_block_scaled(
        self,
        element: Element,
        w: &[BlockScaledRow<'_>],
        x: &[&[f32]],
        sums: &mut F32TileSums,
    ) {
        let (block, cols) = (w.first().map_or(0, |w| w.block), x.first().map_or(0, |x| x.len()));
        assert!(w.len() <= TILE_ROWS && x.len() <= TILE_ROWS && x.iter().all(|x| x.len() == cols));
        assert!(block > 0 && block.is_multiple_of(MAX_LANES) && cols.is_multiple_of(MAX_LANES));
        assert!(w.iter().all(|w| w.block == block && w.has_cols(element, cols)));
        // SAFETY: Simd contract: the table's ISA was detected; elements and scales were checked;
        // columns and blocks are whole vectors of every ISA.
        unsafe { (self.0.gemm_block_scaled)(element, w, x, sums) }
    }

    /// Rows of weights of a [`Kernels::gemm_q8`] tile.
    pub(crate) fn gemm_rows(self) -> usize {
        self.0.tile_rows
    }

    /// GEMM of rows `range` of a matrix of quants, at most [`Kernels::gemm_rows`], and a batch of
    /// int8 activations. `each` gets the index and the products of every row of the batch. The
    /// scratch has room for the matrix's columns.
    pub(crate) fn gemm_q8(
        self,
        matrix: &Matrix<'_>,
        range: Range<usize>,
        x: Q8Batch<'_, impl Fn(usize) -> usize>,
        scratch: &mut WorkerScratch,
        mut each: impl FnMut(usize, &mut [f32]),
    ) {
        assert!(range.len() <= self.gemm_rows());
        let outputs = range.len();
        let shape = x.rows.shape(matrix);
        let padded = padded(shape.cols);
        let quants = &mut scratch.tile[..tile_bytes(padded)];
        let scales = &mut scratch.tile_f32[..tile_scale_len(padded)];
        let (kind, packed) = match x.rows.layout.storage {
            QuantStorage::Planes(kind, scale) => (kind, Some(quant_rows(matrix, range, scale))),
            QuantStorage::Blocks(kind) => {
                self.transcode_tile(block_rows(kind, matrix, range), shape, quants, scales);
                (QuantKind::Bits(range_bits(kind) as u8), None)
            }
        };
        let mut sums = [[0.0; MAX_LANES]; GEMM_BATCH];
        let mut rows = [Q8Row { q: &[], scales: &[], sums: &[] }; GEMM_BATCH];
        let mut done = 0;
        while done < x.count {
            let packed = packed.as_ref().filter(|_| done == 0);
            let most = if packed.is_some() { self.0.unpack_batch } else { GEMM_BATCH };
            let n = most.min(x.count - done);
            for (i, row) in rows[..n].iter_mut().enumerate() {
                *row = x.rows.row((x.index)(done + i));
            }
            // SAFETY: Simd contract: the table's ISA was detected; `quant_rows` cuts planes to
            // their rows, scratch has the sizes above, and activations are padded. The tile was
            // written before.
            unsafe {
                if let Some(w) = packed {
                    let quants = (n < x.count).then_some(&mut *quants);
                    let scratch = TileScratch { quants, scales };
                    (self.0.unpack_gemm)(kind, w, &rows[..n], shape, scratch, &mut sums);
                } else {
                    let tile = UnpackedTile { quants, scales };
                    (self.0.gemm)(kind, tile, &rows[..n], shape, &mut sums);
                }
            }
            (0..n).for_each(|c| each(done + c, &mut sums[c][..outputs]));
            done += n;
        }
    }

    /// Transcodes rows of blocks, at most [`Kernels::gemm_rows`], to an unpacked tile of
    /// [`tile_bytes`] and [`tile_scale_len`].
    fn transcode_tile(
        self,
        rows: BlockRows<'_>,
        shape: GroupShape,
        quants: &mut [u8],
        scales: &mut [f32],
    ) {
        assert!(rows.count <= MAX_LANES && quants.len() >= tile_bytes(padded(shape.cols)));
        assert!(scales.len() >= tile_scale_len(padded(shape.cols)));
        // The next tile.
        let prefetch = Some(self.gemm_rows() * rows.rows.stride);
        let rows = BlockRows { prefetch, ..rows };
        let mut q = [0; MAX_LANES * CHUNK];
        let mut factors = [[0.0; MAX_LANES * CHUNK / Q8_GROUP]; 2];
        let [chunk_scales, biases] = &mut factors;
        let mut room = TranscodedRoom { q: &mut q, scales: chunk_scales, biases, stride: CHUNK };
        for first in (0..shape.cols).step_by(CHUNK) {
            let chunk = rows.columns(first..shape.cols.min(first + CHUNK));
            // SAFETY: Simd contract: the table's ISA was detected; the room is for as many rows as
            // a tile has at most, and the tile has room for the padded columns.
            unsafe {
                (self.0.transcode)(chunk, &mut room);
                let bits = range_bits(rows.kind);
                let chunk = TileChunk { rows: room.rows(rows.count), first, bits };
                (self.0.transpose_chunk)(chunk, shape, quants, scales);
            }
        }
    }

    /// GEMV of rows of blocks and rows of int8 activations, at most [`GEMV_ROWS`]. `sums` has a row
    /// per row of activations. The scratch has room for the columns.
    fn gemv_blocks(
        self,
        rows: BlockRows<'_>,
        x: &[GemvActivations<'_>],
        shape: GroupShape,
        scratch: BlockScratch<'_>,
        sums: &mut [f32],
    ) {
        let stride = padded(shape.cols);
        let step = (TRANSCODED / stride).clamp(1, MAX_LANES);
        let (scales, biases) = scratch.factors.split_at_mut(step * stride / Q8_GROUP);
        let mut room = TranscodedRoom { q: scratch.q, scales, biases, stride };
        for first in (0..rows.count).step_by(step) {
            let part = rows.slice(first..rows.count.min(first + step));
            let out = GemvOut { values: &mut sums[first..], stride: rows.count };
            // SAFETY: Simd contract: the table's ISA was detected; there is room for `step` rows,
            // and activations are padded as the rows are.
            unsafe {
                (self.0.transcode)(part, &mut room);
                let part = room.rows(part.count);
                (self.0.gemv_blocks)(range_bits(rows.kind), part, x, shape, out);
            }
        }
    }

    /// GEMV of rows `range` of a matrix of quants, at most [`MAX_GEMV_OUTPUTS`], and rows `indexes`
    /// of int8 activations, at most [`GEMV_ROWS`]. `each` gets the index and the products of every
    /// row of activations. The scratch has room for the matrix's columns.
    pub(crate) fn gemv_q8(
        self,
        matrix: &Matrix<'_>,
        range: Range<usize>,
        x: &Q8Rows<'_>,
        indexes: &[usize],
        scratch: &mut WorkerScratch,
        mut each: impl FnMut(usize, &mut [f32]),
    ) {
        let outputs = range.len();
        assert!((1..=GEMV_ROWS).contains(&indexes.len()));
        assert!((1..=MAX_GEMV_OUTPUTS).contains(&outputs));
        let shape = x.shape(matrix);
        let WorkerScratch { tile, tile_f32, packed, packed_rows, products, .. } = scratch;
        let padded = padded(shape.cols);
        let stride = match x.layout.storage {
            QuantStorage::Planes(..) => packed_activation_bytes(padded),
            QuantStorage::Blocks(_) => gemv_blocks::packed_bytes(padded),
        };
        let rows = std::array::from_fn(|i| indexes.get(i).copied().unwrap_or(usize::MAX));
        let key = PackedKey { id: x.id, rows };
        if packed_rows.replace(key) != Some(key) {
            for (dst, i) in packed.chunks_exact_mut(stride).zip(indexes) {
                let (row, cols) = (x.row(*i), shape.cols);
                // SAFETY: Simd contract: the table's ISA was detected; activations are padded, and
                // `dst` has room for a packed row.
                unsafe {
                    match x.layout.storage {
                        QuantStorage::Planes(kind, _) => {
                            (self.0.pack_activations)(kind, &row, cols, dst);
                        }
                        QuantStorage::Blocks(_) => (self.0.pack_for_blocks)(&row, cols, dst),
                    }
                }
            }
        }
        let mut rows = [GemvActivations { blocks: &[], sums: &[] }; GEMV_ROWS];
        for ((row, blocks), i) in rows.iter_mut().zip(packed.chunks_exact(stride)).zip(indexes) {
            (row.blocks, row.sums) = (blocks, x.row(*i).sums);
        }
        let (rows, sums) = (&rows[..indexes.len()], &mut products[..indexes.len() * outputs]);
        let (kind, scale_type) = match x.layout.storage {
            QuantStorage::Planes(kind, scale_type) => (kind, scale_type),
            QuantStorage::Blocks(kind) => {
                let scratch = BlockScratch { q: tile, factors: tile_f32 };
                self.gemv_blocks(block_rows(kind, matrix, range), rows, shape, scratch, sums);
                sums.chunks_exact_mut(outputs).enumerate().for_each(|(i, sums)| each(i, sums));
                return;
            }
        };
        let w = quant_rows(matrix, range, scale_type);
        let in_place = match w.scale_type {
            ScaleType::Affine(scale) => indexes.len() <= (self.0.scale_rows)(scale),
            ScaleType::E2M1(_) => false,
        };
        let step = if in_place { outputs } else { rows_widened_together(shape) };
        for first in (0..outputs).step_by(step) {
            let mut w = w.slice(first..outputs.min(first + step));
            if !in_place {
                let (scales, rest) = tile_f32.split_at_mut(w.count * shape.count());
                let biases = &mut rest[..scales.len()];
                // SAFETY: Simd contract: the table's ISA was detected; there is room for the scales
                // of all groups.
                unsafe { (self.0.widen_scales)(&w, shape, [scales, biases]) }
                let stride = shape.count() * size_of::<f32>();
                w.scales = PlaneRows { bytes: bytemuck::cast_slice(scales), stride };
                w.biases = PlaneRows { bytes: bytemuck::cast_slice(biases), stride };
                w.scale_type = ScaleType::Affine(Scalar::F32);
            }
            let out = GemvOut { values: &mut sums[first..], stride: outputs };
            // SAFETY: Simd contract: the table's ISA was detected; planes are cut to their rows,
            // activations are packed for it, and `out` has room.
            unsafe { (self.0.gemv)(kind, &w, rows, shape, out) }
        }
        sums.chunks_exact_mut(outputs).enumerate().for_each(|(i, sums)| each(i, sums));
    }

    /// Dequantizes rows of a matrix from row `first` on to `out`, `(rows, cols)`. The scratch has
    /// room for the matrix's columns.
    pub(crate) fn dequantize_rows(
        self,
        matrix: &Matrix<'_>,
        first: usize,
        scratch: &mut WorkerScratch,
        out: &mut [f32],
    ) {
        let codec = cpu_codec(&matrix.shape.format);
        for (i, out) in out.chunks_exact_mut(matrix.shape.cols).enumerate() {
            codec.dequantize_row(self, matrix.row(first + i), &mut scratch.tile_f32, out);
        }
    }

    /// Dequantizes a row of affine quants: `out = scale * q + bias`.
    pub(super) fn dequantize_affine(
        self,
        bits: u8,
        row: AffineRow<'_>,
        group: usize,
        out: &mut [f32],
    ) {
        let groups = out.len() / group;
        assert!(out.len().is_multiple_of(group) && group.is_power_of_two() && group >= Q8_GROUP);
        assert!(row.q.len() >= out.len() * usize::from(bits) / 8);
        assert!(row.scales.len() >= groups && row.biases.len() >= groups);
        // SAFETY: Simd contract: the table's ISA was detected; lengths were checked.
        unsafe { (self.0.dequantize_affine)(bits, row, group, out) }
    }

    /// Dequantizes a row of block-scaled floats.
    pub(super) fn dequantize_blocks(
        self,
        element: Element,
        row: &BlockScaledRow<'_>,
        out: &mut [f32],
    ) {
        assert!(row.has_cols(element, out.len()) && (row.block * element.bits()).is_multiple_of(8));
        // SAFETY: Simd contract: the table's ISA was detected; elements and scales were checked,
        // and blocks start at whole bytes.
        unsafe { (self.0.dequantize_blocks)(element, row, out) }
    }
}
