//! SIMD kernels of the CPU device: GEMV and GEMM on quantized weights, attention, the delta rule,
//! elementwise functions, and sampling.
//!
//! Every kernel is written once, generic over [`Simd`](vector::Simd), a trait of vector
//! operations. AVX2, AVX-VNNI, AVX-512 (with and without VBMI), NEON (with and without int8 dot
//! products) and portable Rust implement it. [`table`] instantiates the kernels for each of them,
//! inside functions with the right `target_feature`; [`Kernels`] is the safe interface to the
//! kernels of one instruction set; [`dispatch`] chooses between them by weight format and batch
//! size.
//!
//! # Matrix products
//!
//! Weights `w` are `(rows, cols)`, activations `x` are `(batch, cols)`. Decode reads every weight
//! once per step, so the speed of memory bounds it: the GEMV reads packed weights as a stream.
//! Prefill reuses a weight for many rows of activations, so arithmetic bounds it: the GEMM
//! unpacks a tile once and reuses it from cache.
//!
//! | kernel | batch | weights | activations |
//! |---|---|---|---|
//! | GEMV q8, [`gemv_q8`] | 1 to 4 ([`GEMV_ROWS`]) | affine 2, 3, 4, 5, 6, 8 bits; E2M1 | int8 |
//! | GEMV of blocks, [`gemv_blocks`] | 1 to 4 | all block types, [transcoded](transcode) | int8 |
//! | GEMM q8, [`gemm_q8`] | 5 and more | those of both | int8 |
//! | GEMM f32, [`gemm_f32`] | any, 4 at a time ([`TILE_ROWS`]) | f32, f16, bf16 | f32 |
//! | GEMM affine, [`unpack_affine`] | 1 to 4 | affine | f32 |
//! | GEMM block-scaled, [`unpack_mx`] | 1 to 4 | E4M3, E2M1 | f32 |
//!
//! The last two take weights of the q8 kernels too, where activations stay f32 (exact mode). For
//! larger batches, rows of weights are dequantized to f32 in cache and go through GEMM f32. All
//! kernels exist for every instruction set.
//!
//! ## GEMV q8
//!
//! Reads each packed row end to end, once, with its scales and biases; reads the activations,
//! packed once into the order of the unpacked weights, from L1. `X` is 1, 2 or 4.
//!
//! ```text
//! for tile of 4 rows:
//!     acc[r][c]  = sum_g bias[r][g] * sum_x[c][g]                 // vectors along g
//!     for R rows of the tile at a time, for block u of a row:     // a vector of packed bytes
//!         for r in the R rows:
//!             q = unpack(load(row[r] + u * BYTES))                // shifts and masks: int8
//!             for c in 0..X:
//!                 dot = int8_dot(q, x[c].block[u])                // i32 lanes along cols
//!                 acc[r][c] += f32(dot) * scale[r][g(u)] * scale_x[c][u]
//!     y[c][r]    = horizontal_sum(acc[r][c])
//! ```
//!
//! ## GEMV of blocks
//!
//! Reads each row of blocks once, a few rows at a time. The transcoded rows stay in L1, where the
//! dot products read it. Types differ in the transcoding only, so there is one GEMV for all.
//!
//! ```text
//! for a few rows:
//!     q, scale, bias = transcode(rows)                            // u8, f32 per group
//!     for each row r:
//!         acc[c] = sum_g bias[g] * sum_x[c][g]                    // vectors along g
//!         for block b of LANES groups of 16 columns:
//!             q[0..4] = transpose(load(q[r][b]))                  // a lane per group
//!             dot = int8_dot(q[0..4], x[c].block[b])              // i32 lanes
//!             acc[c] += f32(dot) * scale[b] * scale_x[c][b]
//!         y[c][r] = horizontal_sum(acc[c])
//! ```
//!
//! ## GEMM q8
//!
//! Reads each packed tile once, and its unpacked copy (at most 16 rows of int8) from L1 or L2 for
//! every further 8 rows of activations. A lane is a row of weights.
//!
//! ```text
//! for tile of LANES rows:
//!     scales, biases = transpose(widen(...))                      // (groups, LANES)
//!     for block b of the rows:                                    // while multiplying b,
//!         transpose dwords of block b + 1                         //   transpose b + 1
//!         for group i of 16 columns of b:
//!             q[0..4] = unpack(...)                               // 4 quants of every row each
//!             store q[0..4] to the tile                           // for further batches
//!             for c in 0..X:                                      // X = 4, 6 or 8 rows
//!                 dot = int8_dot(q[0..4], broadcast(x[c][i]))     // i32, lane = row
//!                 group[c] += f32(dot) * scale_x[c][i]
//!                 if i ends a group g of the weights:
//!                     y[c] += group[c] * scales[g] + biases[g] * sum_x[c][g]
//!     for further batches of 8 rows: the inner loop on the stored tile
//! ```
//!
//! Rows of blocks are transcoded to the stored tile, which all batches then use.
//!
//! ## GEMM f32
//!
//! Reads 4 rows of weights for `X` rows of activations: 4 on AVX-512, else 2. The first batch reads
//! the weights from memory, later ones from cache.
//!
//! ```text
//! for tile of 4 rows, for batch of X rows:
//!     for i in (0..cols).step_by(LANES):
//!         acc[r][c] += to_f32(w[r][i..]) * x[c][i..]              // lanes along cols
//!     y[c][r] = horizontal_sum(acc[r][c])
//! ```
//!
//! # Attention
//!
//! [`attention`] computes one block of positions of the KV cache for the queries that share it,
//! with an online softmax. Reads each key and each value once per `X` queries.
//!
//! ```text
//! for block of positions:
//!     s[i][t]    = scale * q[i] . k[t]                            // scores: GEMM f32 on keys
//!     m, p[i][t] = max and exp(s[i][t] - m)                       // elementwise::exp_sum
//!     keep, add  = factors that bring old and new sums to one maximum
//!     acc[i]     = acc[i] * keep + add * sum_t p[i][t] * v[t]     // weighted_sum
//! ```
//!
//! [`segment_attention`] has no cache. It packs each block of keys and values for all queries of a
//! tile; `X` is 6, `V` 4 vectors on AVX-512, else 2.
//!
//! ```text
//! for block of 128 keys:
//!     k = transpose(keys), v = pad(values)
//!     for batch of X queries:
//!         for V vectors of keys, for d in 0..width:
//!             s[i][t..] += q[i][d] * k[d][t..]                    // lanes along keys
//!         m[i], p[i][t], keep[i] = new maximum, exp(s[i][t] - m[i]), exp(old m[i] - m[i])
//!         for V vectors of columns, for t in block:
//!             sum[i][c..] += p[i][t] * v[t][c..]                  // lanes along columns
//!         acc[i] = acc[i] * keep[i] + sum[i]
//! ```
//!
//! # Reproducibility
//!
//! A product does not depend on the number of threads, on the tile that it is computed in, nor on
//! the other rows of a batch, except that the q8 GEMV and GEMM add in different orders.
//! Instruction sets differ in the order of additions and in fused multiply-adds.

mod activations;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod delta_rule;
mod dispatch;
mod elementwise;
mod float_types;
mod gemm_f32;
mod gemm_q8;
mod gemv_blocks;
mod gemv_q8;
mod generic;
mod isa;
mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;
mod peak_flops;
mod quant_rows;
mod sampling;
pub(super) mod scratch;
mod segment_attention;
mod state_space;
mod table;
mod transcode;
mod unpack_affine;
mod unpack_blocks;
mod unpack_mx;
mod unpack_plain;
mod vector;

pub(crate) use activations::{ActivationRows, Q8Rows, QuantLayout, padded};
pub(crate) use attention::{FloatRows, MergeFactors, PrefetchRows, split_rows};
pub(crate) use delta_rule::DeltaRuleFactors;
pub(crate) use dispatch::{PackedRows, Q8Batch};
pub(crate) use gemm_f32::{F32TileSums, TILE_ROWS};
pub(crate) use gemv_q8::{GEMV_ROWS, MAX_GEMV_OUTPUTS};
pub use isa::Isa;
pub(crate) use kernels::{Kernels, SamplingKernels};
pub use peak_flops::CpuPeak;
pub(crate) use sampling::{BINS, LogitScale, MAX_TALLIED, exp2_neg, weight_units};
pub(crate) use segment_attention::{
    HeadRows, MAX_SEGMENT_QUERIES, SegmentTile, segment_scratch_len,
};
pub(crate) use state_space::StateSpaceFactors;
pub(crate) use vector::MAX_LANES;
