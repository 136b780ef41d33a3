//! The kernels: everything that is written for an instruction set.
//!
//! `algorithm` (matrices), `columns` (quants), `blocks` (small floats), `vectors` and `logits` have each algorithm once, over the vectors
//! that an instruction set file offers; `kernels!` makes
//! them functions that enable the instruction set; [`Kernels`] is the table of one set's functions, which can only
//! be had on a machine that has the set.

mod algorithm;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod columns;
mod few;
mod generic;
mod isa;
mod logits;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
mod peak;
mod quants;
mod vectors;

use std::fmt;

pub(crate) use algorithm::{GROUP, MAX_LANES, Sums, TILE};
use blocks::Blocks;
use columns::{BATCH, Groups, QuantRows, RoundedRow};
pub(crate) use few::FEW;
use few::LaidOut;
pub use isa::Isa;
pub(crate) use logits::{BINS, MAX_TALLIED, Scale, halved, units};
pub(crate) use panel::{Lane, MAX_OUTPUTS, MAX_WIDE_ROWS, Panel, Rounded, Rows, padded, quants_of};
pub use peak::CpuPeak;
use quants::AffineRow;
pub(crate) use quants::Quant;
pub(crate) use vectors::{Delta, Places, SoftmaxPartial, each};

use crate::{Element, Error, KvFormat, Scalar, host::dequantize_q8};

/// The functions of one instruction set. All of them need it; more is said where they are called.
#[allow(clippy::type_complexity, reason = "a table of functions is a table of their types")]
struct Table {
    numbers: unsafe fn(Scalar, (&[&[u8]], bool), &[&[f32]], &mut Sums),
    affine: unsafe fn(&[AffineRow<'_>; TILE], (usize, usize), &[&[f32]], &mut Sums),
    /// Rows of a tile of quants.
    lanes: usize,
    /// Rows of activations that meet quants while they are unpacked, at most.
    first: usize,
    lay_out: unsafe fn(Quant, &RoundedRow<'_>, usize, &mut [u8]),
    widen_scales: unsafe fn(&QuantRows<'_>, Groups, [&mut [f32]; 2]),
    decode: unsafe fn(Quant, &QuantRows<'_>, &[LaidOut<'_>], Groups, (&mut [f32], usize)),
    unpack: unsafe fn(
        Quant,
        &QuantRows<'_>,
        &[RoundedRow<'_>],
        Groups,
        (Option<&mut [u8]>, &mut [f32]),
        &mut [[f32; MAX_LANES]; BATCH],
    ),
    batch: unsafe fn(Quant, (&[u8], &[f32]), &[RoundedRow<'_>], Groups, &mut [[f32; MAX_LANES]]),
    widen_quants: unsafe fn(u8, &[u8], (&[f32], &[f32]), usize, &mut [f32]),
    widen: unsafe fn(Scalar, &[u8], &mut [f32]),
    widen_blocks: unsafe fn(Element, &Blocks<'_>, &mut [f32]),
    blocks: unsafe fn(Element, &[Blocks<'_>], &[&[f32]], &mut Sums),
    quantize: unsafe fn(&[f32], (usize, usize), &mut [i8], &mut [f32], &mut [f32]),
    silu_mul: unsafe fn(&mut [f32], &[f32]),
    mul_silu: unsafe fn(&mut [f32], &[f32]),
    mul_sigmoid: unsafe fn(&mut [f32], &[f32]),
    silu: unsafe fn(&mut [f32]),
    exp_sum: unsafe fn(&mut [f32], f32) -> f32,
    max: unsafe fn(&[f32]) -> f32,
    axpy: unsafe fn(&mut [f32], f32, &[f32]),
    join: unsafe fn(&mut [f32], SoftmaxPartial, &[f32]),
    scores: unsafe fn(&[&[f32]], Places<'_>, f32, &mut [f32], (Places<'_>, usize)),
    mix: unsafe fn(&[&[f32]], Places<'_>, &[SoftmaxPartial], &mut [&mut [f32]], &[u8]),
    delta: unsafe fn(&mut [f32], &[f32], &[f32], &[f32], &mut [f32], Delta),
    taps4: unsafe fn(&[f32], [&[f32]; 4], &mut [f32]),
    tally: unsafe fn(&[f32], f32, Scale, &mut [u64; BINS]),
    extent: unsafe fn(&[f32]) -> ([f32; 2], bool),
    between: unsafe fn(&[f32], [f32; 2], &mut dyn FnMut(usize, f32)),
}

/// Makes the algorithms functions of one instruction set.
macro_rules! kernels {
    ($module:ident, $simd:ty $(, #[$feature:meta])?) => {
        mod $module {
            use super::{
                BATCH, BINS, Delta, SoftmaxPartial, MAX_LANES, Places, Sums, TILE, Table,
                algorithm::{self, Bf16, F16, F32, Simd},
                blocks::{self, Blocks, E4m3},
                columns::{self, Groups, QuantRows, RoundedRow, Scales},
                few::{self, LaidOut, Scale},
                logits,
                quants::{self, AffineRow, Bits, E2m1, Quant},
                vectors,
            };
            use crate::{Element, Scalar};

            kernels! {
                $simd $(, #[$feature])?;
                affine(w: &[AffineRow<'_>; TILE], of: (usize, usize), x: &[&[f32]], sums: &mut Sums)
                    = quants::affine_tile::<$simd>;
                silu_mul(y: &mut [f32], x: &[f32]) = vectors::silu_mul::<$simd>;
                mul_silu(y: &mut [f32], x: &[f32]) = vectors::mul_silu::<$simd>;
                mul_sigmoid(y: &mut [f32], x: &[f32]) = vectors::mul_sigmoid::<$simd>;
                silu(y: &mut [f32]) = vectors::silu::<$simd>;
                exp_sum(x: &mut [f32], max: f32) -> f32 = vectors::exp_sum::<$simd>;
                max(x: &[f32]) -> f32 = vectors::max;
                axpy(y: &mut [f32], a: f32, x: &[f32]) = vectors::axpy::<$simd>;
                join(y: &mut [f32], by: SoftmaxPartial, x: &[f32]) = vectors::join::<$simd>;
                delta(state: &mut [f32], k: &[f32], q: &[f32], v: &[f32], y: &mut [f32], d: Delta)
                    = vectors::delta::<$simd>;
                taps4(weight: &[f32], inputs: [&[f32]; 4], out: &mut [f32]) = vectors::taps4::<$simd>;
                tally(logits: &[f32], least: f32, scale: logits::Scale, bins: &mut [u64; BINS]) = logits::tally;
                extent(logits: &[f32]) -> ([f32; 2], bool) = logits::extent;
                between(logits: &[f32], range: [f32; 2], f: &mut dyn FnMut(usize, f32)) = logits::between;
                widen_scales(w: &QuantRows<'_>, groups: Groups, to: [&mut [f32]; 2])
                    = few::widen_scales::<$simd>;
                quantize(
                    x: &[f32], of: (usize, usize), q: &mut [i8], scales: &mut [f32], sums: &mut [f32]
                ) = quants::quantize::<$simd>;
            }

            $(#[$feature])?
            unsafe fn numbers(scalar: Scalar, w: (&[&[u8]], bool), x: &[&[f32]], sums: &mut Sums) {
                // SAFETY: the caller's.
                unsafe {
                    match scalar {
                        Scalar::F32 => algorithm::number_tile::<$simd, F32>(w, x, sums),
                        Scalar::F16 => algorithm::number_tile::<$simd, F16>(w, x, sums),
                        Scalar::BF16 => algorithm::number_tile::<$simd, Bf16>(w, x, sums),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn scores(
                q: &[&[f32]],
                keys: Places<'_>,
                scale: f32,
                out: &mut [f32],
                next: (Places<'_>, usize),
            ) {
                // SAFETY: the caller's.
                unsafe {
                    match keys.scalar {
                        Scalar::F32 => vectors::scores::<$simd, F32>(q, keys, scale, out, next),
                        Scalar::F16 => vectors::scores::<$simd, F16>(q, keys, scale, out, next),
                        Scalar::BF16 => vectors::scores::<$simd, Bf16>(q, keys, scale, out, next),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn mix(
                p: &[&[f32]],
                values: Places<'_>,
                by: &[SoftmaxPartial],
                acc: &mut [&mut [f32]],
                next: &[u8],
            ) {
                // SAFETY: the caller's.
                unsafe {
                    match values.scalar {
                        Scalar::F32 => vectors::mix::<$simd, F32>(p, values, by, acc, next),
                        Scalar::F16 => vectors::mix::<$simd, F16>(p, values, by, acc, next),
                        Scalar::BF16 => vectors::mix::<$simd, Bf16>(p, values, by, acc, next),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn lay_out(quant: Quant, x: &RoundedRow<'_>, cols: usize, to: &mut [u8]) {
                // SAFETY: the caller's. What rows meet depends on how many quants a byte has only.
                unsafe {
                    match quant.bits() {
                        2 => few::lay_out::<$simd, Bits<2>>(x, cols, to),
                        4 => few::lay_out::<$simd, Bits<4>>(x, cols, to),
                        _ => few::lay_out::<$simd, Bits<8>>(x, cols, to),
                    }
                }
            }

            kernels! {
                @few [$(#[$feature])?] $simd;
                bits2: Bits<2>, bits3: Bits<3>, bits4: Bits<4>, bits5: Bits<5>, bits6: Bits<6>, bits8: Bits<8>,
                e2m1: E2m1,
            }

            unsafe fn decode(
                quant: Quant,
                w: &QuantRows<'_>,
                x: &[LaidOut<'_>],
                groups: Groups,
                out: (&mut [f32], usize),
            ) {
                // SAFETY: the caller's.
                unsafe {
                    kernels! {
                        @of_quant quant (w, x, groups, out)
                        bits2 bits3 bits4 bits5 bits6 bits8 e2m1
                    }
                }
            }

            kernels! {
                @unpack [$(#[$feature])?] $simd;
                tile2: Bits<2>, tile3: Bits<3>, tile4: Bits<4>, tile5: Bits<5>, tile6: Bits<6>, tile8: Bits<8>,
                tile_e2m1: E2m1,
            }

            unsafe fn unpack(
                quant: Quant,
                w: &QuantRows<'_>,
                x: &[RoundedRow<'_>],
                groups: Groups,
                scratch: (Option<&mut [u8]>, &mut [f32]),
                out: &mut [[f32; MAX_LANES]; BATCH],
            ) {
                // SAFETY: the caller's.
                unsafe {
                    kernels! {
                        @of_quant quant (w, x, groups, scratch, out)
                        tile2 tile3 tile4 tile5 tile6 tile8 tile_e2m1
                    }
                }
            }

            $(#[$feature])?
            unsafe fn batch(
                quant: Quant,
                tile: (&[u8], &[f32]),
                x: &[RoundedRow<'_>],
                groups: Groups,
                out: &mut [[f32; MAX_LANES]],
            ) {
                // SAFETY: the caller's. Unpacked, it matters how large quants are only.
                unsafe {
                    match quant.bits() {
                        0..5 => columns::batch::<$simd, Bits<4>>(tile, x, groups, out),
                        5..8 => columns::batch::<$simd, Bits<6>>(tile, x, groups, out),
                        _ => columns::batch::<$simd, Bits<8>>(tile, x, groups, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn widen_quants(
                bits: u8,
                row: &[u8],
                scales: (&[f32], &[f32]),
                group: usize,
                out: &mut [f32],
            ) {
                // SAFETY: the caller's.
                unsafe {
                    match bits {
                        2 => quants::widen_quants::<$simd, 2>(row, scales, group, out),
                        3 => quants::widen_quants::<$simd, 3>(row, scales, group, out),
                        4 => quants::widen_quants::<$simd, 4>(row, scales, group, out),
                        5 => quants::widen_quants::<$simd, 5>(row, scales, group, out),
                        6 => quants::widen_quants::<$simd, 6>(row, scales, group, out),
                        _ => quants::widen_quants::<$simd, 8>(row, scales, group, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn widen(scalar: Scalar, bytes: &[u8], out: &mut [f32]) {
                // SAFETY: the caller's.
                unsafe {
                    match scalar {
                        Scalar::F32 => algorithm::widen::<$simd, F32>(bytes, out),
                        Scalar::F16 => algorithm::widen::<$simd, F16>(bytes, out),
                        Scalar::BF16 => algorithm::widen::<$simd, Bf16>(bytes, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn widen_blocks(element: Element, row: &Blocks<'_>, out: &mut [f32]) {
                // SAFETY: the caller's.
                unsafe {
                    match element {
                        Element::E2M1 => blocks::widen_blocks::<$simd, E2m1>(row, out),
                        Element::E4M3 => blocks::widen_blocks::<$simd, E4m3>(row, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn blocks(element: Element, w: &[Blocks<'_>], x: &[&[f32]], sums: &mut Sums) {
                // SAFETY: the caller's.
                unsafe {
                    match element {
                        Element::E2M1 => blocks::block_tile::<$simd, E2m1>(w, x, sums),
                        Element::E4M3 => blocks::block_tile::<$simd, E4m3>(w, x, sums),
                    }
                }
            }

            pub(super) static TABLE: Table = KERNELS;
            pub(super) const KERNELS: Table = Table {
                numbers,
                affine,
                lanes: <$simd as Simd>::LANES,
                first: if <$simd>::WIDTH >= 4 { 8 } else { 4 },
                lay_out,
                widen_scales,
                decode,
                unpack,
                batch,
                widen_quants,
                widen,
                widen_blocks,
                blocks,
                quantize,
                silu_mul,
                mul_silu,
                mul_sigmoid,
                silu,
                exp_sum,
                max,
                axpy,
                join,
                scores,
                mix,
                delta,
                taps4,
                tally,
                extent,
                between,
            };
        }
    };
    ($simd:ty $(, #[$feature:meta])?; $($name:ident $args:tt $(-> $out:ty)? = $algorithm:expr;)*) => {
        kernels! { @all [$(#[$feature])?] $($name $args $(-> $out)? = $algorithm;)* }
    };
    (@all $feature:tt $($name:ident $args:tt $(-> $out:ty)? = $algorithm:expr;)*) => {
        $(kernels! { @one $feature $name $args $(-> $out)? = $algorithm; })*
    };
    (@of_quant $quant:ident $args:tt
        $bits2:ident $bits3:ident $bits4:ident $bits5:ident $bits6:ident $bits8:ident $e2m1:ident) => {
        match $quant {
            Quant::Bits(2) => $bits2 $args,
            Quant::Bits(3) => $bits3 $args,
            Quant::Bits(4) => $bits4 $args,
            Quant::Bits(5) => $bits5 $args,
            Quant::Bits(6) => $bits6 $args,
            Quant::Bits(_) => $bits8 $args,
            Quant::E2M1 => $e2m1 $args,
        }
    };
    (@few $feature:tt $simd:ty; $($name:ident: $packing:ty,)*) => {
        $(kernels! { @few_of $feature $simd; $name $packing })*
    };
    (@few_of [$($feature:tt)*] $simd:ty; $name:ident $packing:ty) => {
        /// One row of weights at a time is read from end to end; more share what they meet, as far as registers go. Three rows of
        /// activations take hardly less time than four. Each is a function of its own: together they have too much in registers.
        unsafe fn $name(
            w: &QuantRows<'_>,
            x: &[LaidOut<'_>],
            groups: Groups,
            out: (&mut [f32], usize),
        ) {
            kernels! {
                @few_rows [$($feature)*] $simd; $packing;
                one 1 1, two { <$simd>::PACKED[0] } 2, four { <$simd>::PACKED[1] } 4
            }
            /// With scales of a type.
            unsafe fn each<E: Scale>(
                w: &QuantRows<'_>,
                x: &[LaidOut<'_>],
                groups: Groups,
                out: (&mut [f32], usize),
            ) {
                // SAFETY: the caller's.
                unsafe {
                    match *x {
                        [a] => one::<E>(w, &[a], groups, out),
                        [a, b] => two::<E>(w, &[a, b], groups, out),
                        [a, b, c] => four::<E>(w, &[a, b, c, c], groups, out),
                        [a, b, c, d] => four::<E>(w, &[a, b, c, d], groups, out),
                        _ => {}
                    }
                }
            }
            // SAFETY: the caller's.
            unsafe {
                match w.of {
                    Scales::Affine(Scalar::BF16) => each::<Bf16>(w, x, groups, out),
                    _ => each::<F32>(w, x, groups, out),
                }
            }
        }
    };
    (@few_rows $feature:tt $simd:ty; $packing:ty; $($name:ident $r:tt $x:literal),*) => {
        $(kernels! { @few_rows_of $feature $simd; $packing; $name $r $x })*
    };
    (@few_rows_of [$($feature:tt)*] $simd:ty; $packing:ty; $name:ident $r:tt $x:literal) => {
        $($feature)*
        unsafe fn $name<E: Scale>(
            w: &QuantRows<'_>,
            x: &[LaidOut<'_>; $x],
            groups: Groups,
            out: (&mut [f32], usize),
        ) {
            // SAFETY: the caller's.
            unsafe { few::decode::<$simd, $packing, E, $r, $x>(w, x, groups, out) }
        }
    };
    (@unpack $feature:tt $simd:ty; $($name:ident: $packing:ty,)*) => {
        $(kernels! { @unpack_of $feature $simd; $name $packing })*
    };
    (@unpack_of $feature:tt $simd:ty; $name:ident $packing:ty) => {
        /// Of as many rows as the table says at most; the last one stands for those that are not there.
        unsafe fn $name(
            w: &QuantRows<'_>,
            x: &[RoundedRow<'_>],
            groups: Groups,
            scratch: (Option<&mut [u8]>, &mut [f32]),
            out: &mut [[f32; MAX_LANES]; BATCH],
        ) {
            kernels! { @unpack_rows $feature $simd; $packing; four 4, six 6, eight 8 }
            let last = x.len() - 1;
            // SAFETY: the caller's.
            unsafe {
                match x.len() {
                    7.. if TABLE.first >= 8 => {
                        eight(w, &std::array::from_fn(|c| x[c.min(last)]), groups, scratch, out);
                    }
                    5.. if TABLE.first >= 8 => {
                        six(w, &std::array::from_fn(|c| x[c.min(last)]), groups, scratch, out);
                    }
                    _ => four(w, &std::array::from_fn(|c| x[c.min(last)]), groups, scratch, out),
                }
            }
        }
    };
    (@unpack_rows $feature:tt $simd:ty; $packing:ty; $($name:ident $x:literal),*) => {
        $(kernels! { @unpack_rows_of $feature $simd; $packing; $name $x })*
    };
    (@unpack_rows_of [$($feature:tt)*] $simd:ty; $packing:ty; $name:ident $x:literal) => {
        $($feature)*
        unsafe fn $name(
            w: &QuantRows<'_>,
            x: &[RoundedRow<'_>; $x],
            groups: Groups,
            scratch: (Option<&mut [u8]>, &mut [f32]),
            out: &mut [[f32; MAX_LANES]; BATCH],
        ) {
            // SAFETY: the caller's.
            unsafe { columns::unpack::<$simd, $packing, $x>(w, x, groups, scratch, out) }
        }
    };
    (@one [$($feature:tt)*] $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $algorithm:expr;) => {
        $($feature)*
        unsafe fn $name($($arg: $type),*) $(-> $out)? {
            #[allow(unused_unsafe, reason = "some of the algorithms are safe")]
            // SAFETY: the caller's.
            unsafe {
                $algorithm($($arg),*)
            }
        }
    };
}

use generic::Generic;
kernels!(on_generic, super::Generic);
#[cfg(target_arch = "x86_64")]
kernels!(on_avx2, super::avx2::Avx2<false>, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(on_avxvnni, super::avx2::Avx2<true>, #[target_feature(enable = "avx2,fma,f16c,avxvnni")]);
#[cfg(target_arch = "x86_64")]
kernels!(
    on_avx512,
    super::avx512::Avx512<false>,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
);
#[cfg(target_arch = "aarch64")]
kernels!(on_neon, super::neon::Neon<false>, #[target_feature(enable = "neon")]);
#[cfg(target_arch = "aarch64")]
kernels!(on_neon_dot, super::neon::Neon<true>, #[target_feature(enable = "neon,dotprod")]);

/// The kernels of an instruction set that this machine has. The methods are safe: they check lengths.
#[derive(Clone, Copy)]
pub(crate) struct Kernels(&'static Table);

impl Kernels {
    /// # Errors
    /// This machine does not have the instruction set.
    pub(crate) fn new(isa: Isa) -> Result<Self, Error> {
        isa.table().map(Self).ok_or_else(|| Error::Device(format!("this machine has no {isa}")))
    }

    /// Those of the best instruction set that this machine has.
    pub(crate) fn best() -> Self {
        Self(Isa::detect().table().unwrap_or(&on_generic::TABLE))
    }

    /// Widens the first `out.len()` numbers of `bytes`, exactly.
    pub(crate) fn widen(self, scalar: Scalar, bytes: &[u8], out: &mut [f32]) {
        assert!(bytes.len() >= out.len() * scalar.bytes());
        // SAFETY: the table's set is there, and so are the bytes.
        unsafe { (self.0.widen)(scalar, bytes, out) }
    }

    /// Reads a key or value.
    pub(crate) fn widen_key(self, format: KvFormat, bytes: &[u8], out: &mut [f32]) {
        match format.scalar() {
            Some(scalar) => self.widen(scalar, bytes, out),
            None => dequantize_q8(bytes, out),
        }
    }

    /// Rounds a row to 8 bits; see [`Rounded`].
    fn quantize(
        self,
        x: &[f32],
        (quant, group): (Quant, usize),
        q: &mut [i8],
        scales: &mut [f32],
        sums: &mut [f32],
    ) {
        // SAFETY: the table's set is there; the algorithm checks what it indexes.
        unsafe { (self.0.quantize)(x, (quant.bits(), group), q, scales, sums) }
    }

    /// `y = silu(y) * x`
    pub(crate) fn silu_mul(self, y: &mut [f32], x: &[f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.silu_mul)(y, x) }
    }

    /// `y = y * silu(x)`
    pub(crate) fn mul_silu(self, y: &mut [f32], x: &[f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.mul_silu)(y, x) }
    }

    /// `y = y * sigmoid(x)`
    pub(crate) fn mul_sigmoid(self, y: &mut [f32], x: &[f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.mul_sigmoid)(y, x) }
    }

    /// `y = silu(y)`
    pub(crate) fn silu(self, y: &mut [f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.silu)(y) }
    }

    /// `x = exp(x - max)`; returns the sum.
    pub(crate) fn exp_sum(self, x: &mut [f32], max: f32) -> f32 {
        // SAFETY: the table's set is there.
        unsafe { (self.0.exp_sum)(x, max) }
    }

    /// The largest number; a NaN is passed over.
    pub(crate) fn max(self, x: &[f32]) -> f32 {
        // SAFETY: the table's set is there.
        unsafe { (self.0.max)(x) }
    }

    /// `y += a * x`
    pub(crate) fn axpy(self, y: &mut [f32], a: f32, x: &[f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.axpy)(y, a, x) }
    }

    /// `y = y * by.keep + x * by.add`, with the bits of [`Kernels::mix`] whose sum is `x`.
    pub(crate) fn join(self, y: &mut [f32], by: SoftmaxPartial, x: &[f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.join)(y, by, x) }
    }

    /// `x . x`
    pub(crate) fn square(self, x: &[f32]) -> f32 {
        let mut out = [0.0];
        self.scores(&[x], Places::of(&[bytemuck::cast_slice(x)]), 1.0, &mut out);
        out[0]
    }

    /// `out[i][t] = scale * q[i] . keys[t]`; `out` is `(q.len(), keys.at.len())`.
    pub(crate) fn scores(self, q: &[&[f32]], keys: Places<'_>, scale: f32, out: &mut [f32]) {
        self.scores_before((keys, 0), q, keys, scale, out);
    }

    /// As [`Kernels::scores`]; meanwhile so many bytes of as many vectors that are read next come from memory.
    pub(crate) fn scores_before(
        self,
        next: (Places<'_>, usize),
        q: &[&[f32]],
        keys: Places<'_>,
        scale: f32,
        out: &mut [f32],
    ) {
        let width = q.first().map_or(0, |q| q.len());
        assert!(keys.hold(width) && q.iter().all(|q| q.len() == width));
        assert_eq!(q.len() * keys.at.len(), out.len());
        assert!(next.0.at.len() == keys.at.len() && next.0.scalar == keys.scalar && next.0.hold(0));
        // SAFETY: the table's set is there, the keys are in their slice, and the lengths are as the algorithm wants them.
        unsafe { (self.0.scores)(q, keys, scale, out, next) }
    }

    /// `acc[i] = acc[i] * by[i].keep + by[i].add * sum_t p[i][t] * values[t]`, summed in order.
    pub(crate) fn mix(
        self,
        p: &[&[f32]],
        values: Places<'_>,
        by: &[SoftmaxPartial],
        acc: &mut [&mut [f32]],
    ) {
        self.mix_before(&[], p, values, by, acc);
    }

    /// As [`Kernels::mix`]; meanwhile what is read next comes from memory.
    pub(crate) fn mix_before(
        self,
        next: &[u8],
        p: &[&[f32]],
        values: Places<'_>,
        by: &[SoftmaxPartial],
        acc: &mut [&mut [f32]],
    ) {
        let width = acc.first().map_or(0, |acc| acc.len());
        assert!(values.hold(width) && acc.iter().all(|acc| acc.len() == width));
        assert!(
            p.len() == acc.len()
                && by.len() == acc.len()
                && p.iter().all(|p| p.len() == values.at.len())
        );
        // SAFETY: the table's set is there, the values are in their slice, and the lengths are as the algorithm wants
        // them.
        unsafe { (self.0.mix)(p, values, by, acc, next) }
    }

    /// One row of the gated delta rule on the rows of a head's state that belong to `v` and `y`.
    pub(crate) fn delta(
        self,
        state: &mut [f32],
        [k, q]: [&[f32]; 2],
        v: &[f32],
        y: &mut [f32],
        d: Delta,
    ) {
        assert!(
            k.len() == q.len()
                && v.len() == y.len()
                && state.len() == k.len() * v.len()
                && !k.is_empty()
        );
        // SAFETY: the table's set is there, and the lengths are as the algorithm wants them.
        unsafe { (self.0.delta)(state, k, q, v, y, d) }
    }

    /// `out[c] = sum_j weight[c][j] * inputs[j][c]` for four taps.
    pub(crate) fn taps4(self, weight: &[f32], inputs: [&[f32]; 4], out: &mut [f32]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.taps4)(weight, inputs, out) }
    }

    /// Adds the weights in units of the logits of at least `least` to their bins: at most [`MAX_TALLIED`] logits to bins that
    /// are zero. All of them have a bin.
    pub(crate) fn tally(self, logits: &[f32], least: f32, scale: Scale, bins: &mut [u64; BINS]) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.tally)(logits, least, scale, bins) }
    }

    /// The largest logit, the least one, and whether all are numbers or minus infinity.
    pub(crate) fn extent(self, logits: &[f32]) -> ([f32; 2], bool) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.extent)(logits) }
    }

    /// Calls `f` with the logits from the one to the other, and where they are, in order.
    pub(crate) fn between(self, logits: &[f32], range: [f32; 2], f: &mut dyn FnMut(usize, f32)) {
        // SAFETY: the table's set is there.
        unsafe { (self.0.between)(logits, range, f) }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kernels")
    }
}
