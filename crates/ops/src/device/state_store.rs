//! Per-sequence state of layers: KV caches and recurrent states.

use std::ops::Range;

use moeflux_base::KvFormat;

use crate::{error::Error, handle::State, operands::Span, state::StateShape};

/// Outcome of a step for one state: how many rows of its span are accepted.
///
/// Speculative decoding computes drafted tokens as rows of one step, and accepts those before the
/// first wrong one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// State, and the rows that the ops of the step ran on.
    pub span: Span,
    /// Number of accepted rows, from the first.
    pub accepted: usize,
}

impl Commit {
    /// Accepts all rows of a span.
    pub const fn all(span: Span) -> Self {
        Self { accepted: span.rows, span }
    }

    /// Positions that a KV cache keeps; `None` if all rows are accepted.
    #[doc(hidden)]
    pub fn kept_positions(&self) -> Option<usize> {
        let Self { span, accepted } = *self;
        (accepted < span.rows).then(|| span.position.saturating_add(accepted))
    }

    /// Parts of the span that a recurrent state keeps.
    #[doc(hidden)]
    pub fn kept_parts(&self) -> usize {
        self.span.parts_of(self.accepted).unwrap_or(0)
    }

    /// Checks the number of accepted rows for a state of this shape.
    #[doc(hidden)]
    pub fn check(&self, shape: StateShape) -> Result<(), Error> {
        let (rows, accepted) = (self.span.rows, self.accepted);
        match shape {
            _ if accepted > rows => Err(Error::Shape(format!(
                "{accepted} rows of a step are accepted that computed {rows}"
            ))),
            StateShape::Recurrent { .. } if self.span.parts_of(accepted).is_none() => {
                Err(Error::Shape(format!(
                    "{accepted} of {rows} rows are accepted, but a recurrent state keeps its values \
                     before the last {} rows only: set `Span::drafts`",
                    self.span.drafts
                )))
            }
            _ => Ok(()),
        }
    }
}

/// Allocates, copies and commits states.
pub trait StateStore {
    /// Returns the element format of KV caches.
    fn kv_format(&self) -> KvFormat;

    /// Returns the bytes that a state of this shape holds once all its entries are written.
    fn state_bytes(&self, shape: StateShape) -> u64;

    /// Returns the bytes that [`StateStore::save_state`] writes per entry; see
    /// [`StateShape::entries`].
    fn entry_bytes(&self, shape: StateShape) -> usize {
        shape.entry_bytes(self.kv_format())
    }

    /// Limits the bytes that all states together may hold. Ops and calls that need more fail with
    /// [`Error::StatesFull`]. There is no limit before the first call. A lower limit frees memory
    /// that was kept for later states.
    fn limit_states(&mut self, bytes: u64);

    /// As [`StateStore::state`], for a layer of a model. A device may keep the states that its ops
    /// use together in one buffer.
    ///
    /// # Errors
    /// As [`StateStore::state`].
    fn layer_state(&mut self, shape: StateShape, _layer: usize) -> Result<State, Error> {
        self.state(shape)
    }

    /// Sets whether the limit has room for all positions of all sessions. A device that copies KV
    /// caches to let them grow may then give each all of its memory with the first write.
    fn reserve_whole_states(&mut self, _on: bool) {}

    /// Tells how many bytes of the limit the states of all sessions take. A
    /// device that allocates memory for many states at a time then begins with as much.
    fn expect_states(&mut self, _bytes: u64) {}

    /// Returns the bytes that all states hold. Memory that forks share counts once.
    fn states_held(&self) -> u64;

    /// Returns the additional bytes that states will hold after the ops of one step have run on
    /// `spans`.
    ///
    /// A device that over-allocates decides here whether there is enough memory to do so for all
    /// spans. Until the next call its ops allocate according to this decision.
    ///
    /// # Errors
    /// A state does not exist.
    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error>;

    /// Makes KV caches as large as ops on these spans need, which otherwise happens when the ops
    /// run. Spans of recurrent states are ignored.
    fn grow_states(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<(), Error> {
        let _ = spans;
        Ok(())
    }

    /// Creates a zeroed state. A device may allocate its memory when it is first written.
    ///
    /// A new state gets the lowest free index, so that devices of one id that create and drop
    /// states in the same order return the same handles.
    fn state(&mut self, shape: StateShape) -> Result<State, Error>;

    /// Creates a state with the same committed contents; of a KV cache, with the entries before
    /// `len`. The two may share memory until one of them is written (copy on write).
    fn fork_state(&mut self, state: State, len: usize) -> Result<State, Error>;

    /// Frees a state.
    fn drop_state(&mut self, state: State);

    /// Zeroes a state. A KV cache may keep entries that are rewritten before they are read.
    fn reset(&mut self, state: State) -> Result<(), Error>;

    /// Frees the entries of a KV cache from `len` on; they are written again before they are read.
    /// Does nothing to recurrent states.
    fn truncate_state(&mut self, state: State, len: usize) -> Result<(), Error>;

    /// Copies committed entries out once all previous ops are done.
    ///
    /// An entry of a KV cache is the keys of all heads, then the values of all heads; an entry of a
    /// recurrent state is one f32. All values are little-endian. The layout is the same on all
    /// devices of one [`StateStore::kv_format`].
    ///
    /// # Errors
    /// `entries` is out of range, or `out` does not hold `entries.len()` times
    /// [`StateStore::entry_bytes`].
    fn save_state(
        &mut self,
        state: State,
        entries: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error>;

    /// Writes entries that [`StateStore::save_state`] copied out. Contents are not validated.
    ///
    /// # Errors
    /// As [`StateStore::save_state`]; [`Error::StatesFull`].
    fn load_state(
        &mut self,
        state: State,
        entries: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error>;

    /// Commits the accepted rows of a step: in all states or, on an error, in none.
    ///
    /// A recurrent state gets the values that the ops since the last commit wrote, after the last
    /// accepted row. A KV cache has them already, and is truncated if rows are rejected; a window
    /// of the step's ops before the first rejected row is still there.
    ///
    /// # Errors
    /// A state does not exist; more rows are accepted than the span has; some rows of a recurrent
    /// state are rejected that are not [`Span::drafts`]; an earlier op has failed.
    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error>;
}
