//! Values of a buffer in the host's memory.

use crate::{error::Error, matrix::Bytes};

/// f32 values in page-aligned anonymous memory. Untouched pages cost address space only.
#[derive(Debug, Default)]
pub(crate) struct HostValues(pub(super) Bytes);

impl HostValues {
    #[inline]
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        let bytes =
            len.checked_mul(4).ok_or_else(|| Error::Shape(format!("{len} values are too many")))?;
        Ok(Self(Bytes::zeroed(bytes)?))
    }
}

impl std::ops::Deref for HostValues {
    type Target = [f32];
    #[inline]
    fn deref(&self) -> &[f32] {
        // Pages are aligned, so the cast fails only for memory of no bytes.
        bytemuck::try_cast_slice(&self.0).unwrap_or(&[])
    }
}

impl std::ops::DerefMut for HostValues {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::try_cast_slice_mut(&mut self.0).unwrap_or(&mut [])
    }
}
