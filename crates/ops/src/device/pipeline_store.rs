//! Storage for compiled GPU kernels.

use std::fmt;

/// Keeps compiled GPU kernels between processes: compiling one takes a driver 20 to 600 ms.
///
/// The contents are a hint. They may be lost, damaged, or replaced by another process at any time;
/// missing kernels are compiled again. The device detects accidental damage. It cannot detect
/// forgery, and drivers execute what they are given, so only the user may be able to write them.
pub trait PipelineStore: fmt::Debug + Send + Sync {
    /// The contents last saved under `name`: letters, digits, `_` and `-`. `None` if there are
    /// none, if they cannot be read, or if they have more than `limit` bytes.
    fn load(&self, name: &str, limit: usize) -> Option<Vec<u8>>;

    /// Replaces the contents of `name`. Called on a thread of the device, and when the device is
    /// dropped.
    fn save(&self, name: &str, contents: &[u8]);
}
