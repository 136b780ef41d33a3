//! Perplexity of a text under a model.

use serde::Serialize;

use crate::{
    base::error::{Error, ToolError},
    runtime::{control::StepControl, forward::Logits},
    session::session::Session,
};

/// Perplexity of a text.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
pub struct Perplexity {
    /// Predicted tokens.
    pub tokens: usize,
    /// Mean negative log-likelihood per token, in nats.
    pub nll: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
}

/// Negative log-likelihood of `token` under the softmax of `logits`, in nats, summed in f64.
/// Infinite for a token without a logit.
pub fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
    logits.get(token as usize).map_or(f64::INFINITY, |logit| max + sum.ln() - f64::from(*logit))
}

/// Measures `tokens` in consecutive windows of the session's context length. In each window every
/// token but the first is predicted from its predecessors.
///
/// # Errors
/// Fewer than two tokens, ids outside the vocabulary, an expert that cannot be read, or
/// cancellation.
pub fn perplexity(
    session: &mut Session,
    tokens: &[u32],
    control: &mut StepControl<'_>,
) -> Result<Perplexity, Error> {
    let window = session.engine().plan().context;
    if tokens.len() < 2 || window < 2 {
        return Err(ToolError::TextTooShort.into());
    }
    let (mut sum, mut predicted) = (0.0, 0);
    let mut done = 0;
    for part in tokens.chunks(window).filter(|p| p.len() > 1) {
        session.reset()?;
        let (before, share) =
            (done as f64 / tokens.len() as f64, part.len() as f64 / tokens.len() as f64);
        let mut inner =
            control.progress.as_mut().map(|p| move |of_part: f64| p(before + share * of_part));
        let mut control = StepControl {
            cancel: control.cancel,
            progress: inner.as_mut().map(|p| p as &mut dyn FnMut(f64)),
            observer: None,
        };
        session.feed(part, Logits::All, &mut control, &mut |row, logits| {
            if let Some(next) = part.get(row + 1) {
                sum += negative_log_likelihood(logits, *next);
                predicted += 1;
            }
        })?;
        done += part.len();
    }
    let nll = sum / predicted as f64;
    Ok(Perplexity { tokens: predicted, nll, perplexity: nll.exp() })
}
