//! Errors of the library as exceptions of the package.

use moeflux_binding::{Fault, FaultDetails};
use pyo3::{prelude::*, types::PyDict};

/// The exception of a fault: made by `moeflux._errors`.
pub(crate) fn exception(py: Python<'_>, fault: &Fault) -> PyErr {
    made(py, fault).map_or_else(|error| error, PyErr::from_value)
}

fn made<'py>(py: Python<'py>, fault: &Fault) -> PyResult<Bound<'py, PyAny>> {
    let FaultDetails { path, errno, tensor, floor, expert, reason, .. } = fault.details();
    let details = PyDict::new(py);
    details.set_item("path", path)?;
    details.set_item("errno", errno)?;
    details.set_item("tensor", tensor)?;
    details.set_item("floor", floor)?;
    details.set_item("layer", expert.map(|(layer, _)| layer))?;
    details.set_item("expert", expert.map(|(_, expert)| expert))?;
    details.set_item("reason", reason)?;
    let errors = py.import("moeflux._errors")?;
    errors.call_method1("made", (fault.kind().name(), fault.message(), details))
}
