//! Points of a session that somebody holds.

use std::sync::Arc;

use crate::session::{engine::Engine, timeline::Timeline};

/// A saved point of a session: [`Session::rewind`](crate::Session::rewind) goes back to it, whatever has become of the session
/// since. Clones share it.
///
/// It shares all memory of states with the session until one of them goes on. Then the recurrent states are there twice, and of
/// keys and values what was not full: on the processor a block of 256 positions, on a card the whole piece of a layer. While it
/// lives, that memory counts as states of sessions in the memory plan; unlike points that [`Session::sync`](crate::Session::sync)
/// keeps, it never gives way. It also has the tokens, and the logits if there were some.
#[derive(Clone)]
pub struct Mark {
    pub(crate) held: Arc<Held>,
}

pub(crate) struct Held {
    pub(crate) engine: Engine,
    /// Empty only while it is dropped.
    pub(crate) timeline: Timeline,
}

impl Mark {
    pub(crate) fn new(engine: Engine, timeline: Timeline) -> Self {
        Self { held: Arc::new(Held { engine, timeline }) }
    }

    /// The tokens up to there.
    pub fn tokens(&self) -> &[u32] {
        &self.held.timeline.tokens
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.engine.lock().drop_timeline(std::mem::take(&mut self.timeline));
    }
}
