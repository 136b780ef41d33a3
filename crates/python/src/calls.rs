//! Calls that wait without the GIL, and look for signals meanwhile.

use std::time::{Duration, Instant};

use moeflux_binding::{Cancel, Fault, Waiting};
use pyo3::prelude::*;

use crate::errors::exception;

/// Least time between two reports of progress.
const REPORT: Duration = Duration::from_millis(50);

/// Ends calls from another thread.
#[pyclass(frozen)]
#[derive(Default)]
pub(crate) struct NativeCancel(pub(crate) Cancel);

#[pymethods]
impl NativeCancel {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn set(&self) {
        self.0.set();
    }

    fn reset(&self) {
        self.0.reset();
    }

    fn is_set(&self) -> bool {
        self.0.is_set()
    }
}

/// Result of `call`, which waits without the GIL. Signals are handled meanwhile, and `progress` is
/// called with the share that is done; their exceptions end the call.
///
/// # Errors
/// The exception, or the error of `call`.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    progress: Option<&Py<PyAny>>,
    call: impl FnOnce(&mut Waiting<'_>) -> Result<T, Fault> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let slot = &mut raised;
    let result = py.detach(move || {
        let mut last = Instant::now();
        let mut waiting = |share: f64| {
            Python::attach(|py| {
                py.check_signals()?;
                if let Some(progress) = progress
                    && last.elapsed() >= REPORT
                {
                    last = Instant::now();
                    progress.call1(py, (share,))?;
                }
                Ok(())
            })
            .map_err(|error: PyErr| {
                *slot = Some(error);
                Fault::Interrupted
            })
        };
        call(&mut waiting)
    });
    match raised {
        Some(error) => Err(error),
        None => result.map_err(|fault| exception(py, &fault)),
    }
}

/// Value of JSON options.
///
/// # Errors
/// ValueError: an option has no meaning.
pub(crate) fn parsed<T: serde::de::DeserializeOwned>(json: &str) -> PyResult<T> {
    serde_json::from_str(json)
        .map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))
}
