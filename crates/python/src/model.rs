//! Models.

use std::sync::Arc;

use moeflux::serve::Pooling;
use moeflux_binding::{
    Model, OpenOptions, PlanSummary, RequestOptions, chat_tokens, decode, encode,
    messages as parse_messages, token_bytes,
};
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{
    calls::{NativeCancel, detached, parsed},
    errors::exception,
    request::{NativeRequest, stats_dict},
    server::{NativeRouter, NativeServer},
    session::NativeSession,
    wakes::WakeSlot,
};

#[pyclass(frozen)]
pub(crate) struct NativeModel(Model);

#[pymethods]
impl NativeModel {
    #[staticmethod]
    #[pyo3(signature = (path, options, cancel=None, progress=None))]
    fn open(
        py: Python<'_>,
        path: &str,
        options: &str,
        cancel: Option<&NativeCancel>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let options: OpenOptions = parsed(options)?;
        let cancel = cancel.map(|cancel| &cancel.0);
        let open = |waiting: &mut moeflux_binding::Waiting<'_>| {
            Model::open(path, &options, cancel, waiting)
        };
        detached(py, progress.as_ref(), open).map(Self)
    }

    /// The memory plan of a model, without loading it.
    #[staticmethod]
    fn inspect<'py>(py: Python<'py>, path: &str, options: &str) -> PyResult<Bound<'py, PyDict>> {
        let options: OpenOptions = parsed(options)?;
        plan_dict(py, detached(py, None, |_| Model::inspect(path, &options))?)
    }

    /// Smallest budget with which a model opens.
    #[staticmethod]
    fn floor(py: Python<'_>, path: &str, options: &str) -> PyResult<u64> {
        let options: OpenOptions = parsed(options)?;
        detached(py, None, |_| Model::floor(path, &options))
    }

    fn config(&self) -> &str {
        self.0.config()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, None, |_| self.0.close())
    }

    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    fn path(&self) -> &str {
        self.0.path()
    }

    fn session(&self, py: Python<'_>) -> PyResult<NativeSession> {
        detached(py, None, |_| self.0.session()).map(|session| NativeSession(Arc::new(session)))
    }

    /// Submits an answer.
    fn submit(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        ends: Vec<usize>,
        options: &str,
        is_raw: bool,
    ) -> PyResult<NativeRequest> {
        let mut options: RequestOptions = parsed(options)?;
        options.raw = is_raw;
        let (slot, wake) = WakeSlot::new();
        let submit = |_: &mut moeflux_binding::Waiting<'_>| {
            self.0.submit(tokens, ends, &options, Some(wake))
        };
        Ok(NativeRequest::new(detached(py, None, submit)?, slot))
    }

    fn submit_embedding(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        pooling: &str,
    ) -> PyResult<NativeRequest> {
        let pooling = match pooling {
            "mean" => Pooling::Mean,
            "last" => Pooling::Last,
            "first" => Pooling::First,
            other => {
                let problem = format!("pooling is {other:?}: expected mean, last or first");
                return Err(PyValueError::new_err(problem));
            }
        };
        let (slot, wake) = WakeSlot::new();
        let request = detached(py, None, |_| self.0.submit_embedding(tokens, pooling, Some(wake)))?;
        Ok(NativeRequest::new(request, slot))
    }

    fn encode(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        detached(py, None, |_| self.0.with_text(|own| encode(own, text, add_special)))
    }

    fn decode(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        detached(py, None, |_| self.0.with_text(|text| decode(text, &tokens, skip_special)))
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token: u32) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = detached(py, None, |_| self.0.with_text(|text| token_bytes(text, token)))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Tokens of a conversation, and the ends of its messages.
    fn chat_tokens(
        &self,
        py: Python<'_>,
        messages: &str,
        options: &str,
    ) -> PyResult<(Vec<u32>, Vec<usize>)> {
        let options: RequestOptions = parsed(options)?;
        detached(py, None, |_| {
            let messages = parse_messages(messages)?;
            self.0.with_text(|text| chat_tokens(text, &messages, &options))
        })
    }

    /// Serves the model on a port.
    fn serve(
        &self,
        py: Python<'_>,
        name: &str,
        host: &str,
        port: u16,
        keys: Vec<String>,
    ) -> PyResult<NativeServer> {
        let core = detached(py, None, |_| self.0.core())?;
        let (server, end) = NativeServer::start(name, core, host, port, &keys)?;
        self.0.on_close(end);
        Ok(server)
    }

    /// The server's APIs without a socket.
    fn router(&self, py: Python<'_>, name: &str) -> PyResult<NativeRouter> {
        let core = detached(py, None, |_| self.0.core())?;
        let (router, end) = NativeRouter::start(name, core)?;
        self.0.on_close(end);
        Ok(router)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats().map_err(|fault| exception(py, &fault))?;
        stats_dict(py, &stats)
    }

    fn plan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        plan_dict(py, self.0.plan().map_err(|fault| exception(py, &fault))?)
    }

    fn expert_uses(&self, py: Python<'_>) -> PyResult<Vec<Vec<u64>>> {
        detached(py, None, |_| self.0.expert_uses())
    }

    /// Constants of the model.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let known = self.0.describe().map_err(|fault| exception(py, &fault))?;
        let dict = PyDict::new(py);
        dict.set_item("vocab_size", known.vocab)?;
        dict.set_item("hidden_size", known.hidden)?;
        dict.set_item("layers", known.layers)?;
        dict.set_item("end_tokens", known.end_tokens)?;
        dict.set_item("folder", known.folder)?;
        dict.set_item("device", known.device)?;
        Ok(dict)
    }

    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, None, |_| self.0.digest())
    }
}

fn plan_dict(py: Python<'_>, plan: PlanSummary) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("lines", plan.lines)?;
    dict.set_item("total", plan.total)?;
    dict.set_item("beside", plan.beside)?;
    dict.set_item("slots", plan.slots)?;
    dict.set_item("experts", plan.experts)?;
    dict.set_item("context", plan.context)?;
    dict.set_item("sessions", plan.sessions)?;
    dict.set_item("notes", plan.notes)?;
    Ok(dict)
}
