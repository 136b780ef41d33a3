//! Rotary position embedding: frequencies and their scalings.

use moeflux_ops::RopePairs;

/// Rotary position embedding (RoPE).
#[derive(Clone, Debug)]
pub struct RopeShape {
    /// Radians per position, by pair; empty where positions are not encoded (NoPE).
    pub frequencies: Vec<f32>,
    /// Which elements form a pair.
    pub pairs: RopePairs,
    /// Factor on the rotated elements.
    pub scale: f32,
    /// Values for contexts that are longer than the original one.
    pub long: Option<LongRope>,
    /// Axis of the position by which each pair turns, in models whose images have time, row and
    /// column (M-RoPE); empty in others. The three are equal in text.
    pub axes: Vec<u8>,
}

/// RoPE of a long context. Ding et al., "LongRoPE", 2024.
#[derive(Clone, Debug)]
pub struct LongRope {
    /// Positions of the original context. Sessions of more use these values at all positions, so
    /// that cached keys stay valid.
    pub original_positions: usize,
    /// As [`RopeShape::frequencies`].
    pub frequencies: Vec<f32>,
    /// As [`RopeShape::scale`].
    pub scale: f32,
}

impl RopeShape {
    /// No rotation: a layer without positions (NoPE).
    pub const NONE: Self = Self {
        frequencies: Vec::new(),
        pairs: RopePairs::Halves,
        scale: 1.0,
        long: None,
        axes: Vec::new(),
    };

    /// The shape of sessions of `context` positions.
    #[doc(hidden)]
    pub fn for_context(&self, context: usize) -> Self {
        match &self.long {
            Some(long) if context > long.original_positions => Self {
                frequencies: long.frequencies.clone(),
                scale: long.scale,
                pairs: self.pairs,
                long: None,
                axes: self.axes.clone(),
            },
            _ => self.clone(),
        }
    }

    /// Frequencies `base^(-2 i / dims)` for each of `dims / 2` pairs.
    pub fn new(dims: usize, base: f64, pairs: RopePairs) -> Self {
        let unscaled = 1.0;
        Self::interpolated(dims, base, unscaled, pairs)
    }

    /// Linear interpolation: the frequencies of [`RopeShape::new`] divided by `factor`.
    pub fn interpolated(dims: usize, base: f64, factor: f64, pairs: RopePairs) -> Self {
        let frequency = |i: usize| (base.powf(-2.0 * i as f64 / dims as f64) / factor) as f32;
        let frequencies = (0..dims / 2).map(frequency).collect();
        Self { frequencies, pairs, ..Self::NONE }
    }

    /// YaRN: fast frequencies are kept, slow ones divided by the factor. Between `beta_fast` and
    /// `beta_slow` turns within the original context the two are blended linearly.
    ///
    /// Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023,
    /// section 3.2.
    pub fn yarn(dims: usize, base: f64, yarn: &Yarn, pairs: RopePairs) -> Self {
        // Fractional index of the pair that turns `turns` times within the original context.
        let pair = |turns: f64| {
            dims as f64 * (yarn.original_positions / (turns * std::f64::consts::TAU)).ln()
                / (2.0 * base.ln())
        };
        let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let frequency = |i: usize| {
            let unscaled = base.powf(-2.0 * i as f64 / dims as f64);
            let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (unscaled / yarn.factor * interpolated + unscaled * (1.0 - interpolated)) as f32
        };
        let frequencies = (0..dims / 2).map(frequency).collect();
        Self { frequencies, pairs, scale: yarn.scale, ..Self::NONE }
    }

    /// Scaling of Llama 3.1: slow frequencies are divided by the factor, fast ones kept. Between
    /// `low_turns` and `high_turns` turns within the original context the two are blended linearly.
    ///
    /// Meta, "The Llama 3 Herd of Models", 2024, and its `llama-models`, `apply_scaling`.
    pub fn llama3(dims: usize, base: f64, scaling: &Llama3Scaling, pairs: RopePairs) -> Self {
        let Llama3Scaling { factor, original_positions, low_turns, high_turns } = *scaling;
        let frequency = |i: usize| {
            let unscaled = base.powf(-2.0 * i as f64 / dims as f64);
            let turns = original_positions * unscaled / std::f64::consts::TAU;
            let kept = ((turns - low_turns) / (high_turns - low_turns)).clamp(0.0, 1.0);
            (unscaled * kept + unscaled / factor * (1.0 - kept)) as f32
        };
        Self { frequencies: (0..dims / 2).map(frequency).collect(), pairs, ..Self::NONE }
    }
}

/// Parameters of the RoPE scaling of Llama 3.1.
#[derive(Clone, Copy, Debug)]
pub struct Llama3Scaling {
    /// Factor by which slow frequencies are divided.
    pub factor: f64,
    /// Positions of the original context.
    pub original_positions: f64,
    /// Turns within the original context up to which a frequency is divided by `factor`.
    pub low_turns: f64,
    /// Turns within the original context from which a frequency is kept; more than `low_turns`.
    pub high_turns: f64,
}

/// Parameters of YaRN.
#[derive(Clone, Copy, Debug)]
pub struct Yarn {
    /// Factor by which the context is extended.
    pub factor: f64,
    /// Positions of the original context.
    pub original_positions: f64,
    /// Turns within the original context from which a frequency is kept.
    pub beta_fast: f64,
    /// Turns within the original context up to which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Whether the range between them is widened to whole pairs.
    pub truncate: bool,
    /// Factor on the rotated elements.
    pub scale: f32,
}
