//! Parameters of the sampler.

use moeflux_base::{Error, SamplingError};
use serde::{Deserialize, Serialize};

/// Sampling parameters. The default samples the model's distribution: temperature 1, all else off.
///
/// Applied in this order, as in `transformers` and vLLM: repetition penalty, presence and frequency
/// penalty, temperature, top-k, top-p, min-p. Tokens are ranked by their logit; of equal logits the
/// lower id comes first. A bias precedes all of them, masks follow the penalties, bans the masks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Sampling {
    /// Divisor of the logits, at least 0. With 0 the first token in rank is chosen (greedy).
    /// Default 1.
    pub temperature: f32,
    /// Keeps the first `top_k` tokens in rank; 0 keeps all. Default 0.
    pub top_k: usize,
    /// Keeps the shortest run of ranks, after top-k, whose probability reaches `top_p`; in [0, 1].
    /// 0 keeps the first in rank, 1 keeps all. Default 1.
    pub top_p: f32,
    /// Keeps tokens at least `min_p` times as probable as the first in rank; in [0, 1], 0 keeps
    /// all. Default 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the answer so
    /// far; above 0. Default 1 (none).
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer so far; in [-2, 2]. Default 0.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence of the token in the answer so far; in [-2, 2]. Default 0.
    pub frequency_penalty: f32,
    /// Random seed. Equal seeds and logits choose equal tokens on every platform. Default 0.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always chooses the most probable token.
    pub fn greedy() -> Sampling {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Checks the ranges of all values.
    ///
    /// # Errors
    /// [`SamplingError`] with the first value out of range.
    pub fn validate(&self) -> Result<(), Error> {
        let finite = f32::MIN..=f32::MAX;
        let checks = [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0,
                "must be 0 (greedy) or more",
            ),
            (
                "top_p",
                self.top_p,
                (0.0..=1.0).contains(&self.top_p),
                "must be from 0 (the first in rank) to 1 (off)",
            ),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "must be from 0 (off) to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0,
                "must be above 0; 1 is off",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                (-2.0..=2.0).contains(&self.presence_penalty),
                "must be from -2 to 2; 0 is off",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                (-2.0..=2.0).contains(&self.frequency_penalty),
                "must be from -2 to 2; 0 is off",
            ),
        ];
        match checks.iter().find(|(_, value, legal, _)| !legal || !finite.contains(value)) {
            Some(&(name, value, _, rule)) => {
                Err(SamplingError::Parameter { name, value, rule }.into())
            }
            None => Ok(()),
        }
    }

    /// Whether the first token in rank is chosen.
    pub(super) fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_p == 0.0
    }

    /// Whether a penalty may raise the rank of a token.
    pub(super) fn can_promote(&self) -> bool {
        self.repetition_penalty < 1.0 || self.presence_penalty < 0.0 || self.frequency_penalty < 0.0
    }

    /// Whether any penalty is on.
    pub(super) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}
