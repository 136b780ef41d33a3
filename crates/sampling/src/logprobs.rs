//! Log-probabilities of tokens under the model's distribution: log-softmax of the logits, before
//! bias, penalties, temperature and masks.

use moeflux_base::{Error, SamplingError};
use serde::Serialize;

use super::sampler::{key_id, rank_key};

/// Maximum number of the most probable tokens that come with a token.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// Log-probability of a token, and the most probable tokens in its place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// The most probable tokens, in rank order: of equal logits the lower id comes first. If the
    /// token is among them, its entry has the same bits as `logprob`.
    pub top: Vec<TopLogprob>,
}

/// One of the most probable tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TopLogprob {
    /// Id of the token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

impl TokenLogprobs {
    /// Log-probabilities under `logits`, one per token of the vocabulary, with the `top` most
    /// probable tokens.
    #[doc(hidden)]
    pub fn new(logits: &[f32], token: u32, top: usize) -> Self {
        let softmax = LogSoftmax::new(logits);
        let top = first_in_rank(logits, top)
            .into_iter()
            .map(|token| TopLogprob { token, logprob: softmax.logprob(token) as f32 });
        Self { logprob: softmax.logprob(token) as f32, top: top.collect() }
    }

    /// Checks a requested number of most probable tokens.
    ///
    /// # Errors
    /// It is above [`MAX_TOP_LOGPROBS`].
    #[doc(hidden)]
    pub fn check_count(top: usize) -> Result<(), Error> {
        if top > MAX_TOP_LOGPROBS {
            let (name, rule) = ("logprobs", "must be from 0 to 20");
            return Err(SamplingError::Parameter { name, value: top as f32, rule }.into());
        }
        Ok(())
    }
}

/// Log-softmax of the logits of one row.
pub struct LogSoftmax<'a> {
    logits: &'a [f32],
    log_sum_exp: f64,
}

impl<'a> LogSoftmax<'a> {
    /// Sums in f64, in order of the ids.
    pub fn new(logits: &'a [f32]) -> Self {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
        Self { logits, log_sum_exp: max + sum.ln() }
    }

    /// Log-probability of a token, in nats. Minus infinity for a token without a logit.
    pub fn logprob(&self, token: u32) -> f64 {
        let logit = self.logits.get(token as usize);
        logit.map_or(f64::NEG_INFINITY, |logit| f64::from(*logit) - self.log_sum_exp)
    }
}

/// Ids of the first `n` tokens in rank order.
fn first_in_rank(logits: &[f32], n: usize) -> Vec<u32> {
    // Sorted: the last key is the one to beat.
    let mut keys: Vec<u64> = Vec::with_capacity(n + 1);
    for (&logit, id) in logits.iter().zip(0..) {
        let key = rank_key(logit, id);
        if keys.len() < n || keys.last().is_some_and(|last| key < *last) {
            keys.insert(keys.partition_point(|other| *other < key), key);
            keys.truncate(n);
        }
    }
    keys.into_iter().map(key_id).collect()
}
