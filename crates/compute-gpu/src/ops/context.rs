//! Parts of the device that the encoder of an op reads and writes.

use moeflux_ops::{Error, KvFormat};

use super::super::{
    card::Card,
    kernel::Target,
    recorder::Recorder,
    store::{DeviceBuffer, Store},
};

/// Parts of the device that the encoding of an op uses.
pub(crate) struct OpContext<'a> {
    pub(crate) card: &'a Card,
    pub(crate) store: &'a mut Store,
    pub(crate) recorder: &'a mut Recorder,
    /// Exact path: f32 activations, results independent of batching.
    pub(crate) exact: bool,
}

impl OpContext<'_> {
    /// Features that kernels are written for.
    pub(crate) const fn target(&self) -> Target {
        self.recorder.target()
    }

    /// Maximum number of threads of a workgroup.
    pub(super) fn max_threads(&self) -> u32 {
        self.card.limits.max_compute_invocations_per_workgroup
    }

    /// Bytes of workgroup memory.
    pub(super) fn workgroup_bytes(&self) -> u32 {
        self.card.limits.max_compute_workgroup_storage_size
    }

    /// `HALF` of kernels: 1 if the KV cache is f16, two elements per word.
    pub(crate) fn kv_half(&self) -> u32 {
        (self.store.states.kv_format == KvFormat::F16).into()
    }

    /// Scratch of at least `len` f32 values, valid until the op is encoded.
    pub(super) fn scratch(&mut self, len: usize) -> Result<DeviceBuffer, Error> {
        let (buffer, replaced) = self.store.scratch(len as u64)?;
        self.recorder.forget_bindings(replaced);
        Ok(buffer)
    }
}
