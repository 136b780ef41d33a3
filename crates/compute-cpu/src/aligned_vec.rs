//! Growable scratch memory, aligned to cache lines.

use std::{
    io::ErrorKind::OutOfMemory,
    ops::{Deref, DerefMut},
};

use moeflux_ops::Error;

/// Bytes of a cache line, and of the widest SIMD vector.
const CACHE_LINE: usize = 64;

/// Growable vector whose first element is at the start of a cache line. A SIMD load that crosses a
/// line boundary takes two accesses.
#[derive(Default)]
pub(crate) struct AlignedVec<T> {
    elements: Vec<T>,
    /// Index of the first aligned element.
    first: usize,
}

impl<T: Copy + Default> AlignedVec<T> {
    /// Bytes of memory for `len` elements.
    pub(crate) const fn memory(len: usize) -> usize {
        len * size_of::<T>() + CACHE_LINE
    }

    /// Grows to at least `len` elements. The contents are not preserved.
    pub(crate) fn grow(&mut self, len: usize) -> Result<(), Error> {
        if len > self.len() {
            let spare = CACHE_LINE / size_of::<T>();
            grow(&mut self.elements, len + spare)?;
            // The allocation is aligned to at least `T`, so an aligned element exists.
            self.first = self.elements.as_ptr().align_offset(CACHE_LINE).min(spare);
        }
        Ok(())
    }
}

impl<T> Deref for AlignedVec<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.elements[self.first..]
    }
}

impl<T> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.elements[self.first..]
    }
}

/// Grows a vector to at least `len` elements.
pub(crate) fn grow<T: Clone + Default>(vec: &mut Vec<T>, len: usize) -> Result<(), Error> {
    if let Some(additional) = len.checked_sub(vec.len()) {
        let memory =
            |_| Error::Memory { bytes: (len * size_of::<T>()) as u64, source: OutOfMemory.into() };
        vec.try_reserve_exact(additional).map_err(memory)?;
        vec.resize(len, T::default());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_is_at_the_start_of_a_cache_line() {
        let mut vec = AlignedVec::<f32>::default();
        for len in [0, 1, 15, 1000, 999, 70_001] {
            vec.grow(len).unwrap();
            let aligned = vec.as_ptr().addr().is_multiple_of(CACHE_LINE);
            assert!(vec.len() >= len && (len == 0 || aligned), "{len}");
        }
        vec[70_000] = 1.0;
    }
}
