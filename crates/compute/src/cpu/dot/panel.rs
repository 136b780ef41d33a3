//! Rows of weights made ready to meet rows of activations.

use std::{io::ErrorKind::OutOfMemory, ops::Range};

use super::{
    GROUP, Kernels, Sums, TILE,
    blocks::Blocks,
    quants::{Groups, Quant, QuantRow, QuantRows, RoundedRow, Scales, decode_scratch},
};
use crate::{BlockScale, Element, Error, Format, Matrix, MatrixShape, Scalar, View};

/// Activations are padded to the largest block of quants of the widest instruction set.
const PAD: usize = 256;

/// `cols` rounded up to whole blocks of any quants on any instruction set.
pub(crate) const fn padded(cols: usize) -> usize {
    cols.next_multiple_of(PAD)
}

/// The quants of a matrix that can meet rounded activations, one of quants or of elements that become quants, and how
/// many inputs share a scale.
pub(crate) fn quants_of(shape: MatrixShape) -> Option<(Quant, usize)> {
    match shape.format {
        Format::Affine { bits, group, .. } => Some((Quant::Bits(bits), group.into())),
        Format::Scaled { element: Element::E2M1, block_cols: group @ (32 | 64 | 128), .. } => {
            shape.cols.is_multiple_of(group.into()).then_some((Quant::E2M1, group.into()))
        }
        Format::Plain(_) | Format::Scaled { .. } => None,
    }
}

/// A vector of numbers of any instruction set is a whole part of so many.
const MOST_LANES: usize = 16;
/// Numbers of widened rows that a worker has room for at least.
const WIDE: usize = 1 << 14;
/// Most rows that are widened at once.
pub(crate) const MOST_WIDE_ROWS: usize = 32;

/// Memory of one worker: for one [`Panel`], and for widened rows.
#[derive(Default)]
pub(crate) struct Lane {
    bytes: Vec<u8>,
    numbers: Vec<f32>,
    /// Room for [`Lane::wide_rows`] rows.
    pub(crate) wide: Vec<f32>,
    /// What latent attention makes of a block of latents.
    pub(crate) latent_head: Vec<f32>,
}

impl Lane {
    /// Bytes and numbers of a lane for rows of `cols` inputs: unpacked quants, and scales, biases and f32.
    const fn size(cols: usize) -> (usize, usize) {
        (TILE * padded(cols), TILE * cols + decode_scratch(padded(cols), GROUP))
    }

    /// Rows of `cols` inputs that are widened at once.
    pub(crate) fn wide_rows(cols: usize) -> usize {
        (WIDE / cols.max(1)).clamp(1, MOST_WIDE_ROWS)
    }

    /// Bytes of memory that a lane for `cols` inputs holds.
    pub(crate) fn memory(cols: usize) -> usize {
        let (bytes, numbers) = Self::size(cols);
        bytes + (numbers + cols.max(WIDE)) * 4
    }

    /// Grows for rows of `cols` inputs.
    pub(crate) fn reserve(&mut self, cols: usize) -> Result<(), Error> {
        let (bytes, numbers) = Self::size(cols);
        grow(&mut self.bytes, bytes)?;
        grow(&mut self.numbers, numbers)?;
        grow(&mut self.wide, cols.max(WIDE))
    }
}

/// Makes a vector at least `len` long.
pub(crate) fn grow<T: Clone + Default>(all: &mut Vec<T>, len: usize) -> Result<(), Error> {
    if let Some(more) = len.checked_sub(all.len()) {
        let memory = |_| Error::Memory { bytes: (len * size_of::<T>()) as u64, source: OutOfMemory.into() };
        all.try_reserve_exact(more).map_err(memory)?;
        all.resize(len, T::default());
    }
    Ok(())
}

/// Up to [`TILE`] rows of a matrix.
pub(crate) struct Panel<'a>(Kind<'a>);

enum Kind<'a> {
    /// Rows of numbers, for f32 activations.
    Numbers { scalar: Scalar, cols: usize, rows: [&'a [u8]; TILE], count: usize },
    /// Rows of small floats, for one row of f32 activations.
    Blocks { element: Element, cols: usize, rows: [Blocks<'a>; TILE], count: usize },
    /// Rows of quants, unpacked to bytes, for rounded activations.
    Quants { quant: Quant, groups: Groups, rows: [QuantRow<'a>; TILE], count: usize },
}

/// Rows of activations.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// f32, in place: a view of one head and its buffer.
    Numbers(&'a [f32], View),
    /// Rounded to 8 bits.
    Rounded(Rounded<'a>),
}

/// Rows of activations rounded to 8 bits for matrices of some quants: per row `stride` numbers padded with zeros, and `2 * stride / GROUP` f32:
/// the scales of groups of [`GROUP`], padded with zeros, then the sums over the groups of the weights.
#[derive(Clone, Copy)]
pub(crate) struct Rounded<'a> {
    pub(crate) q: &'a [i8],
    pub(crate) meta: &'a [f32],
    pub(crate) cols: usize,
    pub(crate) of: (Quant, usize),
}

impl<'a> Rounded<'a> {
    /// f32 per row beside the rounded numbers.
    pub(crate) const fn meta(cols: usize) -> usize {
        2 * padded(cols) / GROUP
    }

    /// Rounds a row; `q` and `meta` are its places.
    pub(crate) fn round(kernels: Kernels, x: &[f32], of: (Quant, usize), q: &mut [i8], meta: &mut [f32]) {
        let (scales, sums) = meta.split_at_mut(q.len() / GROUP);
        q[x.len()..].fill(0);
        scales[x.len() / GROUP..].fill(0.0);
        kernels.quantize(x, of, q, scales, sums);
    }

    fn row(&self, i: usize) -> RoundedRow<'a> {
        let (stride, meta) = (padded(self.cols), Self::meta(self.cols));
        let (scales, sums) = self.meta[i * meta..(i + 1) * meta].split_at(meta / 2);
        RoundedRow { q: &self.q[i * stride..(i + 1) * stride], scales, sums }
    }
}

impl<'a> Rows<'a> {
    fn numbers(all: &'a [f32], view: &View, i: usize) -> &'a [f32] {
        let at = view.at(i, 0);
        &all[at..at + view.width]
    }
}

impl<'a> Panel<'a> {
    /// Rows `part` of a matrix, whose inputs the lane has room for, for `uses` rows of activations such as `rows`.
    pub(crate) fn new(
        kernels: Kernels,
        matrix: &Matrix<'a>,
        part: Range<usize>,
        rows: &Rows<'_>,
        uses: usize,
        lane: &'a mut Lane,
    ) -> Self {
        let (first, count) = (part.start, part.len().min(TILE));
        let cols = matrix.shape.cols;
        let rows_of: [_; TILE] = std::array::from_fn(|i| matrix.row(first + i.min(count - 1)));
        let Lane { bytes, numbers, .. } = lane;
        let exact = matches!(rows, Rows::Numbers(..));
        let in_lanes = |n: usize| n.is_multiple_of(MOST_LANES);
        let (quant, group) = match matrix.shape.format {
            Format::Plain(scalar) => {
                return Panel(Kind::Numbers { scalar, cols, rows: rows_of.map(|(w, ..)| w), count });
            }
            Format::Scaled { element, block_cols, scale, .. }
                if exact && uses == 1 && in_lanes(block_cols.into()) && in_lanes(cols) =>
            {
                let block = usize::from(block_cols);
                let rows = rows_of.map(|(elements, scales, _)| Blocks { elements, scales, scale, block });
                return Panel(Kind::Blocks { element, cols, rows, count });
            }
            _ if exact => {
                let (wide, scratch) = numbers.split_at_mut(TILE * cols);
                for (i, out) in wide.chunks_exact_mut(cols).enumerate().take(count) {
                    kernels.widen_row(matrix, first + i, scratch, out);
                }
                let wide: &[u8] = bytemuck::cast_slice(wide);
                let rows = std::array::from_fn(|i| &wide[i.min(count - 1) * cols * 4..][..cols * 4]);
                return Panel(Kind::Numbers { scalar: Scalar::F32, cols, rows, count });
            }
            Format::Affine { bits, group, .. } => (Quant::Bits(bits), usize::from(group)),
            Format::Scaled { block_cols, .. } => (Quant::E2M1, usize::from(block_cols)),
        };
        let (per_row, stride) = (cols / group, padded(cols));
        let scale_stride = stride / group;
        let mut rest = &mut **numbers;
        let mut rows = [QuantRow { q: &[], scales: &[], biases: &[] }; TILE];
        let bytes = bytes.chunks_exact_mut(stride);
        for ((row, out), (w, s, b)) in rows.iter_mut().zip(bytes).zip(&rows_of[..count]) {
            kernels.unpack(quant, w, out);
            let (scales, behind) = rest.split_at_mut(scale_stride);
            let (biases, behind) = behind.split_at_mut(per_row);
            rest = behind;
            match matrix.shape.format {
                Format::Affine { scale, .. } => {
                    kernels.widen(scale, s, &mut scales[..per_row]);
                    kernels.widen(scale, b, biases);
                }
                Format::Scaled { scale, .. } => {
                    kernels.e2m1_scales(scale, s, &mut scales[..per_row], biases);
                }
                Format::Plain(_) => {}
            }
            // The activations of the last block that are not there are zero.
            scales[per_row..].fill(0.0);
            *row = QuantRow { q: out, scales, biases };
        }
        Panel(Kind::Quants { quant, groups: Groups { cols, group }, rows, count })
    }

    /// Products with rows `at` of the activations, [`TILE`] of them at most: `sums[weight row][index in at]`.
    pub(crate) fn dots(&self, kernels: Kernels, x: &Rows<'_>, at: &[usize], sums: &mut Sums) {
        assert!(at.len() <= TILE);
        match (&self.0, x) {
            (Kind::Numbers { scalar, cols, rows, count }, Rows::Numbers(all, view)) => {
                assert_eq!(view.width, *cols);
                let mut x = [&[][..]; TILE];
                x.iter_mut().zip(at).for_each(|(x, at)| *x = Rows::numbers(all, view, *at));
                kernels.numbers(*scalar, &rows[..*count], &x[..at.len()], sums);
            }
            (Kind::Blocks { element, cols, rows, count }, Rows::Numbers(all, view)) => {
                assert_eq!(view.width, *cols);
                for (c, at) in at.iter().enumerate() {
                    let products = kernels.blocks(*element, &rows[..*count], Rows::numbers(all, view, *at));
                    sums.iter_mut().zip(products).for_each(|(sums, sum)| sums[c] = sum);
                }
            }
            (Kind::Quants { quant, groups, rows, count }, Rows::Rounded(rounded)) => {
                assert_eq!((rounded.cols, rounded.of), (groups.cols, (*quant, groups.group)));
                let mut x = [RoundedRow { q: &[], scales: &[], sums: &[] }; TILE];
                x.iter_mut().zip(at).for_each(|(x, at)| *x = rounded.row(*at));
                kernels.quants(*quant, &rows[..*count], &x[..at.len()], *groups, sums);
            }
            _ => unreachable!("a panel is made for its activations"),
        }
    }
}

impl Kernels {
    /// Products of rows of numbers.
    fn numbers(self, scalar: Scalar, w: &[&[u8]], x: &[&[f32]], sums: &mut Sums) {
        let cols = x.first().map_or(0, |x| x.len());
        assert!(w.len() <= TILE && x.len() <= TILE);
        assert!(w.iter().all(|w| w.len() == cols * scalar.bytes()) && x.iter().all(|x| x.len() == cols));
        // SAFETY: the table's set is there, and the rows are of one length.
        unsafe { (self.0.numbers)(scalar, w, x, sums) }
    }

    /// Products of rows of quants that were unpacked.
    fn quants(self, quant: Quant, w: &[QuantRow<'_>], x: &[RoundedRow<'_>], groups: Groups, sums: &mut Sums) {
        let (padded, per_row) = (padded(groups.cols), groups.cols / groups.group);
        let scales = padded / groups.group;
        assert!(w.len() <= TILE && x.len() <= TILE);
        assert!(
            w.iter().all(|w| w.q.len() >= padded && w.scales.len() >= scales && w.biases.len() >= per_row)
        );
        assert!(x.iter().all(|x| x.holds(padded, per_row)));
        // SAFETY: the table's set is there, and the rows are as long as their types say.
        unsafe { (self.0.quants)(quant, w, x, groups, sums) }
    }

    /// Products of rows `part` of a matrix of quants and row `row` of rounded activations, whose inputs the lane has
    /// room for; `out` is as long as the part.
    pub(crate) fn decode(
        self,
        matrix: &Matrix<'_>,
        part: Range<usize>,
        (x, row): (&Rounded<'_>, usize),
        lane: &mut Lane,
        out: &mut [f32],
    ) {
        let MatrixShape { cols, format, .. } = matrix.shape;
        assert_eq!((x.cols, Some(x.of), out.len()), (cols, quants_of(matrix.shape), part.len()));
        let (quant, group) = x.of;
        let of = match format {
            Format::Affine { scale, .. } => Scales::Affine(scale),
            Format::Scaled { scale, .. } => Scales::E2M1(scale),
            Format::Plain(_) => return,
        };
        let x = x.row(row);
        assert!(x.holds(padded(cols), cols / group));
        let bytes = (format.row_bytes(cols), format.row_scale_bytes(cols));
        // Rows of a block have the same scales, which have no stride.
        let at_once = if format.block_rows() > 1 { 1 } else { out.len().max(1) };
        for (i, out) in out.chunks_mut(at_once).enumerate() {
            let (at, step) = matrix.stored(part.start + i * at_once);
            let stored = (out.len() - 1) * step + 1;
            let piece = |at: usize, bytes: usize| at * bytes..(at + stored) * bytes;
            let scales = &matrix.scales[piece(at / format.block_rows(), bytes.1)];
            let biases = if format.is_affine() { &matrix.biases[piece(at, bytes.1)] } else { &[] };
            let w = QuantRows {
                q: (&matrix.weights[piece(at, bytes.0)], step * bytes.0),
                scales: (scales, step * bytes.1),
                biases: (biases, step * bytes.1),
                scale_bytes: bytes.1,
                of,
            };
            let scratch = &mut lane.numbers[..decode_scratch(padded(cols), group)];
            // SAFETY: the table's set is there, and rows, activations and scratch are as large as their types say.
            unsafe { (self.0.decode)(quant, &w, &x, Groups { cols, group }, scratch, out) }
        }
    }

    /// Unpacks a row of quants to bytes.
    fn unpack(self, quant: Quant, row: &[u8], out: &mut [u8]) {
        assert!(out.len() >= padded(row.len() * 8 / quant.bits()));
        // SAFETY: the table's set is there, and so is the room for whole units.
        unsafe { (self.0.unpack)(quant, row, out) }
    }

    /// Widens a row of a matrix as its format says; the scratch has room for its scales and biases.
    fn widen_row(self, matrix: &Matrix<'_>, row: usize, scratch: &mut [f32], out: &mut [f32]) {
        let (elements, scales, biases) = matrix.row(row);
        match matrix.shape.format {
            Format::Plain(scalar) => self.widen(scalar, elements, out),
            Format::Affine { bits, group, scale } => {
                let group = usize::from(group);
                let (wide_scales, rest) = scratch.split_at_mut(out.len() / group);
                let wide_biases = &mut rest[..out.len() / group];
                self.widen(scale, scales, wide_scales);
                self.widen(scale, biases, wide_biases);
                self.widen_quants(bits, elements, (wide_scales, wide_biases), group, out);
            }
            Format::Scaled { element, block_cols, scale, .. } => {
                let blocks = Blocks { elements, scales, scale, block: block_cols.into() };
                self.widen_blocks(element, &blocks, out);
            }
        }
    }

    /// Widens rows of a matrix, `first` and what follows, to `out`: `(rows, cols)`. The lane has room for the inputs.
    pub(crate) fn widen_rows(self, matrix: &Matrix<'_>, first: usize, lane: &mut Lane, out: &mut [f32]) {
        for (i, out) in out.chunks_exact_mut(matrix.shape.cols).enumerate() {
            self.widen_row(matrix, first + i, &mut lane.numbers, out);
        }
    }

    /// Widens a row of packed quants: `out = scale * q + bias` with one of each per group.
    fn widen_quants(self, bits: u8, row: &[u8], scales: (&[f32], &[f32]), group: usize, out: &mut [f32]) {
        let groups = out.len() / group;
        assert!(out.len().is_multiple_of(group) && group.is_power_of_two() && group >= GROUP);
        assert!(row.len() >= out.len() * usize::from(bits) / 8);
        assert!(scales.0.len() >= groups && scales.1.len() >= groups);
        // SAFETY: the table's set is there, and the lengths are as the algorithm wants them.
        unsafe { (self.0.widen_quants)(bits, row, scales, group, out) }
    }

    /// Scales and biases of E2M1 as quants.
    fn e2m1_scales(self, of: BlockScale, bytes: &[u8], scales: &mut [f32], biases: &mut [f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.e2m1_scales)(of, bytes, scales, biases) }
    }

    /// Products of rows of small floats and a row of f32.
    fn blocks(self, element: Element, w: &[Blocks<'_>], x: &[f32]) -> [f32; TILE] {
        let mut sums = [0.0; TILE];
        let block = w.first().map_or(0, |w| w.block);
        assert!(w.len() <= TILE && x.len().is_multiple_of(MOST_LANES) && block.is_multiple_of(MOST_LANES));
        assert!(
            block > 0
                && w.iter().all(|w| w.block == block && w.elements.len() * 8 >= x.len() * element.bits())
        );
        // SAFETY: the table's set is there, and so are the elements; all are whole vectors of any set.
        unsafe { (self.0.blocks)(element, w, x, &mut sums) }
        sums
    }

    /// Widens a row of small floats.
    pub(crate) fn widen_blocks(self, element: Element, row: &Blocks<'_>, out: &mut [f32]) {
        let bits = element.bits();
        assert!(row.elements.len() * 8 >= out.len() * bits && (row.block * bits).is_multiple_of(8));
        // SAFETY: the table's set is there, and so are the elements; blocks begin at whole bytes.
        unsafe { (self.0.widen_blocks)(element, row, out) }
    }
}
