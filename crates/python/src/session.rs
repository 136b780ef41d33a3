//! Sessions.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use moeflux::{runtime::KvFormat, session::Synced};
use moeflux_binding::{Mark, RequestOptions, Session, SessionAnswer, Waiting};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use crate::{
    arrays::FloatRows,
    calls::{NativeCancel, detached, parsed},
    errors::exception,
    request::{answer_dict, part, stats_dict},
};

#[pyclass(frozen)]
pub(crate) struct NativeSession(pub(crate) Arc<Session>);

#[pyclass(frozen)]
pub(crate) struct NativeMark(Mark);

/// Answer of a session on its way.
#[pyclass(frozen)]
pub(crate) struct NativeSessionStream(Mutex<SessionAnswer>);

impl Drop for NativeSession {
    fn drop(&mut self) {
        // Its thread ends without the GIL.
        Python::try_attach(|py| py.detach(|| self.0.close()));
    }
}

impl Drop for NativeSessionStream {
    fn drop(&mut self) {
        // The answer ends without the GIL.
        let end = || self.0.get_mut().unwrap_or_else(PoisonError::into_inner).cancel();
        Python::try_attach(|py| py.detach(end));
    }
}

type SyncedTuple = (usize, usize, usize, usize);

fn synced(synced: Synced) -> SyncedTuple {
    (synced.reused, synced.restored, synced.rewound, synced.computed)
}

#[pymethods]
impl NativeMark {
    fn tokens(&self) -> Vec<u32> {
        self.0.tokens().to_vec()
    }
}

#[pymethods]
impl NativeSession {
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        detached(py, None, |_| self.0.tokens())
    }

    fn logits(&self, py: Python<'_>) -> PyResult<FloatRows> {
        let logits = self.0.logits().map_err(|fault| exception(py, &fault))?;
        Ok(FloatRows::row(logits))
    }

    #[pyo3(signature = (tokens, cancel=None, progress=None))]
    fn sync(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        cancel: Option<&NativeCancel>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<SyncedTuple> {
        let cancel = cancel.map(|cancel| &cancel.0);
        let done = detached(py, progress.as_ref(), |wait| self.0.sync(tokens, cancel, wait));
        done.map(synced)
    }

    #[pyo3(signature = (tokens, cancel=None))]
    fn feed(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        cancel: Option<&NativeCancel>,
    ) -> PyResult<()> {
        let cancel = cancel.map(|cancel| &cancel.0);
        detached(py, None, |waiting| self.0.feed(tokens, cancel, waiting))
    }

    #[pyo3(signature = (tokens, cancel=None, hidden=false))]
    fn feed_all(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        cancel: Option<&NativeCancel>,
        hidden: bool,
    ) -> PyResult<FloatRows> {
        let cancel = cancel.map(|cancel| &cancel.0);
        let count = tokens.len();
        let feed = |wait: &mut Waiting<'_>| self.0.feed_all(tokens, hidden, cancel, wait);
        let rows = detached(py, None, feed)?;
        let width = rows.len().checked_div(count).unwrap_or(0);
        Ok(FloatRows::rows(rows, width))
    }

    /// Log-probabilities of tokens after a context, and whether each is the likeliest.
    fn score(
        &self,
        py: Python<'_>,
        context: Vec<u32>,
        tokens: Vec<u32>,
    ) -> PyResult<(FloatRows, bool)> {
        let scores = detached(py, None, |wait| self.0.score(context, tokens, None, wait))?;
        Ok((FloatRows::row(Arc::new(scores.logprobs)), scores.is_greedy))
    }

    fn sample(&self, py: Python<'_>, options: &str) -> PyResult<u32> {
        let options: RequestOptions = parsed(options)?;
        detached(py, None, |_| self.0.sample(options))
    }

    #[pyo3(signature = (prompt, options, cancel=None, progress=None))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: Option<Vec<u32>>,
        options: &str,
        cancel: Option<&NativeCancel>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mut options: RequestOptions = parsed(options)?;
        options.raw = true;
        let cancel = cancel.map(|cancel| &cancel.0);
        let answer = detached(py, progress.as_ref(), |waiting| {
            self.0.generate(prompt, options, cancel, waiting)
        })?;
        answer_dict(py, &answer)
    }

    fn stream(
        &self,
        py: Python<'_>,
        prompt: Option<Vec<u32>>,
        options: &str,
    ) -> PyResult<NativeSessionStream> {
        let mut options: RequestOptions = parsed(options)?;
        options.raw = true;
        let answer = self.0.stream(prompt, options).map_err(|fault| exception(py, &fault))?;
        Ok(NativeSessionStream(Mutex::new(answer)))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        detached(py, None, |_| self.0.fork()).map(|fork| Self(Arc::new(fork)))
    }

    fn mark(&self, py: Python<'_>) -> PyResult<NativeMark> {
        detached(py, None, |_| self.0.mark()).map(NativeMark)
    }

    fn rewind(&self, py: Python<'_>, mark: &NativeMark) -> PyResult<()> {
        detached(py, None, |_| self.0.rewind(&mark.0))
    }

    #[pyo3(signature = (length, cancel=None))]
    fn truncate(
        &self,
        py: Python<'_>,
        length: usize,
        cancel: Option<&NativeCancel>,
    ) -> PyResult<SyncedTuple> {
        let cancel = cancel.map(|cancel| &cancel.0);
        detached(py, None, |waiting| self.0.truncate(length, cancel, waiting)).map(synced)
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, None, |_| self.0.reset())
    }

    #[pyo3(signature = (path, kv_format=None, hot_experts=false))]
    fn save(
        &self,
        py: Python<'_>,
        path: PathBuf,
        kv_format: Option<&str>,
        hot_experts: bool,
    ) -> PyResult<u64> {
        let kv_format = match kv_format {
            None => None,
            Some("f16") => Some(KvFormat::F16),
            Some("q8") => Some(KvFormat::Q8),
            Some(other) => {
                let problem = format!("kv_format is {other:?}: expected f16 or q8");
                return Err(PyValueError::new_err(problem));
            }
        };
        detached(py, None, |_| self.0.save(path, kv_format, hot_experts))
    }

    fn restore(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        detached(py, None, |_| self.0.restore(path))
    }

    fn is_lossy(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, None, |_| self.0.is_lossy())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = detached(py, None, |_| self.0.stats())?;
        stats_dict(py, &stats)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

#[pymethods]
impl NativeSessionStream {
    /// As [`crate::request::NativeRequest::next`].
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let next = detached(py, None, |waiting| self.lock().next(None, waiting))?;
        next.map(|delta| part(py, delta)).transpose()
    }

    /// Ends the answer, and waits for its end: the session is then free.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.lock().cancel());
    }

    fn answer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let answer = py.detach(|| self.lock().answer().clone());
        answer_dict(py, &answer)
    }
}

impl NativeSessionStream {
    fn lock(&self) -> MutexGuard<'_, SessionAnswer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
