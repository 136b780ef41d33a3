//! Answers of sessions on their way.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Instant,
};

use crate::{
    fault::Fault,
    request::{Answer, Delta},
    session_thread::RunningCall,
    shared_model::SharedModel,
    wait::{Cancel, POLL, Waiting},
};

/// Answer of a session on its way. The session is busy until it has ended. Dropping it ends it.
pub struct SessionAnswer {
    model: SharedModel,
    /// `None` once the answer has ended.
    running: Option<(RunningCall<Answer>, Receiver<Delta>)>,
    answer: Answer,
    /// When the caller looked for signals last.
    looked: Instant,
}

impl SessionAnswer {
    pub(crate) fn new(
        model: &SharedModel,
        running: RunningCall<Answer>,
        deltas: Receiver<Delta>,
    ) -> Self {
        Self {
            model: model.clone(),
            running: Some((running, deltas)),
            answer: Answer { finish: "cancelled", ..Answer::default() },
            looked: Instant::now(),
        }
    }

    /// The next part, once it is there. Returns `None` after the last one.
    ///
    /// # Errors
    /// The answer failed; the error of `waiting`, which ends it.
    pub fn next(
        &mut self,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Option<Delta>, Fault> {
        loop {
            // A callback of the caller may have forked.
            self.model.check_process()?;
            let Some((call, deltas)) = &self.running else { return Ok(None) };
            if cancel.is_some_and(Cancel::is_set) {
                call.work.cancel.set();
            }
            // Also while parts come without a pause.
            if self.looked.elapsed() >= POLL {
                self.looked = Instant::now();
                if let Err(fault) = waiting(call.work.done()) {
                    self.cancel();
                    return Err(fault);
                }
            }
            match deltas.recv_timeout(POLL) {
                Ok(delta) => {
                    self.answer.text += &delta.text;
                    self.answer.reasoning += &delta.reasoning;
                    return Ok(Some(delta));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let ended = call.result.recv();
                    self.running = None;
                    self.model.check()?;
                    self.answer = ended.map_err(|_| Fault::Closed)??;
                    return Ok(None);
                }
            }
        }
    }

    /// Ends the answer, and waits for its end: the session is then free.
    pub fn cancel(&mut self) {
        // Threads of another process do not exist here.
        let Some((call, deltas)) = self.running.take() else { return };
        if self.model.check_process().is_err() {
            return;
        }
        call.work.cancel.set();
        drop(deltas);
        if let Ok(Ok(ended)) = call.result.recv() {
            self.answer = ended;
        }
    }

    /// The answer so far.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// The answer so far. One that has not ended is ended.
    pub fn into_answer(mut self) -> Answer {
        self.cancel();
        std::mem::take(&mut self.answer)
    }
}

impl Drop for SessionAnswer {
    fn drop(&mut self) {
        self.cancel();
    }
}
