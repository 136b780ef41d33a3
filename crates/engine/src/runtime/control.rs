//! Step control: cancellation, progress and observation of steps.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::runtime::layer::StepObserver;

/// Token to cancel steps from another thread or a signal handler. May be stored in a `static`.
#[derive(Debug, Default)]
pub struct CancelToken(AtomicBool);

impl CancelToken {
    /// A token that is not cancelled.
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Requests cancellation. Steps with this token stop before their next layer.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Withdraws a request, so that the token can be used again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Cancels and observes a step.
///
/// Callbacks, also the sinks of logits, run inside a step with the engine locked. Calling the
/// engine or a session from one, even dropping a session, deadlocks. A panic in a callback fails
/// the step.
#[derive(Default)]
#[non_exhaustive]
pub struct StepControl<'a> {
    /// Stops the step before the next layer. Its sessions keep the tokens of their last finished
    /// step.
    pub cancel: Option<&'a CancelToken>,
    /// Called with the completed share of the work, from 0 to 1.
    pub progress: Option<&'a mut dyn FnMut(f64)>,
    /// Receives hidden states and routed experts.
    pub observer: Option<&'a mut (dyn StepObserver + 'a)>,
}

impl<'a> StepControl<'a> {
    /// Sets `cancel`.
    #[must_use]
    pub fn cancel(mut self, cancel: impl Into<Option<&'a CancelToken>>) -> Self {
        self.cancel = cancel.into();
        self
    }

    /// Sets `progress`.
    #[must_use]
    pub fn progress(mut self, progress: &'a mut dyn FnMut(f64)) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Sets `observer`.
    #[must_use]
    pub fn observer(mut self, observer: &'a mut (dyn StepObserver + 'a)) -> Self {
        self.observer = Some(observer);
        self
    }
}

impl StepControl<'_> {
    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(CancelToken::is_cancelled)
    }

    /// Runs `f` with the control of a part of the work, whose progress is reported as `before` to
    /// `before + share`.
    pub(crate) fn part<T>(
        &mut self,
        before: f64,
        share: f64,
        f: impl FnOnce(&mut StepControl<'_>) -> T,
    ) -> T {
        let mut inner =
            self.progress.as_mut().map(|p| move |of_part: f64| p(before + share * of_part));
        f(&mut StepControl {
            cancel: self.cancel,
            progress: inner.as_mut().map(|p| p as &mut dyn FnMut(f64)),
            observer: match &mut self.observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
        })
    }
}
