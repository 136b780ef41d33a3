//! Sessions: each on a separate thread, so that the caller can wait for signals meanwhile.

use std::{
    ops::ControlFlow,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        mpsc::{SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::Duration,
};

use moeflux::{
    StepControl, generate,
    runtime::{CancelToken, KvFormat, Logits},
    session::{self, SnapshotOptions, Synced},
    text::{Sampler, TokenLogprobs},
};

use crate::{
    fault::{Fault, unless_panics},
    locks::lock,
    request::{Answer, Delta, PartBuilder},
    request_options::RequestOptions,
    session_answer::SessionAnswer,
    session_thread::{BusyGuard, Job, RunningCall, SessionThread},
    shared_model::SharedModel,
    wait::{Cancel, Waiting, Work},
};

/// Parts that a caller has not read. An answer that is stopped may have some more tokens.
const UNREAD_PARTS: usize = 8;

/// Time between two tries to send a part to a reader that is slow.
const PAUSE: Duration = Duration::from_millis(1);

/// A sequence of tokens and the state after them. One call at a time: others get
/// [`Fault::SessionBusy`].
pub struct Session {
    model: SharedModel,
    thread: Arc<SessionThread>,
    /// Logits after the last token, shared with arrays that view them.
    logits: Arc<Mutex<Arc<Vec<f32>>>>,
}

/// A point of a session, to return to.
#[derive(Clone)]
pub struct Mark {
    pub(crate) mark: Arc<Mutex<Option<session::Mark>>>,
    tokens: Arc<[u32]>,
}

impl Mark {
    /// Tokens up to it.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// Log-probabilities of tokens after a context.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct TokenScores {
    /// Of each token.
    pub logprobs: Vec<f32>,
    /// Whether each is the likeliest.
    pub is_greedy: bool,
}

impl Session {
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(model: &SharedModel, session: moeflux::Session) -> Result<Self, Fault> {
        let logits = Arc::new(session.logits().to_vec());
        let thread = SessionThread::start(session)?;
        model.adopt(&thread)?;
        Ok(Self { model: model.clone(), thread, logits: Arc::new(Mutex::new(logits)) })
    }

    /// Starts `op` on the session's thread. With `steps`, logits are read after it.
    fn start_call<T: Send + 'static>(
        &self,
        steps: bool,
        op: impl FnOnce(&mut moeflux::Session, &Work) -> Result<T, Fault> + Send + 'static,
    ) -> Result<RunningCall<T>, Fault> {
        self.model.check()?;
        let busy = BusyGuard::take(&self.thread)?;
        let work = Arc::new(Work::default());
        *lock(&self.thread.work) = Arc::downgrade(&work);
        let (sender, result) = channel();
        let (of_job, logits) = (Arc::clone(&work), Arc::clone(&self.logits));
        let job: Job = Box::new(move |session| {
            let done = unless_panics(|| op(session, &of_job));
            if steps {
                store_logits(&logits, session.logits());
            }
            // A caller that is gone needs no result.
            let _ = sender.send(done);
        });
        let jobs = lock(&self.thread.jobs).clone();
        jobs.ok_or(Fault::Closed)?.send(job).map_err(|_| Fault::Closed)?;
        Ok(RunningCall { work, result, _busy: busy })
    }

    /// Result of `op` on the session's thread. With `steps`, logits are read after it.
    fn call<T: Send + 'static>(
        &self,
        steps: bool,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
        op: impl FnOnce(&mut moeflux::Session, &Work) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        let call = self.start_call(steps, op)?;
        let done = call.work.wait(&call.result, cancel, waiting)?;
        self.model.check()?;
        done
    }

    /// The tokens.
    ///
    /// # Errors
    /// As all calls: the model was closed, another thread uses the session.
    pub fn tokens(&self) -> Result<Vec<u32>, Fault> {
        self.call(false, None, &mut |_| Ok(()), |session, _| Ok(session.tokens().to_vec()))
    }

    /// Logits after the last token. Later steps write elsewhere while this is shared.
    ///
    /// # Errors
    /// As all calls.
    pub fn logits(&self) -> Result<Arc<Vec<f32>>, Fault> {
        self.model.check()?;
        let _busy = BusyGuard::take(&self.thread)?;
        Ok(Arc::clone(&lock(&self.logits)))
    }

    /// Makes the session hold exactly these tokens.
    ///
    /// # Errors
    /// As [`moeflux::Session::sync`].
    pub fn sync(
        &self,
        tokens: Vec<u32>,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Synced, Fault> {
        self.call(true, cancel, waiting, move |session, work| {
            let mut progress = |share| work.report(share);
            let mut control = control(work, &mut progress);
            Ok(session.sync(&tokens, &mut control)?)
        })
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// As [`moeflux::Session::feed`]: tokens of complete steps stay.
    pub fn feed(
        &self,
        tokens: Vec<u32>,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<(), Fault> {
        self.call(true, cancel, waiting, move |session, work| {
            let mut progress = |share| work.report(share);
            let mut control = control(work, &mut progress);
            Ok(session.feed(&tokens, Logits::Last, &mut control, &mut |_, _| {})?)
        })
    }

    /// Appends tokens, and returns the logits after each, or with `hidden` its hidden state after
    /// the final norm, row by row.
    ///
    /// # Errors
    /// As [`moeflux::Session::feed`].
    pub fn feed_all(
        &self,
        tokens: Vec<u32>,
        hidden: bool,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Vec<f32>, Fault> {
        self.call(true, cancel, waiting, move |session, work| {
            let mut rows = Vec::new();
            let mut progress = |share| work.report(share);
            let mut control = control(work, &mut progress);
            let mut sink = |_, row: &[f32]| rows.extend_from_slice(row);
            match hidden {
                true => session.feed_hidden(&tokens, &mut control, &mut sink)?,
                false => session.feed(&tokens, Logits::All, &mut control, &mut sink)?,
            }
            Ok(rows)
        })
    }

    /// Log-probabilities of `tokens` after `context`, which the session then holds.
    ///
    /// # Errors
    /// As [`moeflux::Session::sync`]; the context is empty.
    pub fn score(
        &self,
        context: Vec<u32>,
        tokens: Vec<u32>,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<TokenScores, Fault> {
        self.call(true, cancel, waiting, move |session, work| {
            let mut scores = TokenScores { logprobs: Vec::new(), is_greedy: true };
            session.sync(&context, &mut StepControl::default().cancel(work.cancel.token()))?;
            if session.logits().is_empty() {
                // A session that was truncated to the context has its states only.
                session.reset()?;
                session.sync(&context, &mut StepControl::default().cancel(work.cancel.token()))?;
            }
            let mut score = |logits: &[f32], token: u32| {
                let of_token = TokenLogprobs::new(logits, token, 1);
                scores.is_greedy &= of_token.top.first().is_some_and(|top| top.token == token);
                scores.logprobs.push(of_token.logprob);
            };
            let Some((first, rest)) = tokens.split_first() else { return Ok(scores) };
            score(session.logits(), *first);
            let fed = &tokens[..rest.len()];
            if !fed.is_empty() {
                let mut control = StepControl::default().cancel(work.cancel.token());
                session.feed(fed, Logits::All, &mut control, &mut |row, logits| {
                    score(logits, rest[row]);
                })?;
            }
            Ok(scores)
        })
    }

    /// A token from the logits, by the options. It is not appended.
    ///
    /// # Errors
    /// There are no logits, or an option is out of range.
    pub fn sample(&self, options: RequestOptions) -> Result<u32, Fault> {
        let model = self.model.clone();
        self.call(false, None, &mut |_| Ok(()), move |session, _| {
            model.with_text(|text| {
                let request = options.request(text, session.tokens())?;
                let logits = session.logits();
                let mut sampler = Sampler::new(request.sampling, logits.len())?;
                sampler.set_logit_bias(&request.logit_bias)?;
                sampler.prompt(session.tokens());
                Ok(sampler.sample(logits)?)
            })
        })
    }

    /// Brings the session to `prompt`, or leaves it, and generates an answer, which the session
    /// then holds.
    ///
    /// # Errors
    /// As [`moeflux::generate`].
    pub fn generate(
        &self,
        prompt: Option<Vec<u32>>,
        options: RequestOptions,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Answer, Fault> {
        let mut answer = self.stream(prompt, options)?;
        while answer.next(cancel, waiting)?.is_some() {}
        Ok(answer.into_answer())
    }

    /// [`Session::generate`], part by part.
    ///
    /// # Errors
    /// As all calls.
    pub fn stream(
        &self,
        prompt: Option<Vec<u32>>,
        options: RequestOptions,
    ) -> Result<SessionAnswer, Fault> {
        let model = self.model.clone();
        let (sender, deltas) = sync_channel(UNREAD_PARTS);
        let running = self.start_call(true, move |session, work| {
            let prompt = prompt.unwrap_or_else(|| session.tokens().to_vec());
            let request = model.with_text(|text| options.request(text, &prompt))?;
            let mut progress = |share| work.report(share);
            let mut control = control(work, &mut progress);
            let mut parts = PartBuilder::default();
            let answer = generate(session, &prompt, &request, &mut control, &mut |delta| {
                let mut part = Delta::default();
                parts.add(&mut part, delta);
                match part.is_empty() || send(&sender, part, work) {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })?;
            // The last token of an answer that was cut off is not in the session yet.
            let whole: Vec<u32> = prompt.iter().chain(&answer.tokens).copied().collect();
            if whole.len() <= session.engine().plan().context && !work.cancel.is_set() {
                session.sync(&whole, &mut StepControl::default())?;
            }
            model.with_text(|text| Ok(Answer::of_session(text, answer, parts.calls)))
        })?;
        Ok(SessionAnswer::new(&self.model, running, deltas))
    }

    /// A second session with the same state.
    ///
    /// # Errors
    /// As [`moeflux::Session::fork`].
    pub fn fork(&self) -> Result<Self, Fault> {
        let model = self.model.clone();
        let fork = self.call(false, None, &mut |_| Ok(()), move |session, _| {
            model.with_room(|| session.fork())
        })?;
        Self::start(&self.model, fork)
    }

    /// A point to return to.
    ///
    /// # Errors
    /// As [`moeflux::Session::mark`].
    pub fn mark(&self) -> Result<Mark, Fault> {
        let mark = self.call(false, None, &mut |_| Ok(()), |session, _| Ok(session.mark()?))?;
        let tokens = mark.tokens().into();
        let mark = Mark { mark: Arc::new(Mutex::new(Some(mark))), tokens };
        self.model.adopt_mark(&mark.mark)?;
        Ok(mark)
    }

    /// Returns to a mark. Computes nothing.
    ///
    /// # Errors
    /// As [`moeflux::Session::rewind`].
    pub fn rewind(&self, mark: &Mark) -> Result<(), Fault> {
        let mark = lock(&mark.mark).clone().ok_or(Fault::Closed)?;
        self.call(true, None, &mut |_| Ok(()), move |session, _| Ok(session.rewind(&mark)?))
    }

    /// Truncates the session to its first tokens.
    ///
    /// # Errors
    /// As [`moeflux::Session::truncate`].
    pub fn truncate(
        &self,
        len: usize,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Synced, Fault> {
        self.call(true, cancel, waiting, move |session, work| {
            let mut progress = |share| work.report(share);
            let mut control = control(work, &mut progress);
            Ok(session.truncate(len, &mut control)?)
        })
    }

    /// Drops all tokens.
    ///
    /// # Errors
    /// As [`moeflux::Session::reset`].
    pub fn reset(&self) -> Result<(), Fault> {
        self.call(true, None, &mut |_| Ok(()), |session, _| Ok(session.reset()?))
    }

    /// Saves the session. Returns the bytes of the file.
    ///
    /// # Errors
    /// As [`moeflux::Session::snapshot`].
    pub fn save(
        &self,
        path: PathBuf,
        kv_format: Option<KvFormat>,
        hot_experts: bool,
    ) -> Result<u64, Fault> {
        let mut options = SnapshotOptions::default();
        (options.kv_format, options.hot_experts) = (kv_format, hot_experts);
        self.call(false, None, &mut |_| Ok(()), move |session, _| {
            Ok(session.snapshot(path, options)?)
        })
    }

    /// Restores a saved session.
    ///
    /// # Errors
    /// As [`moeflux::Session::restore`]; the session is then unchanged.
    pub fn restore(&self, path: PathBuf) -> Result<(), Fault> {
        self.call(true, None, &mut |_| Ok(()), move |session, _| Ok(session.restore(path)?))
    }

    /// Whether part of its state was rounded.
    ///
    /// # Errors
    /// As all calls.
    pub fn is_lossy(&self) -> Result<bool, Fault> {
        self.call(false, None, &mut |_| Ok(()), |session, _| Ok(session.is_lossy()))
    }

    /// Counters.
    ///
    /// # Errors
    /// As all calls.
    pub fn stats(&self) -> Result<moeflux::base::Stats, Fault> {
        self.call(false, None, &mut |_| Ok(()), |session, _| Ok(session.stats()))
    }

    /// Ends the session, also if a thread uses it.
    pub fn close(&self) {
        // Threads of another process do not exist here.
        if self.model.check_process().is_ok() {
            self.thread.end();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

/// Sends a part. A reader that is slow pauses the answer; false: it is gone, or the call ends.
fn send(parts: &SyncSender<Delta>, mut part: Delta, work: &Work) -> bool {
    loop {
        match parts.try_send(part) {
            Ok(()) => return true,
            Err(TrySendError::Disconnected(_)) => return false,
            Err(TrySendError::Full(_)) if work.cancel.is_set() => return false,
            Err(TrySendError::Full(back)) => part = back,
        }
        thread::sleep(PAUSE);
    }
}

fn control<'a>(work: &'a Work, progress: &'a mut dyn FnMut(f64)) -> StepControl<'a> {
    let token: &CancelToken = work.cancel.token();
    StepControl::default().cancel(token).progress(progress)
}

/// Writes logits in place, unless an array shares them.
fn store_logits(kept: &Mutex<Arc<Vec<f32>>>, logits: &[f32]) {
    let mut kept = lock(kept);
    match Arc::get_mut(&mut kept) {
        Some(own) => {
            own.clear();
            own.extend_from_slice(logits);
        }
        None => *kept = Arc::new(logits.to_vec()),
    }
}
