//! Waiting for servers: how long, how often, and the messages of it.

use std::{
    fmt,
    io::{self, Read},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    client::{RequestError, connection, origin},
    error::HubError,
};

/// Steps in which a wait looks for a cancellation.
const STEP: Duration = Duration::from_millis(50);

/// Bytes per second of an answer that is waited for any longer.
const MIN_RATE: u64 = 16 << 10;

/// Times and tries of requests.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Tries of a request that makes no progress.
    pub tries: u32,
    /// Time for a list to arrive, beside that for its bytes at 16 KiB/s.
    pub answer: Duration,
    /// Pause after the first failed try; each further one is twice as long.
    pub first_pause: Duration,
    /// Pause that a server may ask for, at most: the Hub counts requests in windows of five
    /// minutes.
    pub max_pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            tries: 5,
            answer: Duration::from_secs(10),
            first_pause: Duration::from_millis(500),
            max_pause: Duration::from_secs(300),
        }
    }
}

/// A pause before a further try.
#[derive(Clone, Debug)]
pub struct Wait {
    /// Host of the server, with its port if that is not the usual one.
    pub host: String,
    /// Why the last try failed.
    pub problem: String,
    /// Number of the next try.
    pub next_try: u32,
    /// Tries, at most.
    pub tries: u32,
    /// Time until the next try.
    pub pause: Duration,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, problem, next_try, tries, pause } = self;
        let seconds = pause.as_secs_f64();
        write!(f, "waiting for {host}: {problem}; next try ({next_try} of {tries}) in {seconds} s")
    }
}

/// Patience, and what is told of it.
#[derive(Clone)]
pub(crate) struct Waits {
    pub(crate) patience: Patience,
    pub(crate) on_wait: Arc<dyn Fn(&Wait) + Send + Sync>,
    /// Several connections that wait at once say so once.
    told_until: Arc<Mutex<Option<Instant>>>,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            patience: Patience::default(),
            on_wait: Arc::new(|_| {}),
            told_until: Arc::default(),
        }
    }
}

impl fmt::Debug for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waits").field(&self.patience).finish()
    }
}

impl Waits {
    /// Result of an operation, tried again after a pause while errors are transient.
    ///
    /// # Errors
    /// The last try fails, one fails for good, or `is_cancelled` says so.
    pub(crate) fn repeat<T>(
        &self,
        is_cancelled: &dyn Fn() -> bool,
        mut operation: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T, HubError> {
        let mut tries = 0;
        loop {
            match operation() {
                Ok(value) => return Ok(value),
                Err(RequestError::Final(error)) => return Err(error),
                Err(RequestError::Transient { error, pause }) => {
                    tries += 1;
                    self.pause_after(tries, error, pause, is_cancelled)?;
                }
            }
        }
    }

    /// Waits after a failed try.
    ///
    /// # Errors
    /// It was the last one, the server asks for a longer pause, or `is_cancelled` says so.
    pub(crate) fn pause_after(
        &self,
        tries: u32,
        error: HubError,
        asked: Option<Duration>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), HubError> {
        let Patience { tries: all, first_pause, max_pause, .. } = self.patience;
        if let Some(asked) = asked.filter(|&asked| asked > max_pause) {
            let seconds = asked.as_secs();
            return Err(error.with_tries(format!(", and asks for a pause of {seconds} s")));
        }
        if tries >= all {
            return Err(error.with_tries(format!(", {tries} times")));
        }
        let doubled = first_pause.saturating_mul(2_u32.saturating_pow(tries - 1));
        let pause = asked.unwrap_or(doubled.min(max_pause));
        if let Some((url, problem)) = error.wait() {
            let origin = origin(url);
            let host = origin.split_once("://").map_or(origin, |(_, host)| host).to_owned();
            self.tell(&Wait { host, problem, next_try: tries + 1, tries: all, pause });
        }
        let since = Instant::now();
        while let Some(left) = pause.checked_sub(since.elapsed()) {
            if is_cancelled() {
                return Err(HubError::Cancelled);
            }
            thread::sleep(left.min(STEP));
        }
        Ok(())
    }

    fn tell(&self, wait: &Wait) {
        let mut told_until = self.told_until.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if told_until.is_none_or(|until| until <= now) {
            *told_until = now.checked_add(wait.pause);
            (self.on_wait)(wait);
        }
    }

    /// Makes a request on another thread, so that a wait for a silent server can be ended. That
    /// thread is left to its own timeouts then.
    ///
    /// # Errors
    /// The request fails, is too slow, or `is_cancelled` says so.
    pub(crate) fn attend<T: Send + 'static>(
        &self,
        url: &str,
        is_cancelled: &dyn Fn() -> bool,
        request: impl FnOnce(Received) -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        let since = Instant::now();
        let (sender, answer) = mpsc::channel();
        let received = Arc::new(AtomicU64::new(0));
        let counter = Received(Arc::downgrade(&received));
        let work = move || {
            let _ = sender.send(request(counter));
        };
        let started = thread::Builder::new().name("request".into()).spawn(work);
        started.map_err(|error| connection(url, &error))?;
        loop {
            match answer.recv_timeout(STEP.min(self.patience.answer)) {
                Ok(result) => return result,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(connection(url, &"the request ended without an answer"));
                }
                Err(mpsc::RecvTimeoutError::Timeout) if is_cancelled() => {
                    return Err(RequestError::Final(HubError::Cancelled));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let count = received.load(Ordering::Relaxed);
            let allowed = self.patience.answer + Duration::from_secs(count / MIN_RATE);
            if since.elapsed() > allowed {
                let seconds = allowed.as_secs_f64();
                let problem = match count {
                    0 => format!("no answer for {seconds} s"),
                    _ => format!("only {count} bytes in {seconds} s"),
                };
                return Err(connection(url, &problem));
            }
        }
    }
}

/// Counter of the bytes of an answer, for as long as it is waited for.
#[derive(Clone)]
pub(crate) struct Received(Weak<AtomicU64>);

impl Received {
    /// A source whose bytes are counted. It fails once they are not waited for.
    pub(crate) fn count<R: Read>(self, source: R) -> Counted<R> {
        Counted { source, received: self }
    }
}

/// A source whose bytes are counted.
pub(crate) struct Counted<R> {
    source: R,
    received: Received,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buf)?;
        let Some(received) = self.received.0.upgrade() else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        received.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}
