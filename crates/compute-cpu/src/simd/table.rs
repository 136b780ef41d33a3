//! Table of kernels per instruction set, and the macro that instantiates it.
//!
//! `kernels!` wraps every generic kernel in a function that enables the instruction set
//! (`#[target_feature]`), into which the kernel is inlined, and collects them in a
//! [`KernelTable`].

use moeflux_ops::{Activation, Element, LogDecay, Scalar};

use super::{
    activations::{Q8Row, QuantLayout},
    attention::{FloatRows, MergeFactors, PrefetchRows},
    delta_rule::DeltaRuleFactors,
    gemm_f32::{F32TileSums, FloatTile},
    gemm_q8::{GemmOut, TileChunk, TileScratch, UnpackedTile},
    gemv_q8::{GemvActivations, GemvOut},
    quant_rows::{GroupShape, QuantRows},
    sampling::{BINS, LogitScale},
    segment_attention::SegmentTile,
    state_space::StateSpaceFactors,
    transcode::{BlockRows, TranscodedRoom, TranscodedRows},
    unpack_affine::{AffineRow, AffineTile, QuantKind},
    unpack_mx::BlockScaledRow,
    vector::MAX_LANES,
};

/// Kernels of one instruction set.
///
/// # Safety
/// All functions need the Simd contract; each kernel documents its further requirements.
#[allow(clippy::type_complexity, reason = "a table of functions has their types")]
pub(super) struct KernelTable {
    // GEMM and GEMV with f32 activations.
    pub(super) gemm_f32: unsafe fn(Scalar, FloatTile<'_>, &[&[f32]], &mut F32TileSums),
    pub(super) gemm_affine: unsafe fn(AffineTile<'_>, &[&[f32]], &mut F32TileSums),
    pub(super) gemm_block_scaled:
        unsafe fn(Element, &[BlockScaledRow<'_>], &[&[f32]], &mut F32TileSums),

    // GEMV with int8 activations.
    pub(super) quantize: unsafe fn(&[f32], QuantLayout, &mut [i8], &mut [f32], &mut [f32]),
    pub(super) pack_activations: unsafe fn(QuantKind, &Q8Row<'_>, usize, &mut [u8]),
    pub(super) widen_scales: unsafe fn(&QuantRows<'_>, GroupShape, [&mut [f32]; 2]),
    /// [`scale_rows`](super::gemv_q8::scale_rows) of each type.
    pub(super) scale_rows: fn(Scalar) -> usize,
    pub(super) gemv:
        unsafe fn(QuantKind, &QuantRows<'_>, &[GemvActivations<'_>], GroupShape, GemvOut<'_>),

    // GEMM with int8 activations.
    /// Rows of weights of a tile.
    pub(super) tile_rows: usize,
    /// Most rows of activations of `unpack_gemm`.
    pub(super) unpack_batch: usize,
    pub(super) unpack_gemm: unsafe fn(
        QuantKind,
        &QuantRows<'_>,
        &[Q8Row<'_>],
        GroupShape,
        TileScratch<'_>,
        &mut GemmOut,
    ),
    pub(super) gemm:
        unsafe fn(QuantKind, UnpackedTile<'_>, &[Q8Row<'_>], GroupShape, &mut [[f32; MAX_LANES]]),

    // Blocks with int8 activations.
    pub(super) transcode: unsafe fn(BlockRows<'_>, &mut TranscodedRoom<'_>),
    pub(super) pack_for_blocks: unsafe fn(&Q8Row<'_>, usize, &mut [u8]),
    /// Takes the class of the quants: see [`range_bits`](super::transcode::range_bits).
    pub(super) gemv_blocks:
        unsafe fn(usize, TranscodedRows<'_>, &[GemvActivations<'_>], GroupShape, GemvOut<'_>),
    pub(super) transpose_chunk: unsafe fn(TileChunk<'_>, GroupShape, &mut [u8], &mut [f32]),

    // Conversion to f32.
    pub(super) widen: unsafe fn(Scalar, &[u8], &mut [f32]),
    pub(super) dequantize_affine: unsafe fn(u8, AffineRow<'_>, usize, &mut [f32]),
    pub(super) dequantize_blocks: unsafe fn(Element, &BlockScaledRow<'_>, &mut [f32]),

    // Elementwise functions.
    pub(super) silu_mul: unsafe fn(&mut [f32], &[f32]),
    pub(super) mul_silu: unsafe fn(&mut [f32], &[f32]),
    pub(super) mul_sigmoid: unsafe fn(&mut [f32], &[f32]),
    pub(super) silu: unsafe fn(&mut [f32]),
    pub(super) activate_up: unsafe fn(Activation, &mut [f32]),
    pub(super) exp_sum: unsafe fn(&mut [f32], f32) -> f32,
    pub(super) max: unsafe fn(&[f32]) -> f32,
    pub(super) axpy: unsafe fn(&mut [f32], f32, &[f32]),
    pub(super) conv4: unsafe fn(&[f32], [&[f32]; 4], &mut [f32]),

    // Attention and recurrences.
    pub(super) scores: unsafe fn(&[&[f32]], FloatRows<'_>, f32, &mut [f32], PrefetchRows<'_>),
    pub(super) weighted_sum:
        unsafe fn(&[&[f32]], FloatRows<'_>, &[MergeFactors], &mut [&mut [f32]], &[u8]),
    pub(super) merge: unsafe fn(&mut [f32], MergeFactors, &[f32]),
    pub(super) segment_attention: unsafe fn(&SegmentTile<'_>, &mut [f32]),
    pub(super) delta_rule:
        unsafe fn(&mut [f32], &[f32], &[f32], &[f32], &mut [f32], DeltaRuleFactors<'_>),
    pub(super) decays: unsafe fn(&[f32], &[f32], f32, LogDecay, &mut [f32]),
    pub(super) state_space:
        unsafe fn(&mut [f32], &[f32], &[f32], &[f32], &mut [f32], StateSpaceFactors),
}

/// Sampling kernels of one instruction set. A separate table: a binary that only samples, such as
/// that of the unit tests, does not contain the other kernels.
///
/// # Safety
/// All functions need the Simd contract.
#[allow(clippy::type_complexity, reason = "a table of functions has their types")]
pub(super) struct SamplingTable {
    pub(super) tally: unsafe fn(&[f32], f32, LogitScale, &mut [u64; BINS]),
    pub(super) extent: unsafe fn(&[f32]) -> ([f32; 2], bool),
    pub(super) for_each_between: unsafe fn(&[f32], [f32; 2], &mut dyn FnMut(usize, f32)),
}

/// Instantiates all kernels for an instruction set: a module with `TABLE` and `SAMPLING`.
macro_rules! kernels {
    ($module:ident, $simd:ty $(, #[$feature:meta])?) => {
        pub(super) mod $module {
            use super::{
                super::{
                    activations::{self, Q8Row, QuantLayout},
                    attention::{self, FloatRows, MergeFactors, PrefetchRows},
                    delta_rule::{self, DeltaRuleFactors},
                    elementwise,
                    float_types::{self, Bf16Type, F16Type, F32Type},
                    gemm_f32::{self, F32TileSums, FloatTile, TILE_ROWS},
                    gemm_q8::{self, GemmOut, TileChunk, TileScratch, UnpackedTile},
                    gemv_blocks,
                    gemv_q8::{
                        self, GEMV_ROWS, GemvActivations, GemvInput, GemvLayout, GemvOut,
                        GemvScale, GemvSection, GemvTile, RowEnds, TileRange, most_scales,
                        scale_rows,
                    },
                    quant_rows::{GroupShape, QuantRows, ScaleType},
                    sampling::{self, BINS, LogitScale},
                    segment_attention::{self, SegmentTile},
                    state_space::{self, StateSpaceFactors},
                    transcode::{self, BlockRows, TranscodedRoom, TranscodedRows},
                    unpack_affine::{self, AffineRow, AffineTile, Bits, E2m1, Packing, QuantKind},
                    unpack_mx::{self, BlockScaledRow, E4m3},
                    vector::{MAX_LANES, VectorTypes},
                },
                KernelTable, SamplingTable,
            };
            use moeflux_ops::{Activation, Element, Scalar, LogDecay};

            kernels! {
                $simd $(, #[$feature])?;
                gemm_affine(w: AffineTile<'_>, x: &[&[f32]], sums: &mut F32TileSums)
                    = unpack_affine::affine_tile::<$simd>;
                silu_mul(y: &mut [f32], x: &[f32]) = elementwise::silu_mul::<$simd>;
                mul_silu(y: &mut [f32], x: &[f32]) = elementwise::mul_silu::<$simd>;
                mul_sigmoid(y: &mut [f32], x: &[f32]) = elementwise::mul_sigmoid::<$simd>;
                silu(y: &mut [f32]) = elementwise::silu::<$simd>;
                activate_up(activation: Activation, y: &mut [f32])
                    = elementwise::activate_up::<$simd>;
                exp_sum(x: &mut [f32], max: f32) -> f32 = elementwise::exp_sum::<$simd>;
                max(x: &[f32]) -> f32 = elementwise::max;
                axpy(y: &mut [f32], a: f32, x: &[f32]) = elementwise::axpy::<$simd>;
                conv4(weight: &[f32], inputs: [&[f32]; 4], out: &mut [f32])
                    = elementwise::conv4::<$simd>;
                merge(y: &mut [f32], factors: MergeFactors, x: &[f32]) = attention::merge::<$simd>;
                segment_attention(tile: &SegmentTile<'_>, scratch: &mut [f32])
                    = segment_attention::segment_attention::<$simd>;
                delta_rule(
                    state: &mut [f32], k: &[f32], q: &[f32], v: &[f32], y: &mut [f32],
                    d: DeltaRuleFactors<'_>
                ) = delta_rule::delta_rule::<$simd>;
                decays(
                    a: &[f32], bias: &[f32], rate: f32, function: LogDecay, out: &mut [f32]
                ) = elementwise::decays::<$simd>;
                state_space(
                    state: &mut [f32], b: &[f32], c: &[f32], x: &[f32], y: &mut [f32],
                    f: StateSpaceFactors
                ) = state_space::state_space::<$simd>;
                tally(logits: &[f32], least: f32, scale: LogitScale, bins: &mut [u64; BINS])
                    = sampling::tally;
                extent(logits: &[f32]) -> ([f32; 2], bool) = sampling::extent;
                for_each_between(
                    logits: &[f32], range: [f32; 2], f: &mut dyn FnMut(usize, f32)
                ) = sampling::for_each_between;
                widen_scales(w: &QuantRows<'_>, shape: GroupShape, dst: [&mut [f32]; 2])
                    = gemv_q8::widen_scales::<$simd>;
                transcode(rows: BlockRows<'_>, room: &mut TranscodedRoom<'_>)
                    = transcode::transcode::<$simd>;
                pack_for_blocks(x: &Q8Row<'_>, cols: usize, dst: &mut [u8])
                    = gemv_blocks::pack_for_blocks::<$simd>;
                transpose_chunk(
                    chunk: TileChunk<'_>, shape: GroupShape, quants: &mut [u8], scales: &mut [f32]
                ) = gemm_q8::transpose_chunk::<$simd>;
                quantize(
                    x: &[f32], layout: QuantLayout, q: &mut [i8], scales: &mut [f32],
                    sums: &mut [f32]
                ) = activations::quantize::<$simd>;
            }

            $(#[$feature])?
            unsafe fn gemm_f32(
                scalar: Scalar,
                w: FloatTile<'_>,
                x: &[&[f32]],
                sums: &mut F32TileSums,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match scalar {
                        Scalar::F32 => gemm_f32::float_tile::<$simd, F32Type>(w, x, sums),
                        Scalar::F16 => gemm_f32::float_tile::<$simd, F16Type>(w, x, sums),
                        Scalar::BF16 => gemm_f32::float_tile::<$simd, Bf16Type>(w, x, sums),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn scores(
                q: &[&[f32]],
                keys: FloatRows<'_>,
                scale: f32,
                out: &mut [f32],
                next: PrefetchRows<'_>,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match keys.scalar {
                        Scalar::F32 => {
                            attention::scores::<$simd, F32Type>(q, keys, scale, out, next)
                        }
                        Scalar::F16 => {
                            attention::scores::<$simd, F16Type>(q, keys, scale, out, next)
                        }
                        Scalar::BF16 => {
                            attention::scores::<$simd, Bf16Type>(q, keys, scale, out, next)
                        }
                    }
                }
            }

            $(#[$feature])?
            unsafe fn weighted_sum(
                p: &[&[f32]],
                values: FloatRows<'_>,
                factors: &[MergeFactors],
                acc: &mut [&mut [f32]],
                next: &[u8],
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match values.scalar {
                        Scalar::F32 => attention::weighted_sum::<$simd, F32Type>(
                            p, values, factors, acc, next,
                        ),
                        Scalar::F16 => attention::weighted_sum::<$simd, F16Type>(
                            p, values, factors, acc, next,
                        ),
                        Scalar::BF16 => attention::weighted_sum::<$simd, Bf16Type>(
                            p, values, factors, acc, next,
                        ),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn pack_activations(
                kind: QuantKind,
                x: &Q8Row<'_>,
                cols: usize,
                dst: &mut [u8],
            ) {
                // SAFETY: as the kernel. The order depends only on the quants per byte.
                unsafe {
                    match kind.bits() {
                        2 => gemv_q8::pack_activations::<$simd, Bits<2>>(x, cols, dst),
                        4 => gemv_q8::pack_activations::<$simd, Bits<4>>(x, cols, dst),
                        _ => gemv_q8::pack_activations::<$simd, Bits<8>>(x, cols, dst),
                    }
                }
            }

            kernels! {
                @gemv [$(#[$feature])?] $simd;
                gemv2: Bits<2>, gemv3: Bits<3>, gemv4: Bits<4>, gemv5: Bits<5>, gemv6: Bits<6>,
                gemv8: Bits<8>, gemv_e2m1: E2m1,
            }

            unsafe fn gemv(
                kind: QuantKind,
                w: &QuantRows<'_>,
                x: &[GemvActivations<'_>],
                shape: GroupShape,
                out: GemvOut<'_>,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    kernels! {
                        @by_kind kind (w, x, shape, out)
                        gemv2 gemv3 gemv4 gemv5 gemv6 gemv8 gemv_e2m1
                    }
                }
            }

            kernels! {
                @unpack_gemm [$(#[$feature])?] $simd;
                tile2: Bits<2>, tile3: Bits<3>, tile4: Bits<4>, tile5: Bits<5>, tile6: Bits<6>,
                tile8: Bits<8>, tile_e2m1: E2m1,
            }

            unsafe fn unpack_gemm(
                kind: QuantKind,
                w: &QuantRows<'_>,
                x: &[Q8Row<'_>],
                shape: GroupShape,
                scratch: TileScratch<'_>,
                out: &mut GemmOut,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    kernels! {
                        @by_kind kind (w, x, shape, scratch, out)
                        tile2 tile3 tile4 tile5 tile6 tile8 tile_e2m1
                    }
                }
            }

            $(#[$feature])?
            unsafe fn gemm(
                kind: QuantKind,
                tile: UnpackedTile<'_>,
                x: &[Q8Row<'_>],
                shape: GroupShape,
                out: &mut [[f32; MAX_LANES]],
            ) {
                // SAFETY: as the kernel. After unpacking only the range of the quants matters.
                unsafe {
                    match kind.bits() {
                        0..5 => gemm_q8::gemm::<$simd, Bits<4>>(tile, x, shape, out),
                        5..8 => gemm_q8::gemm::<$simd, Bits<6>>(tile, x, shape, out),
                        _ => gemm_q8::gemm::<$simd, Bits<8>>(tile, x, shape, out),
                    }
                }
            }

            kernels! {
                @gemv_blocks [$(#[$feature])?] $simd;
                blocks_with_one 1, blocks_with_two 2, blocks_with_four 4
            }

            unsafe fn gemv_blocks(
                bits: usize,
                w: TranscodedRows<'_>,
                x: &[GemvActivations<'_>],
                shape: GroupShape,
                out: GemvOut<'_>,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match *x {
                        [a] => blocks_with_one(bits, w, &[a], shape, out),
                        [a, b] => blocks_with_two(bits, w, &[a, b], shape, out),
                        [a, b, c, ref d @ ..] => {
                            let d = d.first().copied().unwrap_or(c);
                            blocks_with_four(bits, w, &[a, b, c, d], shape, out);
                        }
                        [] => {}
                    }
                }
            }

            $(#[$feature])?
            unsafe fn dequantize_affine(
                bits: u8,
                row: AffineRow<'_>,
                group: usize,
                out: &mut [f32],
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match bits {
                        2 => unpack_affine::dequantize_affine::<$simd, 2>(row, group, out),
                        3 => unpack_affine::dequantize_affine::<$simd, 3>(row, group, out),
                        4 => unpack_affine::dequantize_affine::<$simd, 4>(row, group, out),
                        5 => unpack_affine::dequantize_affine::<$simd, 5>(row, group, out),
                        6 => unpack_affine::dequantize_affine::<$simd, 6>(row, group, out),
                        _ => unpack_affine::dequantize_affine::<$simd, 8>(row, group, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn widen(scalar: Scalar, bytes: &[u8], out: &mut [f32]) {
                // SAFETY: as the kernel.
                unsafe {
                    match scalar {
                        Scalar::F32 => float_types::widen::<$simd, F32Type>(bytes, out),
                        Scalar::F16 => float_types::widen::<$simd, F16Type>(bytes, out),
                        Scalar::BF16 => float_types::widen::<$simd, Bf16Type>(bytes, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn dequantize_blocks(
                element: Element,
                row: &BlockScaledRow<'_>,
                out: &mut [f32],
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match element {
                        Element::E2M1 => unpack_mx::dequantize_blocks::<$simd, E2m1>(row, out),
                        Element::E4M3 => unpack_mx::dequantize_blocks::<$simd, E4m3>(row, out),
                    }
                }
            }

            $(#[$feature])?
            unsafe fn gemm_block_scaled(
                element: Element,
                w: &[BlockScaledRow<'_>],
                x: &[&[f32]],
                sums: &mut F32TileSums,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match element {
                        Element::E2M1 => unpack_mx::block_tile::<$simd, E2m1>(w, x, sums),
                        Element::E4M3 => unpack_mx::block_tile::<$simd, E4m3>(w, x, sums),
                    }
                }
            }

            pub(in super::super) static TABLE: KernelTable = KERNELS;
            pub(in super::super) const KERNELS: KernelTable = KernelTable {
                gemm_f32,
                gemm_affine,
                gemm_block_scaled,
                quantize,
                pack_activations,
                widen_scales,
                scale_rows: scale_rows::<$simd>,
                gemv,
                tile_rows: <$simd as VectorTypes>::LANES,
                unpack_batch: if <$simd as VectorTypes>::TILE_ACTIVATIONS >= 4 { 8 } else { 4 },
                unpack_gemm,
                gemm,
                transcode,
                pack_for_blocks,
                gemv_blocks,
                transpose_chunk,
                widen,
                dequantize_affine,
                dequantize_blocks,
                silu_mul,
                mul_silu,
                mul_sigmoid,
                silu,
                activate_up,
                exp_sum,
                max,
                axpy,
                conv4,
                scores,
                weighted_sum,
                merge,
                segment_attention,
                delta_rule,
                decays,
                state_space,
            };
            pub(in super::super) static SAMPLING: SamplingTable =
                SamplingTable { tally, extent, for_each_between };
        }
    };
    ($simd:ty $(, #[$feature:meta])?;
        $($name:ident $args:tt $(-> $out:ty)? = $kernel:expr;)*) => {
        kernels! { @each [$(#[$feature])?] $($name $args $(-> $out)? = $kernel;)* }
    };
    (@each $feature:tt $($name:ident $args:tt $(-> $out:ty)? = $kernel:expr;)*) => {
        $(kernels! { @wrap $feature $name $args $(-> $out)? = $kernel; })*
    };
    // Calls the function of a kind of quants.
    (@by_kind $kind:ident $args:tt
        $bits2:ident $bits3:ident $bits4:ident $bits5:ident $bits6:ident $bits8:ident
        $e2m1:ident) => {
        match $kind {
            QuantKind::Bits(2) => $bits2 $args,
            QuantKind::Bits(3) => $bits3 $args,
            QuantKind::Bits(4) => $bits4 $args,
            QuantKind::Bits(5) => $bits5 $args,
            QuantKind::Bits(6) => $bits6 $args,
            QuantKind::Bits(_) => $bits8 $args,
            QuantKind::E2M1 => $e2m1 $args,
        }
    };
    (@gemv $feature:tt $simd:ty; $($name:ident: $packing:ty,)*) => {
        $(kernels! { @gemv_of $feature $simd; $name $packing })*
    };
    (@gemv_of [$($feature:tt)*] $simd:ty; $name:ident $packing:ty) => {
        /// GEMV of one packing. One function per number of rows of activations, as functions that
        /// are inlined together spill registers; three rows take about as long as four.
        unsafe fn $name(
            w: &QuantRows<'_>,
            x: &[GemvActivations<'_>],
            shape: GroupShape,
            out: GemvOut<'_>,
        ) {
            kernels! {
                @gemv_rows [$($feature)*] $simd; $packing;
                one 1 1,
                two { <$simd as VectorTypes>::GEMV_WEIGHT_ROWS[0] } 2,
                four { <$simd as VectorTypes>::GEMV_WEIGHT_ROWS[1] } 4
            }
            /// Dispatches by the number of rows of activations, for one type of scales.
            unsafe fn with_scales<E: GemvScale>(
                w: &QuantRows<'_>,
                x: &[GemvActivations<'_>],
                shape: GroupShape,
                out: GemvOut<'_>,
            ) {
                // SAFETY: as the kernel.
                unsafe {
                    match *x {
                        [a] => one::<E>(w, &[a], shape, out),
                        [a, b] => two::<E>(w, &[a, b], shape, out),
                        [a, b, c, ref d @ ..]
                            if const { scale_rows::<$simd>(E::SCALAR) >= GEMV_ROWS } =>
                        {
                            let d = d.first().copied().unwrap_or(c);
                            four::<E>(w, &[a, b, c, d], shape, out);
                        }
                        _ => debug_assert!(x.is_empty(), "rows whose scales are widened first"),
                    }
                }
            }
            // SAFETY: as the kernel.
            unsafe {
                match w.scale_type {
                    ScaleType::Affine(Scalar::BF16) if const { <$packing>::BIASES } => {
                        with_scales::<Bf16Type>(w, x, shape, out);
                    }
                    _ => with_scales::<F32Type>(w, x, shape, out),
                }
            }
        }
    };
    (@gemv_rows $feature:tt $simd:ty; $packing:ty; $($name:ident $r:tt $x:literal),*) => {
        $(kernels! { @gemv_rows_of $feature $simd; $packing; $name $r $x })*
    };
    (@gemv_rows_of [$($feature:tt)*] $simd:ty; $packing:ty; $name:ident $r:tt $x:literal) => {
        unsafe fn $name<E: GemvScale>(
            w: &QuantRows<'_>,
            x: &[GemvActivations<'_>; $x],
            shape: GroupShape,
            out: GemvOut<'_>,
        ) {
            $($feature)*
            unsafe fn tile<E: GemvScale, const SCALES: usize>(
                w: &QuantRows<'_>,
                range: TileRange,
                x: &GemvInput<$x>,
                section: GemvSection,
                ends: &mut RowEnds,
            ) -> [[f32; $x]; TILE_ROWS] {
                // SAFETY: as the kernel.
                unsafe {
                    gemv_q8::gemv_tile::<$simd, $packing, E, SCALES, $r, $x>(
                        w, range, x, section, ends,
                    )
                }
            }
            let layout = GemvLayout::new::<$simd, $packing, E>();
            // Constant conditions keep kernels that are never used from being compiled.
            let tile: GemvTile<$x> = match layout.block_scales(shape.group) {
                16.. if const { most_scales::<$simd, $packing>() >= 16 } => tile::<E, 16>,
                8.. if const { most_scales::<$simd, $packing>() >= 8 } => tile::<E, 8>,
                4.. if const { most_scales::<$simd, $packing>() >= 4 } => tile::<E, 4>,
                2.. if const { most_scales::<$simd, $packing>() >= 2 } => tile::<E, 2>,
                _ => tile::<E, 1>,
            };
            // SAFETY: as the kernel; the tile is of this layout.
            unsafe { gemv_q8::gemv(layout, tile, w, x, shape, out) }
        }
    };
    (@gemv_blocks $feature:tt $simd:ty; $($name:ident $x:literal),*) => {
        $(kernels! { @gemv_blocks_of $feature $simd; $name $x })*
    };
    (@gemv_blocks_of [$($feature:tt)*] $simd:ty; $name:ident $x:literal) => {
        $($feature)*
        unsafe fn $name(
            bits: usize,
            w: TranscodedRows<'_>,
            x: &[GemvActivations<'_>; $x],
            shape: GroupShape,
            out: GemvOut<'_>,
        ) {
            // SAFETY: as the kernel.
            unsafe {
                if bits < 8 {
                    gemv_blocks::gemv_blocks::<$simd, Bits<6>, $x>(w, x, shape, out);
                } else {
                    gemv_blocks::gemv_blocks::<$simd, Bits<8>, $x>(w, x, shape, out);
                }
            }
        }
    };
    (@unpack_gemm $feature:tt $simd:ty; $($name:ident: $packing:ty,)*) => {
        $(kernels! { @unpack_gemm_of $feature $simd; $name $packing })*
    };
    (@unpack_gemm_of $feature:tt $simd:ty; $name:ident $packing:ty) => {
        /// Up to [`KernelTable::unpack_batch`] rows of activations; missing rows repeat the last
        /// one.
        unsafe fn $name(
            w: &QuantRows<'_>,
            x: &[Q8Row<'_>],
            shape: GroupShape,
            scratch: TileScratch<'_>,
            out: &mut GemmOut,
        ) {
            kernels! { @unpack_rows $feature $simd; $packing; two 2, four 4, six 6, eight 8 }
            let last = x.len() - 1;
            // SAFETY: as the kernel.
            unsafe {
                match x.len() {
                    7.. if TABLE.unpack_batch >= 8 => {
                        eight(w, &std::array::from_fn(|c| x[c.min(last)]), shape, scratch, out);
                    }
                    5.. if TABLE.unpack_batch >= 8 => {
                        six(w, &std::array::from_fn(|c| x[c.min(last)]), shape, scratch, out);
                    }
                    3.. => four(w, &std::array::from_fn(|c| x[c.min(last)]), shape, scratch, out),
                    _ => two(w, &std::array::from_fn(|c| x[c.min(last)]), shape, scratch, out),
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
            x: &[Q8Row<'_>; $x],
            shape: GroupShape,
            scratch: TileScratch<'_>,
            out: &mut GemmOut,
        ) {
            // SAFETY: as the kernel.
            unsafe { gemm_q8::unpack_gemm::<$simd, $packing, $x>(w, x, shape, scratch, out) }
        }
    };
    (@wrap [$($feature:tt)*]
        $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $kernel:expr;) => {
        $($feature)*
        unsafe fn $name($($arg: $type),*) $(-> $out)? {
            #[allow(unused_unsafe, reason = "some of the kernels are safe")]
            // SAFETY: as the kernel.
            unsafe {
                $kernel($($arg),*)
            }
        }
    };
}

kernels!(on_generic, crate::simd::generic::Generic);
#[cfg(target_arch = "x86_64")]
kernels!(on_avx2, crate::simd::avx2::Avx2<false>, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(
    on_avxvnni,
    crate::simd::avx2::Avx2<true>,
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
);
#[cfg(target_arch = "x86_64")]
kernels!(
    on_avx512,
    crate::simd::avx512::Avx512<false>,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
);
#[cfg(target_arch = "aarch64")]
kernels!(on_neon, crate::simd::neon::Neon<false>, #[target_feature(enable = "neon")]);
#[cfg(target_arch = "aarch64")]
kernels!(
    on_neon_dot,
    crate::simd::neon::Neon<true>,
    #[target_feature(enable = "neon,dotprod")]
);
