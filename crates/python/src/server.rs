//! The server of a model: on a port, or as a part of a Python application.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderName, HeaderValue, Method, Request, Uri, header},
};
use http_body_util::BodyExt;
use moeflux::serve::ServingCore;
use moeflux_server::{ApiKeys, LoadedModel, Models, Server, ServerOptions, ServerRouter, Stopper};
use pyo3::{
    exceptions::{PyOSError, PyValueError},
    prelude::*,
    types::PyBytes,
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc::{Receiver, channel, error::TryRecvError},
};
use tower::ServiceExt;

use crate::wakes::WakeSlot;

/// Parts of a response that its application has not taken. More pause the answer.
const UNREAD: usize = 16;

/// Time between two looks whether a server has ended.
const POLL: Duration = Duration::from_millis(20);

/// Time that threads have to end.
const THREADS_END: Duration = Duration::from_secs(1);

/// Models of a server with one model, which goes on after it.
fn models(name: &str, core: ServingCore) -> PyResult<Models> {
    let loaded = LoadedModel::new(core).shared(true);
    Models::one(name, loaded).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A server on a port.
#[pyclass(frozen)]
pub(crate) struct NativeServer {
    url: String,
    running: Arc<Mutex<Option<RunningServer>>>,
}

struct RunningServer {
    stopper: Stopper,
    thread: JoinHandle<()>,
}

impl RunningServer {
    /// Ends all answers, and waits for the end.
    fn end(self) {
        // The first call lets running answers complete, one after it ends them.
        while !self.thread.is_finished() {
            self.stopper.stop();
            thread::sleep(POLL);
        }
        // A panic has ended it, too.
        let _ = self.thread.join();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end_server(running: &Mutex<Option<RunningServer>>) {
    let running = lock(running).take();
    if let Some(running) = running {
        running.end();
    }
}

impl NativeServer {
    /// Starts a server, and what ends it.
    pub(crate) fn start(
        name: &str,
        core: ServingCore,
        host: &str,
        port: u16,
        keys: &[String],
    ) -> PyResult<(Self, impl FnOnce() + Send + use<>)> {
        let mut options = ServerOptions::default();
        let wrong = |_| PyValueError::new_err(format!("host is {host:?}: expected an address"));
        options.host = host.parse::<IpAddr>().map_err(wrong)?;
        options.port = port;
        options.keys = ApiKeys::from_lines(&keys.join("\n"));
        let failed = |error| PyOSError::new_err(format!("{error}"));
        let server = Server::bind(options).map_err(failed)?.without_signals();
        let (address, stopper) = (server.address(), server.stopper());
        let models = models(name, core)?;
        let run = move || {
            // It fails where the system starts no threads.
            let _ = server.run(models);
        };
        let thread = thread::Builder::new().name("server".into()).spawn(run)?;
        let running = Arc::new(Mutex::new(Some(RunningServer { stopper, thread })));
        let of_model = Arc::clone(&running);
        let end = move || end_server(&of_model);
        Ok((Self { url: format!("http://{address}"), running }, end))
    }
}

#[pymethods]
impl NativeServer {
    fn url(&self) -> &str {
        &self.url
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| end_server(&self.running));
    }
}

/// The server's APIs without a socket.
#[pyclass(frozen)]
pub(crate) struct NativeRouter(Arc<Mutex<Option<RouterThreads>>>);

struct RouterThreads {
    router: ServerRouter,
    runtime: Runtime,
}

impl RouterThreads {
    fn end(self) {
        self.runtime.shutdown_timeout(THREADS_END);
        self.router.end();
    }
}

impl NativeRouter {
    /// Makes a router, and what ends it.
    pub(crate) fn start(
        name: &str,
        core: ServingCore,
    ) -> PyResult<(Self, impl FnOnce() + Send + use<>)> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()?;
        let router = ServerRouter::new(&ServerOptions::default(), models(name, core)?);
        let router = router.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let threads = Arc::new(Mutex::new(Some(RouterThreads { router, runtime })));
        let of_model = Arc::clone(&threads);
        let end = move || {
            let threads = lock(&of_model).take();
            threads.into_iter().for_each(RouterThreads::end);
        };
        Ok((Self(threads), end))
    }
}

/// A response on its way.
#[pyclass(frozen)]
pub(crate) struct NativeResponse {
    parts: Mutex<Receiver<ResponsePart>>,
    wake: Arc<WakeSlot>,
}

enum ResponsePart {
    Head(u16, Vec<(String, Vec<u8>)>),
    Data(Bytes),
}

type Head = (u16, Vec<(String, Vec<u8>)>);

#[pymethods]
impl NativeRouter {
    /// Begins to answer a request.
    fn request(
        &self,
        method: &str,
        target: &str,
        headers: Vec<(Vec<u8>, Vec<u8>)>,
        body: Vec<u8>,
    ) -> PyResult<NativeResponse> {
        let wrong = |what: &str| PyValueError::new_err(format!("the request has a wrong {what}"));
        let mut request = Request::new(Body::from(body));
        *request.method_mut() =
            Method::from_bytes(method.as_bytes()).map_err(|_| wrong("method"))?;
        *request.uri_mut() = target.parse::<Uri>().map_err(|_| wrong("target"))?;
        for (name, value) in headers {
            let name = HeaderName::from_bytes(&name).map_err(|_| wrong("header"))?;
            let value = HeaderValue::from_bytes(&value).map_err(|_| wrong("header"))?;
            request.headers_mut().append(name, value);
        }
        // The application has checked the host.
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("localhost"));
        let threads = lock(&self.0);
        let Some(RouterThreads { router, runtime }) = &*threads else {
            return Err(PyOSError::new_err("the model was closed"));
        };
        let router = router.router();
        let (sender, parts) = channel(UNREAD);
        let (slot, wake) = WakeSlot::new();
        runtime.spawn(async move {
            let Ok(response) = router.oneshot(request).await;
            let (head, mut body) = response.into_parts();
            let headers = head.headers.iter();
            let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().into()));
            let head = ResponsePart::Head(head.status.as_u16(), headers.collect());
            // An application that is gone drops the response, and so ends the answer.
            let mut is_open = sender.send(head).await.is_ok();
            wake();
            while is_open && let Some(Ok(frame)) = body.frame().await {
                let Ok(data) = frame.into_data() else { continue };
                is_open = sender.send(ResponsePart::Data(data)).await.is_ok();
                wake();
            }
            drop((sender, body));
            wake();
        });
        Ok(NativeResponse { parts: Mutex::new(parts), wake: slot })
    }
}

#[pymethods]
impl NativeResponse {
    /// The next part if it is there: (state, head, data), with the states "head", "data", "pending"
    /// and "end".
    fn try_next<'py>(
        &self,
        py: Python<'py>,
    ) -> (&'static str, Option<Head>, Option<Bound<'py, PyBytes>>) {
        match lock(&self.parts).try_recv() {
            Ok(ResponsePart::Head(status, headers)) => ("head", Some((status, headers)), None),
            Ok(ResponsePart::Data(data)) => ("data", None, Some(PyBytes::new(py, &data))),
            Err(TryRecvError::Empty) => ("pending", None, None),
            Err(TryRecvError::Disconnected) => ("end", None, None),
        }
    }

    /// Has a callable called when there is something to read.
    fn set_wake(&self, callback: Option<Py<PyAny>>) {
        self.wake.set(callback);
    }

    /// Ends the answer.
    fn close(&self) {
        self.wake.set(None);
        lock(&self.parts).close();
    }
}
