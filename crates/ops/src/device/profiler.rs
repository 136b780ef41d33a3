//! Measurements: command counters, kernel times and memory bandwidth.

use crate::error::Error;

/// Commands that a device has executed since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels dispatched on a GPU.
    pub dispatches: u64,
    /// Command buffers submitted.
    pub submissions: u64,
    /// Blocking waits of the host for the device.
    pub waits: u64,
    /// Total duration of these waits, in nanoseconds.
    pub waited_ns: u64,
    /// Kernels that were compiled, or are being compiled.
    pub kernels: u64,
    /// Total duration of waits for kernels to be compiled, in nanoseconds.
    pub compiling_ns: u64,
}

/// Time that the dispatches of one kernel took on a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Number of dispatches.
    pub dispatches: u64,
    /// Sum of the dispatches' durations on the GPU, each from its start to its end.
    pub seconds: f64,
}

/// Counts and times the work of a device. The defaults suit devices without kernels.
pub trait Profiler {
    /// Returns the counters of a GPU; zero on other devices.
    fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Turns kernel timing on or off. Returns the times since it was turned on or since the last
    /// call, the longest first; always empty on devices without kernels.
    ///
    /// Timing slows down what is measured: dispatches no longer follow each other closely.
    fn profile(&mut self, on: bool) -> Result<Vec<KernelTime>, Error> {
        let _ = on;
        Ok(Vec::new())
    }

    /// Measures the best read bandwidth of GPU kernels, in bytes per second, over 512 MiB of
    /// memory, or less where the memory is small or slow. `None` for devices that use host memory.
    fn read_speed(&mut self) -> Result<Option<f64>, Error> {
        Ok(None)
    }
}
