//! Masks that are computed while the model computes the logits for them.

use std::sync::{
    OnceLock,
    mpsc::{self, Receiver, Sender},
};

use llguidance::{
    Matcher,
    toktrie::{SimpleVob, TokTrie},
};
use moeflux_base::Error;

use super::mask::stopped;

/// Most tokens of a forced run, which are fed in one step.
const MAX_FORCED: usize = 32;

/// Tokens that a grammar allows next.
pub(super) struct NextTokens {
    /// The grammar behind the tokens so far.
    pub(super) matcher: Matcher,
    /// `None` if it is complete, so that nothing continues it.
    pub(super) allowed: Option<SimpleVob>,
    /// Whether it may end here.
    pub(super) is_accepting: bool,
    /// Tokens of the only text that continues it, but for the last one: free text may join it.
    pub(super) forced: Vec<u32>,
}

impl NextTokens {
    /// Feeds tokens to a grammar, and finds the ones that it allows next.
    ///
    /// # Errors
    /// The grammar does not allow the tokens, or needs too much memory or time.
    fn after(mut matcher: Matcher, tokens: &[u32]) -> Result<Self, Error> {
        matcher.consume_tokens(tokens).map_err(stopped)?;
        let is_accepting = matcher.is_stopped() || matcher.is_accepting().map_err(stopped)?;
        let allowed = match matcher.is_stopped() {
            true => None,
            // The library reports the end of a grammar as an error.
            false => match matcher.compute_mask() {
                Err(_) if is_accepting => None,
                allowed => Some(allowed.map_err(stopped)?),
            },
        };
        let forced = match &allowed {
            Some(allowed) if !is_accepting => forced(&matcher, allowed),
            _ => Vec::new(),
        };
        Ok(Self { matcher, allowed, is_accepting, forced })
    }
}

/// Tokens of the only text that continues a grammar, without the last one.
fn forced(matcher: &Matcher, allowed: &SimpleVob) -> Vec<u32> {
    let Ok(env) = matcher.tok_env() else { return Vec::new() };
    let trie = env.tok_trie();
    // Texts that are free begin in many ways.
    let mut first = None;
    for token in set_bits(allowed) {
        let byte = trie.token(token).first();
        if byte.is_none() || byte == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
            return Vec::new();
        }
        if *first.get_or_insert(byte) != byte {
            return Vec::new();
        }
    }
    // The search would change the grammar.
    let bytes = matcher.deep_clone().compute_ff_bytes();
    let text = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    let mut tokens = env.tokenize_bytes(text.as_bytes());
    tokens.truncate(tokens.len().saturating_sub(1).min(MAX_FORCED));
    tokens
}

/// Tokens of a set.
fn set_bits(set: &SimpleVob) -> impl Iterator<Item = u32> + '_ {
    let words = set.as_slice().iter().zip((0..).step_by(32));
    words.flat_map(|(word, base)| {
        (0..32_u32).filter(move |bit| word & (1 << bit) != 0).map(move |bit| base + bit)
    })
}

/// Work of the thread, and the channel to the answer that waits for it.
struct MaskJob {
    matcher: Matcher,
    tokens: Vec<u32>,
    result: Sender<Result<NextTokens, Error>>,
}

/// Thread that computes masks. Starts with the first one, ends when it is dropped.
#[derive(Default)]
pub(super) struct MaskThread(OnceLock<Option<Sender<MaskJob>>>);

impl MaskThread {
    /// Begins to compute a mask.
    pub(super) fn begin(&self, matcher: Matcher, tokens: Vec<u32>) -> NextMask {
        let (result, results) = mpsc::channel();
        let job = MaskJob { matcher, tokens, result };
        let jobs = self.0.get_or_init(|| {
            let (sender, jobs) = mpsc::channel::<MaskJob>();
            let thread = std::thread::Builder::new().name("masks".into()).spawn(move || {
                for MaskJob { matcher, tokens, result } in jobs {
                    // The answer may have ended.
                    let _ = result.send(NextTokens::after(matcher, &tokens));
                }
            });
            thread.is_ok().then_some(sender)
        });
        let rejected = match jobs {
            Some(jobs) => jobs.send(job).err().map(|error| error.0),
            None => Some(job),
        };
        // Without the thread the mask is computed at once.
        match rejected {
            Some(MaskJob { matcher, tokens, .. }) => {
                NextMask::Done(Box::new(NextTokens::after(matcher, &tokens)))
            }
            None => NextMask::Computing(results),
        }
    }
}

/// A mask that is being computed.
pub(super) enum NextMask {
    Computing(Receiver<Result<NextTokens, Error>>),
    Done(Box<Result<NextTokens, Error>>),
}

impl NextMask {
    /// Waits for the mask.
    ///
    /// # Errors
    /// As [`NextTokens::after`].
    pub(super) fn wait(self) -> Result<NextTokens, Error> {
        match self {
            Self::Done(done) => *done,
            Self::Computing(results) => {
                results.recv().unwrap_or_else(|_| Err(stopped("the thread of masks has ended")))
            }
        }
    }
}
