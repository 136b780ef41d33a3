//! Waits of the host for a card.

use std::{
    thread,
    time::{Duration, Instant},
};

use moeflux_ops::{AdapterKind, Error};

use crate::card::Card;

/// Time for which a waiting host polls a discrete card before it sleeps: more than a wait within a
/// decode step takes. A sleeping thread wakes some 50 us after the card is done.
const POLLED: Duration = Duration::from_millis(2);

/// Waits for the submissions of a card.
#[derive(Clone)]
pub(super) struct CardWait {
    device: wgpu::Device,
    /// Time of polling; none where card and processor share power and memory.
    polled: Duration,
}

impl CardWait {
    pub(super) fn new(card: &Card) -> Self {
        let polled = match card.adapter.kind {
            AdapterKind::Discrete => POLLED,
            _ => Duration::ZERO,
        };
        Self { device: card.device.clone(), polled }
    }

    /// Waits for a submission and all before it, or for the last one.
    pub(super) fn wait(&self, submission: Option<&wgpu::SubmissionIndex>) -> Result<(), Error> {
        let poll = |timeout| {
            let submission_index = submission.cloned();
            self.device.poll(wgpu::PollType::Wait { submission_index, timeout })
        };
        let since = Instant::now();
        while since.elapsed() < self.polled {
            match poll(Some(Duration::ZERO)) {
                Err(wgpu::PollError::Timeout) => thread::yield_now(),
                _ => break,
            }
        }
        let waited = poll(None);
        waited.map(drop).map_err(|e| Error::Device(format!("waiting for the GPU failed: {e}")))
    }
}
