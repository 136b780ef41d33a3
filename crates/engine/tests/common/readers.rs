//! Reader wrappers that inject faults.

use moeflux::{
    Error,
    base::ReadCounters,
    experts::{Completion, ReadRequest, Reader},
    session::WrapReader,
};

/// Fails the reads for which `fails` returns true.
struct FaultyReader<F> {
    inner: Box<dyn Reader>,
    fails: F,
}

impl<F: FnMut() -> bool + Send> Reader for FaultyReader<F> {
    fn start(&mut self, request: ReadRequest) {
        self.inner.start(request);
    }

    fn next(&mut self, wait: bool) -> Option<Completion> {
        let mut completion = self.inner.next(wait)?;
        if (self.fails)() {
            completion.result = Err(Error::Internal { problem: "an injected fault".into() });
        }
        Some(completion)
    }

    fn promote(&mut self, slot: usize) {
        self.inner.promote(slot);
    }

    fn cancel_prefetches(&mut self) {
        self.inner.cancel_prefetches();
    }

    fn counters(&self) -> ReadCounters {
        self.inner.counters()
    }
}

/// Wraps readers so that a read fails if `fails` returns true for it; called once per read.
pub fn faulty<F: FnMut() -> bool + Clone + Send + 'static>(fails: F) -> WrapReader {
    Box::new(move |inner| Box::new(FaultyReader { inner, fails: fails.clone() }))
}

/// Fails every `n`-th read.
pub fn every_nth(n: usize) -> WrapReader {
    let mut seen = 0usize;
    faulty(move || {
        seen += 1;
        seen.is_multiple_of(n)
    })
}
