//! Masks: constraints on the next token, such as a grammar.

use std::fmt;

use moeflux_base::Error;

/// Mask of one answer's tokens. It follows the answer token by token.
pub trait TokenMask: Send {
    /// Sets the logits of forbidden tokens to minus infinity, and changes no others. `logits` has
    /// one per token of the vocabulary, after bias, penalties and earlier masks: minus infinity
    /// where one of those forbids the token.
    ///
    /// # Errors
    /// No token is possible, or the mask fails; the answer fails with this error.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error>;

    /// Takes the token that was chosen, an end token too.
    ///
    /// # Errors
    /// The mask fails; the answer fails with this error.
    fn accept(&mut self, token: u32) -> Result<(), Error>;

    /// Takes the run of tokens that the mask forces next, if there is one. The caller chooses these
    /// tokens without logits, and accepts each.
    ///
    /// # Errors
    /// The mask fails; the answer fails with this error.
    fn take_forced(&mut self) -> Result<Vec<u32>, Error> {
        Ok(Vec::new())
    }
}

/// A mask as part of a request, which may be cloned: one [`TokenMask`] for each of its answers.
pub trait MaskSource: fmt::Debug + Send + Sync {
    /// The mask at the start of an answer. Runs between steps, so that others wait for it:
    /// expensive work, such as compiling a grammar, precedes the request.
    ///
    /// # Errors
    /// There is no mask; the request fails with this error.
    fn start(&self) -> Result<Box<dyn TokenMask>, Error>;
}
