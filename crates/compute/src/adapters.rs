//! Graphics adapters of a build without the GPU device.

use moeflux_ops::Adapter;

/// Graphics adapters of this machine: none, as this build has no GPU device.
pub fn adapters() -> Vec<Adapter> {
    Vec::new()
}
