//! Safe interface to the kernels of one instruction set. [`dispatch`](super::dispatch) has the
//! methods for matrix products.

use std::fmt;

use moeflux_ops::{Activation, Error, KvFormat, LogDecay, Scalar, seam::dequantize_q8};

use super::{
    activations::QuantLayout,
    attention::{FloatRows, MergeFactors, PrefetchRows},
    delta_rule::DeltaRuleFactors,
    isa::Isa,
    sampling::{BINS, LogitScale},
    segment_attention::SegmentTile,
    state_space::StateSpaceFactors,
    table::{KernelTable, SamplingTable, on_generic},
};

/// Kernels of an instruction set that this machine has. Methods are safe: they check lengths.
#[derive(Clone, Copy)]
pub(crate) struct Kernels(pub(super) &'static KernelTable);

impl Kernels {
    /// Kernels of an instruction set.
    ///
    /// # Errors
    /// This machine does not have the instruction set.
    pub(crate) fn new(isa: Isa) -> Result<Self, Error> {
        isa.table().map(Self).ok_or_else(|| missing(isa))
    }

    /// Converts the first `out.len()` values of `bytes` to f32, exactly.
    pub(crate) fn widen(self, scalar: Scalar, bytes: &[u8], out: &mut [f32]) {
        assert!(bytes.len() >= out.len() * scalar.bytes());
        // SAFETY: Simd contract: the table's ISA was detected; the length was checked.
        unsafe { (self.0.widen)(scalar, bytes, out) }
    }

    /// Converts a vector of the KV cache to f32.
    pub(crate) fn widen_kv(self, format: KvFormat, bytes: &[u8], out: &mut [f32]) {
        match Scalar::of_kv_cache(format) {
            Some(scalar) => self.widen(scalar, bytes, out),
            None => dequantize_q8(bytes, out),
        }
    }

    /// Quantizes a row to int8: see [`Q8Rows`](super::Q8Rows).
    pub(super) fn quantize(
        self,
        x: &[f32],
        layout: QuantLayout,
        q: &mut [i8],
        scales: &mut [f32],
        sums: &mut [f32],
    ) {
        // SAFETY: Simd contract: the table's ISA was detected; the kernel checks its indexes.
        unsafe { (self.0.quantize)(x, layout, q, scales, sums) }
    }

    /// `y = silu(y) * x`
    pub(crate) fn silu_mul(self, y: &mut [f32], x: &[f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.silu_mul)(y, x) }
    }

    /// `y = y * silu(x)`
    pub(crate) fn mul_silu(self, y: &mut [f32], x: &[f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.mul_silu)(y, x) }
    }

    /// `y = y * sigmoid(x)`
    pub(crate) fn mul_sigmoid(self, y: &mut [f32], x: &[f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.mul_sigmoid)(y, x) }
    }

    /// `y = silu(y)`
    pub(crate) fn silu(self, y: &mut [f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.silu)(y) }
    }

    /// `y = activation(y)`, for an activation without a gate; `y` stays as it is for others.
    pub(crate) fn activate_up(self, activation: Activation, y: &mut [f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.activate_up)(activation, y) }
    }

    /// `x = exp(x - max)`; returns the sum of `x`.
    pub(crate) fn exp_sum(self, x: &mut [f32], max: f32) -> f32 {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.exp_sum)(x, max) }
    }

    /// Maximum; NaN is ignored.
    pub(crate) fn max(self, x: &[f32]) -> f32 {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.max)(x) }
    }

    /// `y += a * x`
    pub(crate) fn axpy(self, y: &mut [f32], a: f32, x: &[f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.axpy)(y, a, x) }
    }

    /// `y = y * factors.keep + x * factors.add`: bit-identical to [`Kernels::weighted_sum`] with a
    /// weighted sum `x`.
    pub(crate) fn merge(self, y: &mut [f32], factors: MergeFactors, x: &[f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.merge)(y, factors, x) }
    }

    /// `x . x`
    pub(crate) fn square(self, x: &[f32]) -> f32 {
        let mut out = [0.0];
        self.scores(&[x], FloatRows::f32(&[bytemuck::cast_slice(x)]), 1.0, &mut out);
        out[0]
    }

    /// `out[i][t] = scale * q[i] . keys[t]`, where `out` is `(q.len(), keys.rows.len())`.
    pub(crate) fn scores(self, q: &[&[f32]], keys: FloatRows<'_>, scale: f32, out: &mut [f32]) {
        self.scores_with_prefetch(q, keys, scale, out, PrefetchRows { rows: keys, bytes: 0 });
    }

    /// [`Kernels::scores`] that prefetches `next` meanwhile, one vector per key.
    pub(crate) fn scores_with_prefetch(
        self,
        q: &[&[f32]],
        keys: FloatRows<'_>,
        scale: f32,
        out: &mut [f32],
        next: PrefetchRows<'_>,
    ) {
        let width = q.first().map_or(0, |q| q.len());
        assert!(keys.have_width(width) && q.iter().all(|q| q.len() == width));
        assert_eq!(q.len() * keys.rows.len(), out.len());
        assert!(
            next.rows.rows.len() == keys.rows.len()
                && next.rows.scalar == keys.scalar
                && next.rows.have_width(0)
        );
        // SAFETY: Simd contract: the table's ISA was detected; types and lengths were checked.
        unsafe { (self.0.scores)(q, keys, scale, out, next) }
    }

    /// `acc[i] = acc[i] * factors[i].keep + factors[i].add * sum_t p[i][t] * values[t]`, summed in
    /// order of `t`.
    pub(crate) fn weighted_sum(
        self,
        p: &[&[f32]],
        values: FloatRows<'_>,
        factors: &[MergeFactors],
        acc: &mut [&mut [f32]],
    ) {
        self.weighted_sum_with_prefetch(p, values, factors, acc, &[]);
    }

    /// [`Kernels::weighted_sum`] that prefetches `next` meanwhile.
    pub(crate) fn weighted_sum_with_prefetch(
        self,
        p: &[&[f32]],
        values: FloatRows<'_>,
        factors: &[MergeFactors],
        acc: &mut [&mut [f32]],
        next: &[u8],
    ) {
        let width = acc.first().map_or(0, |acc| acc.len());
        assert!(values.have_width(width) && acc.iter().all(|acc| acc.len() == width));
        assert!(
            p.len() == acc.len()
                && factors.len() == acc.len()
                && p.iter().all(|p| p.len() == values.rows.len())
        );
        // SAFETY: Simd contract: the table's ISA was detected; types and lengths were checked.
        unsafe { (self.0.weighted_sum)(p, values, factors, acc, next) }
    }

    /// Attention of the queries of a tile to all keys of its segment. Returns a row of results for
    /// each query: the head's values, then padding.
    pub(crate) fn segment_attention<'a>(
        self,
        tile: &SegmentTile<'_>,
        scratch: &'a mut [f32],
    ) -> impl Iterator<Item = &'a [f32]> {
        tile.check(scratch.len());
        // SAFETY: Simd contract: the table's ISA was detected; the sizes were checked.
        unsafe { (self.0.segment_attention)(tile, scratch) }
        scratch.chunks_exact(tile.stride()).take(tile.queries())
    }

    /// Decays of the delta rule, `exp(log_decay(a + bias))`; `rate` is `exp(a_log)`.
    pub(crate) fn decays(
        self,
        a: &[f32],
        bias: &[f32],
        rate: f32,
        function: LogDecay,
        out: &mut [f32],
    ) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.decays)(a, bias, rate, function, out) }
    }

    /// One row of the gated delta rule on the rows of a head's state that `v` and `y` belong to.
    pub(crate) fn delta_rule(
        self,
        state: &mut [f32],
        [k, q]: [&[f32]; 2],
        v: &[f32],
        y: &mut [f32],
        d: DeltaRuleFactors<'_>,
    ) {
        assert!(
            k.len() == q.len()
                && (d.decay.len() == 1 || d.decay.len() == k.len())
                && v.len() == y.len()
                && state.len() == k.len() * v.len()
                && !k.is_empty()
        );
        // SAFETY: Simd contract: the table's ISA was detected; lengths were checked.
        unsafe { (self.0.delta_rule)(state, k, q, v, y, d) }
    }

    /// One row of the recurrence of Mamba-2 on the rows of a head's state that `x` and `y` belong
    /// to.
    pub(crate) fn state_space(
        self,
        state: &mut [f32],
        [b, c]: [&[f32]; 2],
        x: &[f32],
        y: &mut [f32],
        f: StateSpaceFactors,
    ) {
        assert!(
            b.len() == c.len()
                && x.len() == y.len()
                && state.len() == b.len() * x.len()
                && !b.is_empty()
        );
        // SAFETY: Simd contract: the table's ISA was detected; lengths were checked.
        unsafe { (self.0.state_space)(state, b, c, x, y, f) }
    }

    /// Depthwise causal convolution of four taps: `out[c] = sum_j weight[c][j] * inputs[j][c]`.
    pub(crate) fn conv4(self, weight: &[f32], inputs: [&[f32]; 4], out: &mut [f32]) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.conv4)(weight, inputs, out) }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kernels")
    }
}

/// Sampling kernels of an instruction set that this machine has.
#[derive(Clone, Copy)]
pub(crate) struct SamplingKernels(&'static SamplingTable);

impl SamplingKernels {
    /// Sampling kernels of an instruction set.
    ///
    /// # Errors
    /// This machine does not have the instruction set.
    pub(crate) fn new(isa: Isa) -> Result<Self, Error> {
        isa.sampling_table().map(Self).ok_or_else(|| missing(isa))
    }

    /// Sampling kernels of the best instruction set of this machine.
    pub(crate) fn best() -> Self {
        Self(Isa::detect().sampling_table().unwrap_or(&on_generic::SAMPLING))
    }

    /// Adds the weights of the logits of at least `least` to their bins, in weight units. Takes at
    /// most [`MAX_TALLIED`](super::MAX_TALLIED) logits, all with a bin, and bins that are 0.
    pub(crate) fn tally(
        self,
        logits: &[f32],
        least: f32,
        scale: LogitScale,
        bins: &mut [u64; BINS],
    ) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.tally)(logits, least, scale, bins) }
    }

    /// Largest and least logit, and whether every logit is finite or minus infinity.
    pub(crate) fn extent(self, logits: &[f32]) -> ([f32; 2], bool) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.extent)(logits) }
    }

    /// Calls `f` with the index and the value of every logit in an inclusive range, in order.
    pub(crate) fn for_each_between(
        self,
        logits: &[f32],
        range: [f32; 2],
        f: &mut dyn FnMut(usize, f32),
    ) {
        // SAFETY: Simd contract: the table's ISA was detected.
        unsafe { (self.0.for_each_between)(logits, range, f) }
    }
}

impl fmt::Debug for SamplingKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SamplingKernels")
    }
}

fn missing(isa: Isa) -> Error {
    Error::Device(format!("this machine has no {isa}"))
}
