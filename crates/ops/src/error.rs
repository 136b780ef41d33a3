//! Errors of devices and ops.

pub use moeflux_base::DeviceError as Error;
