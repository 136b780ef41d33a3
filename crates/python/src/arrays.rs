//! Rows of floats that numpy views without a copy, by `__array_interface__`.

use std::sync::Arc;

use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

/// Floats that no one changes while this exists.
#[pyclass(frozen)]
pub(crate) struct FloatRows {
    values: Arc<Vec<f32>>,
    shape: Vec<usize>,
}

impl FloatRows {
    /// One row.
    pub(crate) fn row(values: Arc<Vec<f32>>) -> Self {
        Self { shape: vec![values.len()], values }
    }

    /// Rows of `width` values.
    pub(crate) fn rows(values: Vec<f32>, width: usize) -> Self {
        let rows = values.len().checked_div(width).unwrap_or(0);
        Self { shape: vec![rows, width], values: Arc::new(values) }
    }
}

#[pymethods]
impl FloatRows {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface
            .set_item("typestr", if cfg!(target_endian = "little") { "<f4" } else { ">f4" })?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        // The address, and that it is read-only.
        interface.set_item("data", (self.values.as_ptr() as usize, true))?;
        Ok(interface)
    }
}
