//! Rows of weights made ready to meet rows of activations.

use std::ops::Range;

use super::{
    BATCH, FEW, GROUP, Kernels, Quant, Sums, TILE,
    algorithm::MAX_LANES,
    blocks::Blocks,
    columns::{Groups, QuantRows, RoundedRow, Scales, tile_bytes, tile_numbers},
    few::{LaidOut, laid_out_bytes, widened_at_once},
    quants::AffineRow,
};
use crate::{
    Element, Error, Format, Matrix, MatrixShape, Scalar, View, cpu::aligned_vec::AlignedVec,
};

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
        Format::Scaled {
            element: Element::E2M1,
            block_rows: 1,
            block_cols: group @ (16 | 32 | 64 | 128),
            ..
        } => shape.cols.is_multiple_of(group.into()).then_some((Quant::E2M1, group.into())),
        Format::Plain(_) | Format::Scaled { .. } => None,
    }
}

/// Numbers of widened rows that a worker has room for at least.
const WIDE: usize = 1 << 14;
/// Most rows that are widened at once.
pub(crate) const MAX_WIDE_ROWS: usize = 32;

/// Most rows of quants that meet few rows of activations in one call.
pub(crate) const MAX_OUTPUTS: usize = 512;

/// Memory of one worker: for one [`Panel`], and for widened rows.
#[derive(Default)]
pub(crate) struct Lane {
    bytes: AlignedVec<u8>,
    numbers: AlignedVec<f32>,
    /// What packed rows meet of [`FEW`] rows of activations, and which those are.
    laid_out: (AlignedVec<u8>, Option<(u64, [usize; FEW])>),
    /// What packed rows make with those.
    sums: AlignedVec<f32>,
    /// Room for [`Lane::wide_rows`] rows.
    pub(crate) wide: AlignedVec<f32>,
    /// What latent attention makes of a block of latents.
    pub(crate) latent_head: AlignedVec<f32>,
    /// Keys and values of a block, widened.
    pub(crate) keys: AlignedVec<f32>,
}

impl Lane {
    /// Bytes and numbers of a lane for rows of `cols` inputs: unpacked quants, and scales and biases or f32.
    const fn size(cols: usize) -> (usize, usize) {
        // Widened rows come with scales and biases of one of them.
        let (wide, scales) = ((TILE + 1) * cols, tile_numbers(padded(cols)));
        (tile_bytes(padded(cols)), if wide > scales { wide } else { scales })
    }

    /// Rows of `cols` inputs that are widened at once.
    pub(crate) fn wide_rows(cols: usize) -> usize {
        (WIDE / cols.max(1)).clamp(1, MAX_WIDE_ROWS)
    }

    /// Bytes of memory that a lane for `cols` inputs holds.
    pub(crate) fn memory(cols: usize) -> usize {
        let (bytes, numbers) = Self::size(cols);
        let laid_out = FEW * laid_out_bytes(padded(cols));
        let numbers = [numbers, FEW * MAX_OUTPUTS, cols.max(WIDE)].map(AlignedVec::<f32>::memory);
        [bytes, laid_out].map(AlignedVec::<u8>::memory).into_iter().chain(numbers).sum()
    }

    /// Grows for rows of `cols` inputs.
    pub(crate) fn reserve(&mut self, cols: usize) -> Result<(), Error> {
        let (bytes, numbers) = Self::size(cols);
        self.bytes.grow(bytes)?;
        self.numbers.grow(numbers)?;
        self.laid_out.0.grow(FEW * laid_out_bytes(padded(cols)))?;
        self.sums.grow(FEW * MAX_OUTPUTS)?;
        self.wide.grow(cols.max(WIDE))
    }
}

/// Up to [`TILE`] rows of a matrix.
pub(crate) struct Panel<'a>(Kind<'a>);

enum Kind<'a> {
    /// Rows of numbers, for f32 activations.
    Numbers { scalar: Scalar, cols: usize, rows: [&'a [u8]; TILE], count: usize },
    /// Rows of quants of so many bits in groups, for few rows of f32 activations.
    Affine { of: (usize, usize), cols: usize, rows: [AffineRow<'a>; TILE] },
    /// Rows of small floats, for few rows of f32 activations.
    Blocks { element: Element, cols: usize, rows: [Blocks<'a>; TILE], count: usize },
}

/// Rows of activations.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// f32, in place: a view of one head and its buffer.
    Numbers(&'a [f32], View),
    /// Rounded to 8 bits.
    Rounded(Rounded<'a>),
}

/// Rows of activations rounded to 8 bits for matrices of some quants: per row `stride` numbers padded with zeros, and
/// `2 * stride / GROUP` f32: the scales of groups of [`GROUP`], padded with zeros, then the sums over the groups of the
/// weights, which have no fewer inputs.
#[derive(Clone, Copy)]
pub(crate) struct Rounded<'a> {
    pub(crate) q: &'a [i8],
    pub(crate) meta: &'a [f32],
    pub(crate) cols: usize,
    pub(crate) of: (Quant, usize),
    /// Which rounding it was: no two have the same number.
    pub(crate) number: u64,
}

impl<'a> Rounded<'a> {
    /// f32 per row beside the rounded numbers.
    pub(crate) const fn meta(cols: usize) -> usize {
        2 * padded(cols) / GROUP
    }

    /// Rounds a row; `q` and `meta` are its places.
    pub(crate) fn round(
        kernels: Kernels,
        x: &[f32],
        of: (Quant, usize),
        q: &mut [i8],
        meta: &mut [f32],
    ) {
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
        let at = view.index(i, 0);
        &all[at..at + view.width]
    }
}

impl<'a> Panel<'a> {
    /// Rows `part` of a matrix, whose inputs the lane has room for, for `uses` rows of f32 activations.
    pub(crate) fn new(
        kernels: Kernels,
        matrix: &Matrix<'a>,
        part: Range<usize>,
        uses: usize,
        lane: &'a mut Lane,
    ) -> Self {
        let (first, count) = (part.start, part.len().min(TILE));
        let cols = matrix.shape.cols;
        let rows_of: [_; TILE] = std::array::from_fn(|i| matrix.row(first + i.min(count - 1)));
        let in_lanes = |n: usize| n.is_multiple_of(MAX_LANES);
        match matrix.shape.format {
            Format::Plain(scalar) => {
                return Panel(Kind::Numbers {
                    scalar,
                    cols,
                    rows: rows_of.map(|(w, ..)| w),
                    count,
                });
            }
            // For more rows it pays to write widened ones to memory.
            Format::Scaled { element, block_cols, scale, .. }
                if uses <= TILE && in_lanes(block_cols.into()) && in_lanes(cols) =>
            {
                let block = usize::from(block_cols);
                let rows =
                    rows_of.map(|(elements, scales, _)| Blocks { elements, scales, scale, block });
                return Panel(Kind::Blocks { element, cols, rows, count });
            }
            Format::Affine { bits, group, scale } if uses <= TILE && in_lanes(cols) => {
                let (of, groups) = ((bits.into(), group.into()), cols / usize::from(group));
                let mut rows = rows_of.map(|(q, ..)| AffineRow { q, scales: &[], biases: &[] });
                let mut room = &mut lane.numbers[..];
                for (row, (_, scales, biases)) in rows.iter_mut().zip(rows_of) {
                    for (to, from) in [(&mut row.scales, scales), (&mut row.biases, biases)] {
                        let (wide, rest) = room.split_at_mut(groups);
                        kernels.widen(scale, from, wide);
                        (*to, room) = (wide, rest);
                    }
                }
                return Panel(Kind::Affine { of, cols, rows });
            }
            Format::Affine { .. } | Format::Scaled { .. } => {}
        }
        let (wide, scratch) = lane.numbers.split_at_mut(TILE * cols);
        for (i, out) in wide.chunks_exact_mut(cols).enumerate().take(count) {
            kernels.widen_row(matrix, first + i, scratch, out);
        }
        let wide: &[u8] = bytemuck::cast_slice(wide);
        let rows = std::array::from_fn(|i| &wide[i.min(count - 1) * cols * 4..][..cols * 4]);
        Panel(Kind::Numbers { scalar: Scalar::F32, cols, rows, count })
    }

    /// Products with rows `at` of the activations, [`TILE`] of them at most, which are the `first` ones or not:
    /// `sums[weight row][index in at]`.
    pub(crate) fn dots(
        &self,
        kernels: Kernels,
        (all, view): (&[f32], &View),
        (at, first): (&[usize], bool),
        sums: &mut Sums,
    ) {
        assert!(at.len() <= TILE);
        match &self.0 {
            Kind::Numbers { scalar, cols, rows, count } => {
                assert_eq!(view.width, *cols);
                let mut x = [&[][..]; TILE];
                x.iter_mut().zip(at).for_each(|(x, at)| *x = Rows::numbers(all, view, *at));
                kernels.numbers(*scalar, (&rows[..*count], first), &x[..at.len()], sums);
            }
            Kind::Affine { of, cols, rows } => {
                assert_eq!(view.width, *cols);
                let mut x = [&[][..]; TILE];
                x.iter_mut().zip(at).for_each(|(x, at)| *x = Rows::numbers(all, view, *at));
                kernels.affine(rows, *of, &x[..at.len()], sums);
            }
            Kind::Blocks { element, cols, rows, count } => {
                assert_eq!(view.width, *cols);
                let mut x = [&[][..]; TILE];
                x.iter_mut().zip(at).for_each(|(x, at)| *x = Rows::numbers(all, view, *at));
                kernels.blocks(*element, &rows[..*count], &x[..at.len()], sums);
            }
        }
    }
}

/// Rows `part` of a matrix of quants.
fn quant_rows<'a>(matrix: &Matrix<'a>, part: Range<usize>) -> (QuantRows<'a>, Quant, Groups) {
    let MatrixShape { cols, format, .. } = matrix.shape;
    let of = match format {
        Format::Affine { scale, .. } => Scales::Affine(scale),
        Format::Scaled { scale, .. } => Scales::E2M1(scale),
        Format::Plain(_) => unreachable!("numbers do not meet rounded activations"),
    };
    let Some((quant, group)) = quants_of(matrix.shape) else {
        unreachable!("rounded for a matrix of quants")
    };
    let (bytes, scale_bytes) = (format.row_bytes(cols), format.row_scale_bytes(cols));
    let (at, step) = matrix.stored(part.start);
    let stored = (part.len().max(1) - 1) * step + 1;
    let piece = |bytes: usize| at * bytes..(at + stored) * bytes;
    let biases = if format.is_affine() { &matrix.biases[piece(scale_bytes)] } else { &[] };
    let w = QuantRows {
        count: part.len(),
        q: (&matrix.weights[piece(bytes)], step * bytes),
        scale_bytes,
        scales: (&matrix.scales[piece(scale_bytes)], step * scale_bytes),
        biases: (biases, step * scale_bytes),
        of,
    };
    (w, quant, Groups { cols, group })
}

impl Kernels {
    /// Products of rows of numbers, which the `first` rows of activations bring from memory.
    pub(super) fn numbers(
        self,
        scalar: Scalar,
        (w, first): (&[&[u8]], bool),
        x: &[&[f32]],
        sums: &mut Sums,
    ) {
        let cols = x.first().map_or(0, |x| x.len());
        assert!(w.len() <= TILE && x.len() <= TILE);
        assert!(
            w.iter().all(|w| w.len() == cols * scalar.bytes()) && x.iter().all(|x| x.len() == cols)
        );
        // SAFETY: the table's set is there, and the rows are of one length.
        unsafe { (self.0.numbers)(scalar, (w, first), x, sums) }
    }

    /// Products of rows of quants of so many bits in groups, and of f32.
    fn affine(
        self,
        w: &[AffineRow<'_>; TILE],
        (bits, group): (usize, usize),
        x: &[&[f32]],
        sums: &mut Sums,
    ) {
        let cols = x.first().map_or(0, |x| x.len());
        assert!(x.len() <= TILE && x.iter().all(|x| x.len() == cols));
        assert!(group.is_power_of_two() && group >= GROUP && cols.is_multiple_of(group));
        assert!(
            w.iter().all(|w| w.q.len() == cols * bits / 8
                && w.scales.len().min(w.biases.len()) == cols / group)
        );
        // SAFETY: the table's set is there, and the lengths are as the algorithm wants them.
        unsafe { (self.0.affine)(w, (bits, group), x, sums) }
    }

    /// Rows of a tile of quants.
    pub(crate) fn lanes(self) -> usize {
        self.0.lanes
    }

    /// Products of rows `part` of a matrix of quants, [`Kernels::lanes`] at most, and `count` rows of rounded activations, of which row `i`
    /// is number `at(i)`; the lane has room for their inputs. `each` gets them row by row.
    pub(crate) fn tile(
        self,
        matrix: &Matrix<'_>,
        part: Range<usize>,
        (x, count, at): (&Rounded<'_>, usize, impl Fn(usize) -> usize),
        lane: &mut Lane,
        mut each: impl FnMut(usize, &mut [f32]),
    ) {
        assert!(part.len() <= self.lanes());
        let (outputs, (w, quant, groups)) = (part.len(), quant_rows(matrix, part));
        assert_eq!((x.cols, x.of), (groups.cols, (quant, groups.group)));
        let padded = padded(groups.cols);
        let (bytes, numbers) =
            (&mut lane.bytes[..tile_bytes(padded)], &mut lane.numbers[..tile_numbers(padded)]);
        let mut sums = [[0.0; MAX_LANES]; BATCH];
        let mut rows = [RoundedRow { q: &[], scales: &[], sums: &[] }; BATCH];
        let mut done = 0;
        while done < count {
            let most = if done == 0 { self.0.first } else { BATCH };
            let n = most.min(count - done);
            rows[..n].iter_mut().enumerate().for_each(|(i, row)| *row = x.row(at(done + i)));
            // SAFETY: the table's set is there, and rows, tile, scratch and activations are as large as their types say.
            unsafe {
                if done == 0 {
                    let tile = (n < count).then_some(&mut *bytes);
                    (self.0.unpack)(quant, &w, &rows[..n], groups, (tile, numbers), &mut sums);
                } else {
                    (self.0.batch)(quant, (bytes, numbers), &rows[..n], groups, &mut sums);
                }
            }
            (0..n).for_each(|c| each(done + c, &mut sums[c][..outputs]));
            done += n;
        }
    }

    /// Products of rows `part` of a matrix of quants, [`MAX_OUTPUTS`] at most, and rows `at` of rounded activations, [`FEW`] of them
    /// at most, whose inputs the lane has room for. `each` gets them row by row.
    pub(crate) fn decode(
        self,
        matrix: &Matrix<'_>,
        part: Range<usize>,
        (x, at): (&Rounded<'_>, &[usize]),
        lane: &mut Lane,
        mut each: impl FnMut(usize, &mut [f32]),
    ) {
        let outputs = part.len();
        assert!((1..=FEW).contains(&at.len()) && (1..=MAX_OUTPUTS).contains(&outputs));
        let (w, quant, groups) = quant_rows(matrix, part);
        assert_eq!((x.cols, x.of), (groups.cols, (quant, groups.group)));
        let (scratch, stride) = (&mut lane.numbers[..], laid_out_bytes(padded(groups.cols)));
        let key = std::array::from_fn(|i| at.get(i).copied().unwrap_or(usize::MAX));
        let (room, laid_out) = &mut lane.laid_out;
        if laid_out.replace((x.number, key)) != Some((x.number, key)) {
            for (room, at) in room.chunks_exact_mut(stride).zip(at) {
                // SAFETY: the table's set is there, and there is room for a row of so many inputs.
                unsafe { (self.0.lay_out)(quant, &x.row(*at), groups.cols, room) }
            }
        }
        let mut rows = [LaidOut { blocks: &[], sums: &[] }; FEW];
        for ((row, blocks), at) in rows.iter_mut().zip(room.chunks_exact(stride)).zip(at) {
            (row.blocks, row.sums) = (blocks, x.row(*at).sums);
        }
        let (rows, sums) = (&rows[..at.len()], &mut lane.sums[..at.len() * outputs]);
        let in_place = match w.of {
            Scales::Affine(Scalar::F32) => true,
            // More rows leave no register for a scale that more than one instruction makes.
            Scales::Affine(Scalar::BF16) => 2 * at.len() <= self.0.first,
            Scales::Affine(Scalar::F16) | Scales::E2M1(_) => false,
        };
        let at_once = if in_place { outputs } else { widened_at_once(groups) };
        for first in (0..outputs).step_by(at_once) {
            let mut w = w.part(first..outputs.min(first + at_once));
            if !in_place {
                let (scales, rest) = scratch.split_at_mut(w.count * groups.count());
                let biases = &mut rest[..scales.len()];
                // SAFETY: the table's set is there, and there is room for all groups.
                unsafe { (self.0.widen_scales)(&w, groups, [scales, biases]) }
                let apart = groups.count() * size_of::<f32>();
                w.scales = (bytemuck::cast_slice(scales), apart);
                w.biases = (bytemuck::cast_slice(biases), apart);
                w.of = Scales::Affine(Scalar::F32);
            }
            // SAFETY: the table's set is there, and rows, activations and sums are as large as their types say.
            unsafe { (self.0.decode)(quant, &w, rows, groups, (&mut sums[first..], outputs)) }
        }
        sums.chunks_exact_mut(outputs).enumerate().for_each(|(i, sums)| each(i, sums));
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
    pub(crate) fn widen_rows(
        self,
        matrix: &Matrix<'_>,
        first: usize,
        lane: &mut Lane,
        out: &mut [f32],
    ) {
        for (i, out) in out.chunks_exact_mut(matrix.shape.cols).enumerate() {
            self.widen_row(matrix, first + i, &mut lane.numbers, out);
        }
    }

    /// Widens a row of packed quants: `out = scale * q + bias` with one of each per group.
    fn widen_quants(
        self,
        bits: u8,
        row: &[u8],
        scales: (&[f32], &[f32]),
        group: usize,
        out: &mut [f32],
    ) {
        let groups = out.len() / group;
        assert!(out.len().is_multiple_of(group) && group.is_power_of_two() && group >= GROUP);
        assert!(row.len() >= out.len() * usize::from(bits) / 8);
        assert!(scales.0.len() >= groups && scales.1.len() >= groups);
        // SAFETY: the table's set is there, and the lengths are as the algorithm wants them.
        unsafe { (self.0.widen_quants)(bits, row, scales, group, out) }
    }

    /// Products of rows of small floats and of f32.
    pub(super) fn blocks(self, element: Element, w: &[Blocks<'_>], x: &[&[f32]], sums: &mut Sums) {
        let (block, cols) = (w.first().map_or(0, |w| w.block), x.first().map_or(0, |x| x.len()));
        assert!(w.len() <= TILE && x.len() <= TILE && x.iter().all(|x| x.len() == cols));
        assert!(block > 0 && block.is_multiple_of(MAX_LANES) && cols.is_multiple_of(MAX_LANES));
        assert!(w.iter().all(|w| w.block == block && w.has(element, cols)));
        // SAFETY: the table's set is there, and so are elements and scales; all are whole vectors of any set.
        unsafe { (self.0.blocks)(element, w, x, sums) }
    }

    /// Widens a row of small floats.
    pub(crate) fn widen_blocks(self, element: Element, row: &Blocks<'_>, out: &mut [f32]) {
        assert!(row.has(element, out.len()) && (row.block * element.bits()).is_multiple_of(8));
        // SAFETY: the table's set is there, and so are elements and scales; blocks begin at whole bytes.
        unsafe { (self.0.widen_blocks)(element, row, out) }
    }
}
