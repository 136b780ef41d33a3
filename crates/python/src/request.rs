//! Answers on their way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moeflux::base::Stats;
use moeflux_binding::{Answer, Delta, NextPart, Request, TokenLogprob};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyList},
};

use crate::{
    calls::{NativeCancel, detached},
    errors::exception,
    wakes::WakeSlot,
};

#[pyclass(frozen)]
pub(crate) struct NativeRequest {
    request: Mutex<Request>,
    wake: Arc<WakeSlot>,
}

impl NativeRequest {
    pub(crate) fn new(request: Request, wake: Arc<WakeSlot>) -> Self {
        Self { request: Mutex::new(request), wake }
    }

    fn lock(&self) -> MutexGuard<'_, Request> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl NativeRequest {
    /// The next part as (text, reasoning, tool call, tokens); None after the last one.
    #[pyo3(signature = (cancel=None, progress=None))]
    fn next<'py>(
        &self,
        py: Python<'py>,
        cancel: Option<&NativeCancel>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let cancel = cancel.map(|cancel| &cancel.0);
        let next = detached(py, progress.as_ref(), |waiting| self.lock().next(cancel, waiting))?;
        next.map(|delta| part(py, delta)).transpose()
    }

    /// Waits for the end.
    #[pyo3(signature = (cancel=None, progress=None))]
    fn finish(
        &self,
        py: Python<'_>,
        cancel: Option<&NativeCancel>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let cancel = cancel.map(|cancel| &cancel.0);
        detached(py, progress.as_ref(), |waiting| {
            let mut request = self.lock();
            while request.next(cancel, waiting)?.is_some() {}
            Ok(())
        })
    }

    /// The next part if it is there: (state, part), with the states "part", "pending" and "end".
    fn try_next<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(&'static str, Option<Bound<'py, PyAny>>)> {
        let next = py.detach(|| self.lock().try_next());
        Ok(match next.map_err(|fault| exception(py, &fault))? {
            NextPart::Delta(delta) => ("part", Some(part(py, delta)?)),
            NextPart::Pending => ("pending", None),
            NextPart::End => ("end", None),
        })
    }

    /// Has a callable called when there is something to read.
    fn set_wake(&self, callback: Option<Py<PyAny>>) {
        self.wake.set(callback);
    }

    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.lock().cancel());
    }

    fn answer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let answer = py.detach(|| self.lock().answer());
        answer_dict(py, &answer)
    }

    fn take_embedding(&self, py: Python<'_>) -> Option<Vec<f32>> {
        py.detach(|| self.lock().take_embedding())
    }
}

pub(crate) fn part(py: Python<'_>, delta: Delta) -> PyResult<Bound<'_, PyAny>> {
    let call = delta.tool_call.map(|call| (call.id, call.name, call.arguments));
    Ok((delta.text, delta.reasoning, call, delta.tokens).into_pyobject(py)?.into_any())
}

pub(crate) fn answer_dict<'py>(py: Python<'py>, answer: &Answer) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("text", &answer.text)?;
    dict.set_item("reasoning", &answer.reasoning)?;
    let calls = answer.tool_calls.iter().map(|call| (&call.id, &call.name, &call.arguments));
    dict.set_item("tool_calls", calls.collect::<Vec<_>>())?;
    dict.set_item("tokens", &answer.tokens)?;
    dict.set_item("finish", answer.finish)?;
    let usage = answer.usage;
    dict.set_item(
        "usage",
        (usage.prompt_tokens, usage.reused_tokens, usage.completion_tokens, usage.reasoning_tokens),
    )?;
    dict.set_item("logprobs", logprobs(py, answer.logprobs.as_deref())?)?;
    dict.set_item("prompt_logprobs", logprobs(py, answer.prompt_logprobs.as_deref())?)?;
    dict.set_item("seconds", answer.seconds)?;
    dict.set_item("tokens_per_second", answer.tokens_per_second())?;
    dict.set_item("stats", stats_dict(py, &answer.stats)?)?;
    Ok(dict)
}

fn logprobs<'py>(
    py: Python<'py>,
    entries: Option<&[TokenLogprob]>,
) -> PyResult<Option<Bound<'py, PyList>>> {
    let Some(entries) = entries else { return Ok(None) };
    let list = PyList::empty(py);
    for TokenLogprob { token, bytes, logprob, top, .. } in entries {
        list.append((token, PyBytes::new(py, bytes), logprob, top))?;
    }
    Ok(Some(list))
}

pub(crate) fn stats_dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("tokens", stats.tokens)?;
    dict.set_item("experts_needed", stats.experts_needed)?;
    dict.set_item("experts_hit", stats.experts_hit)?;
    dict.set_item("bytes_read", stats.bytes_read)?;
    dict.set_item("read_seconds", stats.disk_ns as f64 / 1e9)?;
    dict.set_item("waited_seconds", stats.stalled_ns as f64 / 1e9)?;
    Ok(dict)
}
