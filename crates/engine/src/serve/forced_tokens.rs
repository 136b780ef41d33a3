//! Scripts of answers, for tests of tools, dialects and clients without trained weights.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use moeflux_base::{Error, SamplingError, SessionError};
use moeflux_sampling::{MaskSource, TokenMask};

/// Forces the tokens of a script: for tests of tools without trained weights.
///
/// As the last mask of every request
/// ([`GenerateRequest::masks`](crate::GenerateRequest::masks)) it leaves one token to choose, so
/// that an answer of the script takes the way of any other through sampler, masks and scheduler.
/// The first request that gets a session has the first answer, and so on; the last answer is
/// repeated. An end token follows each. A scripted token that an earlier mask forbids fails its
/// request.
///
/// ```
/// # fn main() -> Result<(), moeflux::Error> {
/// use std::sync::Arc;
///
/// use moeflux::{Checkpoint, Engine, EngineOptions, GenerateRequest, StepControl, serve::ForcedTokens};
///
/// let engine = Engine::open(Checkpoint::embedded(&moeflux_tales::FILES)?, EngineOptions::default(), &mut |_, _| {})?;
/// let end = engine.end_tokens().ids()[0];
/// let script = Arc::new(ForcedTokens::new(vec![vec![7, 8, 9]], end));
/// let request = GenerateRequest::default().masks(vec![script]);
/// let mut session = engine.session()?;
/// let tokens = session.generate(&[1, 2, 3], &request, &mut StepControl::default())?;
/// assert_eq!(tokens.collect::<Result<Vec<_>, _>>()?, [7, 8, 9, end]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ForcedTokens {
    answers: Vec<Arc<[u32]>>,
    end_token: u32,
    /// Answers that have started.
    started: AtomicUsize,
}

impl ForcedTokens {
    /// A script of answers, each without its `end_token`. Without answers all are empty.
    pub fn new(answers: Vec<Vec<u32>>, end_token: u32) -> Self {
        let answers = answers.into_iter().map(Arc::from).collect();
        Self { answers, end_token, started: AtomicUsize::new(0) }
    }
}

impl MaskSource for ForcedTokens {
    fn start(&self) -> Result<Box<dyn TokenMask>, Error> {
        let index = self.started.fetch_add(1, Ordering::Relaxed);
        let tokens = self.answers.get(index).or(self.answers.last()).cloned().unwrap_or_default();
        let end_token = self.end_token;
        Ok(Box::new(ForcedAnswer { turn: index + 1, tokens, end_token, position: 0 }))
    }
}

/// One answer of a script.
struct ForcedAnswer {
    /// Number of the answer, from 1.
    turn: usize,
    tokens: Arc<[u32]>,
    end_token: u32,
    /// Tokens so far.
    position: usize,
}

impl TokenMask for ForcedAnswer {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        let Self { turn, position, .. } = *self;
        let token = self.tokens.get(position).copied().unwrap_or(self.end_token);
        let vocab = logits.len();
        let logit = logits.get(token as usize).copied();
        match logit.ok_or(SessionError::TokenId { id: token, vocab })? {
            f32::NEG_INFINITY => {
                Err(SamplingError::ForcedTokenForbidden { turn, position, token }.into())
            }
            logit => {
                logits.fill(f32::NEG_INFINITY);
                logits[token as usize] = logit;
                Ok(())
            }
        }
    }

    fn accept(&mut self, _: u32) -> Result<(), Error> {
        self.position += 1;
        Ok(())
    }
}
