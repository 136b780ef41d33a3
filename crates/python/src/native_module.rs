//! The extension module.

#[pyo3::pymodule]
mod _native {
    use std::{ffi::OsString, path::PathBuf, process::ExitCode, sync::Arc};

    use moeflux::runtime::{Adapter, Devices};
    use moeflux_binding::{LogReceiver, Waiting};
    use moeflux_cli::Invocation;
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::calls::NativeCancel;
    use crate::{calls::detached, gil_thread::run_later};

    #[pymodule_export]
    use crate::{
        arrays::FloatRows,
        model::NativeModel,
        request::NativeRequest,
        server::{NativeResponse, NativeRouter, NativeServer},
        session::{NativeMark, NativeSession, NativeSessionStream},
        tokenizer::NativeTokenizer,
    };

    /// Bytes of a size such as 8GiB.
    #[pyfunction]
    fn parse_size(text: &str) -> PyResult<u64> {
        moeflux_binding::parse_size(text).map_err(pyo3::exceptions::PyValueError::new_err)
    }

    /// Downloads a model of the Hub, and returns its folder.
    #[pyfunction]
    #[pyo3(signature = (name, revision=None, cancel=None, progress=None))]
    fn pull(
        py: Python<'_>,
        name: &str,
        revision: Option<&str>,
        cancel: Option<&NativeCancel>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PathBuf> {
        let cancel = cancel.map(|cancel| &cancel.0);
        let pull =
            |waiting: &mut Waiting<'_>| moeflux_binding::pull(name, revision, cancel, waiting);
        detached(py, progress.as_ref(), pull)
    }

    /// Name, kind, driver and bytes of memory of each graphics adapter.
    #[pyfunction]
    fn adapters(py: Python<'_>) -> Vec<(String, String, String, Option<u64>)> {
        let devices = py.detach(Devices::now);
        let adapter = |adapter: &Adapter| {
            let kind = format!("{:?}", adapter.kind).to_lowercase();
            (adapter.name.clone(), kind, adapter.driver.clone(), adapter.memory)
        };
        devices.adapters.iter().map(adapter).collect()
    }

    /// Has messages up to a level, from 1 (errors) to 5 (traces), passed to a callable with their
    /// level and text; None ends it.
    #[pyfunction]
    fn log_to(receiver: Option<Py<PyAny>>, level: i32) {
        let receiver = receiver.map(|receiver| -> LogReceiver {
            let receiver = Arc::new(receiver);
            Arc::new(move |level, message| {
                let (receiver, message) = (Arc::clone(&receiver), message.to_owned());
                run_later(move |py| {
                    // No one waits for its exception.
                    let _ = receiver.call1(py, (level, message));
                });
            })
        });
        moeflux_binding::log_to(level, receiver);
    }

    /// Runs the command line, which `program` starts, and returns its exit code.
    #[pyfunction]
    fn run_command(py: Python<'_>, program: Vec<OsString>, args: Vec<OsString>) -> u8 {
        let code = py.detach(|| moeflux_cli::run(Invocation { program, args }));
        (0..=u8::MAX).find(|n| ExitCode::from(*n) == code).unwrap_or(1)
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
