//! Reader wrappers that inject faults or change the order of reads.

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

/// Delays finished reads and returns them in random order.
struct Shuffled {
    inner: Box<dyn Reader>,
    in_flight: usize,
    held: Vec<Completion>,
    random: u64,
}

impl Shuffled {
    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }
}

impl Reader for Shuffled {
    fn start(&mut self, request: ReadRequest) {
        self.in_flight += 1;
        self.inner.start(request);
    }

    fn next(&mut self, wait: bool) -> Option<Completion> {
        // Half of the polls return nothing; a blocking call returns any read in flight.
        if !wait && self.random(2) == 0 {
            return None;
        }
        while self.in_flight > 0 && (wait || self.held.is_empty()) {
            self.held.extend(self.inner.next(true));
            self.in_flight -= 1;
        }
        if self.held.is_empty() {
            return None;
        }
        let i = self.random(self.held.len());
        Some(self.held.swap_remove(i))
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

/// Wraps readers so that reads finish in random order.
pub fn shuffled(seed: u64) -> WrapReader {
    Box::new(move |inner| {
        Box::new(Shuffled { inner, in_flight: 0, held: Vec::new(), random: seed })
    })
}
