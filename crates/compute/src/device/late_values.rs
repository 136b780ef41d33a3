//! Values that the host still computes while a device records the ops that read them.

/// Waits for values and passes all of them to its argument, once. Does not call it if they could
/// not be computed: the caller of [`Device::write_late`](crate::Device::write_late) reports that.
pub type LateValues = Box<dyn FnOnce(&mut dyn FnMut(&[f32])) + Send>;
