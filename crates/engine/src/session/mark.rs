//! Marks: reference-counted checkpoints of a session.

use std::sync::Arc;

use crate::session::{engine::Engine, timeline::Timeline};

/// A checkpoint of a session. [`Session::rewind`](crate::Session::rewind) returns to it,
/// independent of what the session did since. Clones share it.
///
/// A mark shares all state memory with its session until either of them advances. Then the
/// recurrent states are copied, and so is the last, partly filled allocation of the KV cache: a
/// block of 256 positions on the CPU, a layer's whole allocation on a GPU. This memory counts as
/// session state in the memory plan. Unlike the prefix cache of
/// [`Session::sync`](crate::Session::sync), a mark is never evicted. It also holds the tokens, and
/// the logits if present.
#[derive(Clone)]
pub struct Mark {
    pub(crate) state: Arc<MarkState>,
}

pub(crate) struct MarkState {
    pub(crate) engine: Engine,
    /// Empty only while being dropped.
    pub(crate) timeline: Timeline,
}

impl Mark {
    pub(crate) fn new(engine: Engine, timeline: Timeline) -> Self {
        Self { state: Arc::new(MarkState { engine, timeline }) }
    }

    /// Tokens of the checkpoint.
    pub fn tokens(&self) -> &[u32] {
        &self.state.timeline.tokens
    }
}

impl Drop for MarkState {
    fn drop(&mut self) {
        self.engine.lock().drop_timeline(std::mem::take(&mut self.timeline));
    }
}
