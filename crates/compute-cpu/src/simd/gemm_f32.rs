//! GEMM with f32 activations: tiles of up to [`TILE_ROWS`] rows of weights times as many rows of
//! activations, `y[c][r] = sum_i w[r][i] * x[c][i]`.
//!
//! A sum over a row is one vector of partial sums, filled from left to right and reduced at the
//! end. Its bits do not depend on how many rows share a tile.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use super::{
    float_types::FloatType,
    vector::{L1_PREFETCH, MAX_LANES, MAX_VECTOR_BYTES, Simd, prefetch_rows},
};

/// Most rows of weights, and most rows of activations, of a tile.
pub(crate) const TILE_ROWS: usize = 4;
/// Products of a tile: `[row of weights][row of activations]`.
pub(crate) type F32TileSums = [[f32; TILE_ROWS]; TILE_ROWS];

/// Rows of plain floats of a tile.
#[derive(Clone, Copy)]
pub(super) struct FloatTile<'a> {
    /// At most [`TILE_ROWS`] rows.
    pub(super) rows: &'a [&'a [u8]],
    /// Whether to prefetch the rows that follow in memory: set once per tile.
    pub(super) prefetch: bool,
}

/// Adds the products of `R` rows of weights and `X` rows of activations to vectors of partial sums.
/// With `PREFETCH`, rows that follow those of `w` in memory are prefetched.
///
/// # Safety
/// The Simd contract; all rows have `cols` values.
#[inline(always)]
pub(super) unsafe fn add_products<
    S: Simd,
    E: FloatType,
    const R: usize,
    const X: usize,
    const PREFETCH: bool,
>(
    acc: &mut [[S::F32; X]; R],
    w: [*const u8; R],
    x: [*const f32; X],
    cols: usize,
) {
    let size = E::SCALAR.bytes();
    let whole = cols / S::LANES * S::LANES;
    let ahead =
        if PREFETCH { prefetch_rows(L1_PREFETCH, cols * size, TILE_ROWS) * cols * size } else { 0 };
    let mut i = 0;
    while i < whole {
        // SAFETY: Simd contract; i + LANES <= cols.
        unsafe {
            if PREFETCH {
                for r in 0..R {
                    S::prefetch_l1(w[r].wrapping_add(i * size + ahead));
                }
            }
            let (mut ws, mut xs) = (w, x);
            for r in 0..R {
                ws[r] = w[r].add(i * size);
            }
            for c in 0..X {
                xs[c] = x[c].add(i);
            }
            add_vector::<S, E, R, X>(acc, ws, xs);
        }
        i += S::LANES;
    }
    let rest = cols - whole;
    if rest > 0 {
        let mut ws = [[0u8; MAX_VECTOR_BYTES]; R];
        let mut xs = [[0f32; MAX_LANES]; X];
        // SAFETY: Simd contract; the rest is shorter than a vector, and the arrays hold a vector.
        unsafe {
            for (r, buffer) in ws.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(
                    w[r].add(whole * size),
                    buffer.as_mut_ptr(),
                    rest * size,
                );
            }
            for (c, buffer) in xs.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(x[c].add(whole), buffer.as_mut_ptr(), rest);
            }
            let (ws, xs) =
                (std::array::from_fn(|r| ws[r].as_ptr()), std::array::from_fn(|c| xs[c].as_ptr()));
            add_vector::<S, E, R, X>(acc, ws, xs);
        }
    }
}

/// Adds the products of one vector per row.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn add_vector<S: Simd, E: FloatType, const R: usize, const X: usize>(
    acc: &mut [[S::F32; X]; R],
    w: [*const u8; R],
    x: [*const f32; X],
) {
    // SAFETY: Simd contract.
    unsafe {
        let mut xs = [S::zero(); X];
        for c in 0..X {
            xs[c] = S::load(x[c]);
        }
        for r in 0..R {
            let w = E::load::<S>(w[r]);
            for c in 0..X {
                acc[r][c] = S::fma(w, xs[c], acc[r][c]);
            }
        }
    }
}

/// Products of `R` rows of weights and `X` rows of activations.
///
/// # Safety
/// As [`add_products`].
#[inline(always)]
unsafe fn row_products<
    S: Simd,
    E: FloatType,
    const R: usize,
    const X: usize,
    const PREFETCH: bool,
>(
    w: [*const u8; R],
    x: [*const f32; X],
    cols: usize,
) -> [[f32; X]; R] {
    // SAFETY: as this function.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        add_products::<S, E, R, X, PREFETCH>(&mut acc, w, x, cols);
        reduce_tile::<S, R, X>(&acc)
    }
}

/// Horizontal sums of a tile's vectors of partial sums.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
pub(super) unsafe fn reduce_tile<S: Simd, const R: usize, const X: usize>(
    acc: &[[S::F32; X]; R],
) -> [[f32; X]; R] {
    let mut sums = [[0.0; X]; R];
    let (fours, rest) = acc.as_flattened().as_chunks::<4>();
    let (dst_fours, dst_rest) = sums.as_flattened_mut().as_chunks_mut::<4>();
    for (dst, four) in dst_fours.iter_mut().zip(fours) {
        // SAFETY: Simd contract.
        *dst = unsafe { S::sum4(*four) };
    }
    for (dst, vector) in dst_rest.iter_mut().zip(rest) {
        // SAFETY: Simd contract.
        *dst = unsafe { S::sum(*vector) };
    }
    sums
}

/// Products of up to [`TILE_ROWS`] rows of plain floats and as many rows of activations. Computed
/// in parts whose sums fit in registers.
///
/// # Safety
/// The Simd contract; rows of `w` and of `x` have equally many values.
#[inline(always)]
pub(super) unsafe fn float_tile<S: Simd, E: FloatType>(
    w: FloatTile<'_>,
    x: &[&[f32]],
    sums: &mut F32TileSums,
) {
    /// All rows of weights with `X` rows of activations.
    #[inline(always)]
    unsafe fn part<S: Simd, E: FloatType, const X: usize, const PREFETCH: bool>(
        w: &[&[u8]],
        x: &[&[f32]; X],
        offset: usize,
        sums: &mut F32TileSums,
    ) {
        let (rows, cols) = (x.map(<[f32]>::as_ptr), x[0].len());
        let mut write = |first: usize, tile: &[[f32; X]]| {
            for (dst, src) in sums[first..].iter_mut().zip(tile) {
                dst[offset..offset + X].copy_from_slice(src);
            }
        };
        // With one row of activations, memory delivers two rows of weights at a time faster.
        let (pairs, rest) = if X == 1 { w.as_chunks::<2>() } else { (&[][..], w) };
        // SAFETY: as `float_tile`.
        unsafe {
            for (i, pair) in pairs.iter().enumerate() {
                let pair = pair.map(<[u8]>::as_ptr);
                write(2 * i, &row_products::<S, E, 2, X, PREFETCH>(pair, rows, cols));
            }
            if let Ok(w) = <&[&[u8]; TILE_ROWS]>::try_from(rest) {
                let w = w.map(<[u8]>::as_ptr);
                return write(0, &row_products::<S, E, TILE_ROWS, X, PREFETCH>(w, rows, cols));
            }
            for (i, w) in rest.iter().enumerate() {
                write(
                    2 * pairs.len() + i,
                    &row_products::<S, E, 1, X, PREFETCH>([w.as_ptr()], rows, cols),
                );
            }
        }
    }
    /// [`part`] that prefetches for the first rows of activations. Returns `X`.
    #[inline(always)]
    unsafe fn each<S: Simd, E: FloatType, const X: usize>(
        w: FloatTile<'_>,
        x: &[&[f32]; X],
        offset: usize,
        sums: &mut F32TileSums,
    ) -> usize {
        // SAFETY: as `float_tile`.
        unsafe {
            if w.prefetch && offset == 0 {
                part::<S, E, X, true>(w.rows, x, offset, sums);
            } else {
                part::<S, E, X, false>(w.rows, x, offset, sums);
            }
        }
        X
    }
    let mut offset = 0;
    // SAFETY: as this function.
    unsafe {
        while offset < x.len() {
            let rest = &x[offset..];
            offset += if let (true, Some(x)) = (S::TILE_ACTIVATIONS >= 4, rest.first_chunk::<4>()) {
                each::<S, E, 4>(w, x, offset, sums)
            } else if let (true, Some(x)) = (S::TILE_ACTIVATIONS >= 2, rest.first_chunk::<2>()) {
                each::<S, E, 2>(w, x, offset, sums)
            } else {
                each::<S, E, 1>(w, &[rest[0]], offset, sums)
            };
        }
    }
}
