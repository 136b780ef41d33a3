//! Products of quants and many rows of activations rounded to 8 bits, over the vectors of any instruction set, as in
//! [`algorithm`](super::algorithm).
//!
//! A tile is as many rows of weights as a vector of f32 has lanes. Packed rows are transposed by fours of bytes: a
//! vector ([`Simd::D`]) then has the same four bytes of each row, and shifts and masks make of it vectors with four
//! quants of each row. Activations lie in the order of those fours, so a four of them, broadcast, meets all rows of the
//! tile in one dot product. A sum over a group has no partial sums across lanes: it is an integer until it is scaled, and
//! then one multiplication and addition for all rows of weights. A tile is unpacked once for all rows of activations, of which the first meet
//! it meanwhile.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are walked together, and without closures"
)]

use std::{mem::MaybeUninit, ops::Range};

use super::{
    algorithm::{Bf16, Column, F16, F32, GROUP, LINE, MAX_LANES, MAX_UNIT, Pointers, Simd, ends},
    blocks::scaled,
    quants::{E2M1_BIAS, Packing, parts},
};
use crate::{BlockScale, Scalar};

/// Most rows of activations that meet an unpacked tile in one call.
pub(crate) const BATCH: usize = 8;
/// Vectors of four quants of each row that a group of activations meets.
const VECTORS: usize = GROUP / 4;

/// A row of activations that was rounded to 8 bits.
#[derive(Clone, Copy)]
pub(super) struct RoundedRow<'a> {
    /// In the order that [`quantize`](super::quants::quantize) makes, padded with zeros to whole blocks.
    pub(super) q: &'a [i8],
    /// One per [`GROUP`], padded with zeros to whole blocks.
    pub(super) scales: &'a [f32],
    /// One per group of the weights.
    pub(super) sums: &'a [f32],
}

/// Inputs of a row and inputs that share a scale.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    pub(super) cols: usize,
    /// A power of two, 16 at least.
    pub(super) group: usize,
}

impl Groups {
    /// Groups of a row.
    pub(super) const fn count(self) -> usize {
        self.cols / self.group
    }
}

/// What scales and biases of quants are made of.
#[derive(Clone, Copy)]
pub(super) enum Scales {
    /// Numbers, both.
    Affine(Scalar),
    /// Scales of E2M1.
    E2M1(BlockScale),
}

/// Rows of packed quants one behind the other, from the first one on: bytes, and by how many the next row is further.
#[derive(Clone, Copy)]
pub(super) struct QuantRows<'a> {
    pub(super) count: usize,
    pub(super) q: (&'a [u8], usize),
    /// Bytes of a row's scales, and of its biases if there are any.
    pub(super) scale_bytes: usize,
    pub(super) scales: (&'a [u8], usize),
    pub(super) biases: (&'a [u8], usize),
    pub(super) of: Scales,
}

impl<'a> QuantRows<'a> {
    /// Some of the rows.
    pub(super) fn part(&self, rows: Range<usize>) -> Self {
        let behind =
            |(all, apart): (&'a [u8], usize)| (&all[(rows.start * apart).min(all.len())..], apart);
        let mut part = *self;
        part.count = rows.len();
        (part.q, part.scales, part.biases) =
            (behind(self.q), behind(self.scales), behind(self.biases));
        part
    }
}

/// Numbers of scratch that a tile of rows of so many inputs, padded to whole blocks, needs for groups of any size: a scale
/// and a bias for each group and row, and as many before they are transposed.
pub(super) const fn tile_numbers(padded: usize) -> usize {
    3 * MAX_LANES * (padded / 16)
}

/// Bytes of an unpacked tile.
pub(super) const fn tile_bytes(padded: usize) -> usize {
    MAX_LANES * padded
}

/// Pointers to rows. At the end of a matrix its last row stands for those that are not there.
#[inline(always)]
fn pointers((all, stride): (&[u8], usize), count: usize) -> Pointers {
    std::array::from_fn(|i| all.as_ptr().wrapping_add(i.min(count - 1) * stride))
}

/// Room for the vectors of a block.
#[repr(align(64))]
struct Vectors {
    _bytes: [[u8; MAX_UNIT]; MAX_LANES],
}

/// The blocks that a packing is read in: so many bytes of every row that their transposition fills whole vectors.
struct Block<S, P>(S, P);

impl<S: Simd, P: Packing> Block<S, P> {
    /// Vectors of quants in a vector of packed bytes; quants that do not share bytes evenly are unpacked first.
    const KV_SPLITS: usize = parts(P::BITS);
    /// Quants of a row.
    const QUANTS: usize = S::DWORDS * 4 * Self::KV_SPLITS;
    /// Bytes of a packed row.
    const BYTES: usize = Self::QUANTS * P::BITS / 8;
    /// Groups of activations that it meets.
    const GROUPS: usize = Self::QUANTS / GROUP;
    const IN_ORDER: bool = Self::KV_SPLITS == 1 && P::BITS < 8;

    /// Bytes that reading a block of a row takes at most.
    fn reach() -> usize {
        if Self::IN_ORDER {
            S::reach(P::BITS) + (Self::QUANTS / S::UNIT - 1) * S::UNIT * P::BITS / 8
        } else {
            Self::BYTES
        }
    }

    /// Where block `b` of rows is read, pointers and what to add to them: in the rows themselves if it is one of those `inside`, else in a
    /// copy of their ends.
    ///
    /// # Safety
    /// The rows have `bytes` bytes, and such a block.
    #[inline(always)]
    unsafe fn place<'a>(
        (rows, bytes, inside): (&'a Pointers, usize, usize),
        b: usize,
        end: &'a mut ([[u8; MAX_UNIT]; MAX_LANES], Pointers),
    ) -> (&'a Pointers, usize) {
        let at = b * Self::BYTES;
        if b < inside {
            return (rows, at);
        }
        // SAFETY: the caller's.
        end.0 = unsafe { ends::<S>(rows, at, bytes - at) };
        end.1 = end.0.each_ref().map(|end| end.as_ptr());
        (&end.1, 0)
    }

    /// Steps in which a block is transposed.
    const STEPS: usize = if Self::IN_ORDER { 1 } else { S::STEPS };

    /// Step `i` of the transposition of the block that begins at byte `at` of rows, as of [`Simd::columns_step`].
    ///
    /// # Safety
    /// `reach` bytes can be read there of every row.
    #[inline(always)]
    unsafe fn step(rows: &Pointers, at: usize, i: usize, to: [*mut u8; 2]) {
        // SAFETY: the caller's; an array holds the units of a block.
        unsafe {
            if !Self::IN_ORDER {
                return S::columns_step(rows, at, i, to);
            }
            let mut bytes = [[0u8; MAX_UNIT]; MAX_LANES];
            for r in 0..S::LANES {
                let from = rows[r].add(at);
                for u in 0..Self::QUANTS / S::UNIT {
                    let from = from.add(u * S::UNIT * P::BITS / 8);
                    let unit = match P::BITS {
                        3 => S::unpack::<3>(from),
                        5 => S::unpack::<5>(from),
                        _ => S::unpack::<6>(from),
                    };
                    S::store_bytes(bytes[r].as_mut_ptr().add(u * S::UNIT), unit);
                }
            }
            let bytes = bytes.each_ref().map(|row| row.as_ptr());
            for i in 0..S::STEPS {
                S::columns_step(&bytes, 0, i, to);
            }
        }
    }

    /// What group `i` of the activations meets of a transposed block.
    #[inline(always)]
    unsafe fn vectors(block: *const u8, i: usize) -> [S::W; VECTORS] {
        // SAFETY: the caller's.
        unsafe {
            let mut vectors = [S::factors(S::load_dwords(block)); VECTORS];
            for v in 0..VECTORS {
                let packed =
                    S::load_dwords(block.add((i * VECTORS + v) / Self::KV_SPLITS * 4 * S::LANES));
                vectors[v] = S::factors(if is_centred::<S, P>() {
                    S::centred(packed)
                } else if Self::KV_SPLITS == 1 {
                    packed
                } else {
                    P::quants::<S>(S::bits(packed, v % Self::KV_SPLITS * P::BITS, P::BITS))
                });
            }
            vectors
        }
    }

    /// Adds the products of all rows, and stores their vectors one behind the other in a tile, unless it is null. What lies `ahead`
    /// bytes behind is asked for. While a block is multiplied the next one is transposed, step by step, as one has little use for what
    /// the other keeps busy.
    ///
    /// # Safety
    /// The rows have `bytes` bytes, and the tile has room for whole blocks.
    #[inline(always)]
    unsafe fn walk<const X: usize>(
        (rows, bytes, ahead): (&Pointers, usize, usize),
        tile: *mut u8,
        products: &mut Products<'_, S, X>,
    ) {
        let count = bytes.div_ceil(Self::BYTES);
        // Blocks that can be loaded without reading beyond their row.
        let inside = ((bytes + Self::BYTES).saturating_sub(Self::reach()) / Self::BYTES).min(count);
        let mut end = ([[0; MAX_UNIT]; MAX_LANES], *rows);
        let mut room = [const { MaybeUninit::<Vectors>::uninit() }; 3];
        let [between, mut block, mut next] =
            room.each_mut().map(|room| room.as_mut_ptr().cast::<u8>());
        // SAFETY: the caller's; a block is read up to the end of the row only.
        unsafe {
            let (from, at) = Self::place((rows, bytes, inside), 0, &mut end);
            for i in 0..Self::STEPS {
                Self::step(from, at, i, [between, block]);
            }
            for b in 0..count {
                for row in &rows[..S::LANES] {
                    S::prefetch(row.wrapping_add(b * Self::BYTES + ahead));
                }
                let more = b + 1 < count;
                let (from, at) = if more {
                    Self::place((rows, bytes, inside), b + 1, &mut end)
                } else {
                    (rows, 0)
                };
                for i in 0..Self::GROUPS {
                    if more {
                        for i in
                            i * Self::STEPS / Self::GROUPS..(i + 1) * Self::STEPS / Self::GROUPS
                        {
                            Self::step(from, at, i, [between, next]);
                        }
                    }
                    let (group, vectors) = (b * Self::GROUPS + i, Self::vectors(block, i));
                    if !tile.is_null() {
                        tile.cast::<[S::W; VECTORS]>().add(group).write_unaligned(vectors);
                    }
                    products.add::<P>(group, vectors);
                }
                (block, next) = (next, block);
            }
        }
    }
}

/// Whether unpacked quants are 128 less than packed ones, which biases make up for.
const fn is_centred<S: Simd, P: Packing>() -> bool {
    S::CENTRED && P::BITS == 8
}

/// Sums of the products of a tile and `X` rows of activations, group by group.
struct Products<'a, S: Simd, const X: usize> {
    x: &'a [RoundedRow<'a>; X],
    /// Scales and biases of the tile.
    of: [*const f32; 2],
    /// The logarithm of how many groups of activations are in one of the weights, and how many in the row.
    shift: u32,
    count: usize,
    of_group: [S::F; X],
    acc: [S::F; X],
}

impl<'a, S: Simd, const X: usize> Products<'a, S, X> {
    /// # Safety
    /// Needs the instruction set; scratch comes from [`widen_scales`], the activations are as their type says.
    #[inline(always)]
    unsafe fn new(scratch: &[f32], x: &'a [RoundedRow<'a>; X], groups: Groups) -> Self {
        // SAFETY: the caller's.
        let zero = unsafe { S::zero() };
        Self {
            x,
            of: scale_places::<S>(groups, scratch.as_ptr()),
            shift: (groups.group / GROUP).trailing_zeros(),
            count: groups.cols / GROUP,
            of_group: [zero; X],
            acc: [zero; X],
        }
    }

    /// Adds what group `i` of the activations makes with its vectors; what is behind the row makes nothing.
    ///
    /// # Safety
    /// As [`Products::new`]; groups come in order.
    #[inline(always)]
    unsafe fn add<P: Packing>(&mut self, i: usize, w: [S::W; VECTORS]) {
        if i >= self.count {
            return;
        }
        // SAFETY: the caller's.
        unsafe {
            let mut x = [self.x[0].q.as_ptr(); X];
            for c in 0..X {
                x[c] = self.x[c].q.as_ptr().add(i * GROUP);
            }
            let sums = S::dot_rows::<P, X>(w, x);
            for c in 0..X {
                let scale = S::splat(*self.x[c].scales.as_ptr().add(i));
                self.of_group[c] = S::fma(S::float(sums[c]), scale, self.of_group[c]);
            }
            let g = i >> self.shift;
            if (i + 1) >> self.shift == g {
                return;
            }
            let [scale, bias] =
                [S::load(self.of[0].add(g * S::LANES)), S::load(self.of[1].add(g * S::LANES))];
            for c in 0..X {
                // Together they are small, where each may be large.
                let bias = S::mul(bias, S::splat(*self.x[c].sums.as_ptr().add(g)));
                self.acc[c] =
                    S::fma(S::splat(1.0), S::fma(self.of_group[c], scale, bias), self.acc[c]);
                self.of_group[c] = S::zero();
            }
        }
    }

    /// # Safety
    /// Needs the instruction set.
    #[inline(always)]
    unsafe fn store(&self, out: &mut [[f32; MAX_LANES]]) {
        for c in 0..X {
            // SAFETY: the caller's; a vector has no more numbers than there is room for.
            unsafe { S::store(out[c].as_mut_ptr(), self.acc[c]) };
        }
    }
}

/// The products of a packed tile of rows and the first `X` rows of rounded activations. With a tile to write to it is unpacked there, for
/// [`batch`].
///
/// # Safety
/// Tile and scratch are as large as [`tile_bytes`] and [`tile_numbers`] say; there are rows, [`Simd::LANES`] at most; the
/// activations are as their type says.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, P: Packing, const X: usize>(
    w: &QuantRows<'_>,
    x: &[RoundedRow<'_>; X],
    groups: Groups,
    (tile, scratch): (Option<&mut [u8]>, &mut [f32]),
    out: &mut [[f32; MAX_LANES]],
) {
    const { assert!(size_of::<[S::W; VECTORS]>() <= tile_bytes(GROUP)) };
    let bytes = groups.cols * P::BITS / 8;
    let tile = tile.map_or(std::ptr::null_mut(), <[u8]>::as_mut_ptr);
    // SAFETY: the caller's.
    unsafe {
        widen_scales::<S>(w, groups, scratch);
        if is_centred::<S, P>() {
            let numbers = groups.count() * S::LANES;
            let (scales, biases) = scratch[..2 * numbers].split_at_mut(numbers);
            for (scale, bias) in
                scales.chunks_exact(S::LANES).zip(biases.chunks_exact_mut(S::LANES))
            {
                let more = S::fma(S::splat(128.0), S::load(scale.as_ptr()), S::load(bias.as_ptr()));
                S::store(bias.as_mut_ptr(), more);
            }
        }
        let (rows, mut products) = (pointers(w.q, w.count), Products::new(scratch, x, groups));
        Block::<S, P>::walk((&rows, bytes, w.q.1 * S::LANES), tile, &mut products);
        products.store(out);
    }
}

/// The products of an unpacked tile and up to [`BATCH`] rows of rounded activations; `P` says how large quants are.
///
/// # Safety
/// Tile and scratch come from [`unpack`], the activations are as their type says.
#[inline(always)]
pub(super) unsafe fn batch<S: Simd, P: Packing>(
    (tile, scratch): (&[u8], &[f32]),
    x: &[RoundedRow<'_>],
    groups: Groups,
    out: &mut [[f32; MAX_LANES]],
) {
    /// With `X` rows of activations; returns how many that were.
    #[inline(always)]
    unsafe fn part<S: Simd, P: Packing, const X: usize>(
        (tile, scratch): (&[u8], &[f32]),
        x: &[RoundedRow<'_>; X],
        groups: Groups,
        out: &mut [[f32; MAX_LANES]],
    ) -> usize {
        // SAFETY: the caller's.
        unsafe {
            let mut products = Products::<S, X>::new(scratch, x, groups);
            for i in 0..groups.cols / GROUP {
                products
                    .add::<P>(i, tile.as_ptr().cast::<[S::W; VECTORS]>().add(i).read_unaligned());
            }
            products.store(out);
        }
        X
    }
    let (mut at, of) = (0, (tile, scratch));
    // SAFETY: the caller's.
    unsafe {
        while at < x.len() {
            let (rest, out) = (&x[at..], &mut out[at..]);
            at += if let (true, Some(x)) = (S::WIDTH >= 4, rest.first_chunk::<8>()) {
                part::<S, P, 8>(of, x, groups, out)
            } else if let (true, Some(x)) = (S::WIDTH >= 2, rest.first_chunk::<4>()) {
                part::<S, P, 4>(of, x, groups, out)
            } else if let (true, Some(x)) = (S::WIDTH >= 2, rest.first_chunk::<2>()) {
                part::<S, P, 2>(of, x, groups, out)
            } else {
                part::<S, P, 1>(of, &[rest[0]], groups, out)
            };
        }
    }
}

/// Where scales and biases of a tile lie in its scratch.
#[inline(always)]
fn scale_places<S: Simd>(groups: Groups, scratch: *const f32) -> [*const f32; 2] {
    [scratch, scratch.wrapping_add(groups.count() * S::LANES)]
}

/// Widens and transposes the scales and biases of rows to `(groups, LANES)` each.
///
/// # Safety
/// As [`unpack`].
#[inline(always)]
unsafe fn widen_scales<S: Simd>(w: &QuantRows<'_>, groups: Groups, scratch: &mut [f32]) {
    let count = groups.count();
    let scales = scratch.as_mut_ptr();
    let biases = scales.wrapping_add(count * S::LANES);
    // SAFETY: the caller's: scratch has three parts of so many numbers.
    unsafe {
        // Those of the next tile.
        for (all, apart) in [w.scales, w.biases].into_iter().filter(|(all, _)| !all.is_empty()) {
            for at in (0..S::LANES * apart).step_by(LINE) {
                S::prefetch(all.as_ptr().wrapping_add(S::LANES * apart + at));
            }
        }
        match w.of {
            Scales::Affine(scalar) => {
                for (all, to) in [(w.scales, scales), (w.biases, biases)] {
                    let rows = pointers(all, w.count);
                    match scalar {
                        Scalar::F32 => transpose::<S, F32>(&rows, count, to),
                        Scalar::F16 => transpose::<S, F16>(&rows, count, to),
                        Scalar::BF16 => transpose::<S, Bf16>(&rows, count, to),
                    }
                }
            }
            Scales::E2M1(of) => {
                let wide = biases.add(count * S::LANES);
                let mut rows = pointers(w.scales, w.count);
                for (r, row) in rows[..S::LANES].iter_mut().enumerate() {
                    let bytes = std::slice::from_raw_parts(*row, w.scale_bytes);
                    let halves = std::slice::from_raw_parts_mut(wide.add(r * count), count);
                    scaled::<S>(of, bytes, 0.5, halves);
                    *row = halves.as_ptr().cast();
                }
                transpose::<S, F32>(&rows, count, scales);
                for g in 0..count {
                    let half = S::load(scales.add(g * S::LANES));
                    S::store(biases.add(g * S::LANES), S::mul(half, S::splat(E2M1_BIAS)));
                }
            }
        }
    }
}

/// Widens `count` numbers of each row: `(count, LANES)`.
///
/// # Safety
/// The numbers can be read, and there is room for whole blocks of them, or `count` is padded.
#[inline(always)]
unsafe fn transpose<S: Simd, E: Column>(rows: &Pointers, count: usize, to: *mut f32) {
    let (size, each) = (E::SCALAR.bytes(), 4 / E::SCALAR.bytes());
    let (bytes, block_bytes) = (count * size, S::DWORDS * 4);
    let whole = bytes / block_bytes;
    // SAFETY: the caller's; what is left over is read up to the end of the row only.
    unsafe {
        for b in 0..whole {
            let block = S::columns(rows, b * block_bytes);
            let to = to.add(b * S::DWORDS * each * S::LANES);
            for d in 0..S::DWORDS {
                let numbers = E::column::<S>(block[d]);
                for i in 0..each {
                    S::store(to.add((d * each + i) * S::LANES), numbers[i]);
                }
            }
        }
        let at = whole * block_bytes;
        if at < bytes {
            let block = S::first_columns(rows, at, bytes - at);
            for d in 0..S::DWORDS {
                let numbers = E::column::<S>(block[d]);
                for i in 0..each {
                    let g = at / size + d * each + i;
                    if g < count {
                        S::store(to.add(g * S::LANES), numbers[i]);
                    }
                }
            }
        }
    }
}
