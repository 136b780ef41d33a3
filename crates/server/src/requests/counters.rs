//! Counters of requests.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Counters of answered requests by path and status, and of dropped messages.
#[derive(Debug, Default)]
pub(crate) struct RequestCounters {
    answered: Mutex<BTreeMap<CounterKey, u64>>,
    dropped_messages: AtomicU64,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CounterKey {
    api: String,
    code: u16,
}

impl RequestCounters {
    /// Counts a request.
    pub(crate) fn add(&self, api: String, code: u16) {
        let mut counters = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        *counters.entry(CounterKey { api, code }).or_default() += 1;
    }

    /// Counts messages that were dropped.
    pub(crate) fn add_dropped(&self, messages: usize) {
        self.dropped_messages.fetch_add(messages as u64, Ordering::Relaxed);
    }

    /// Appends the counters.
    pub(crate) fn write(&self, text: &mut String) {
        *text += "# TYPE moeflux_requests_total counter\n";
        for (CounterKey { api, code }, count) in
            &*self.answered.lock().unwrap_or_else(PoisonError::into_inner)
        {
            // Writing to a string cannot fail.
            let _ =
                writeln!(text, "moeflux_requests_total{{api=\"{api}\",code=\"{code}\"}} {count}");
        }
        let dropped = self.dropped_messages.load(Ordering::Relaxed);
        *text += "# TYPE moeflux_dropped_messages_total counter\n";
        let _ = writeln!(text, "moeflux_dropped_messages_total {dropped}");
    }
}
