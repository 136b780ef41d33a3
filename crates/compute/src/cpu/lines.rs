//! Memory that grows, for what vectors are loaded from.

use std::{
    io::ErrorKind::OutOfMemory,
    ops::{Deref, DerefMut},
};

use crate::Error;

/// Bytes of a line of the cache, and of the longest vector.
const LINE: usize = 64;

/// Numbers of which the first is the first of a line of the cache: a vector that two lines have a part of takes two loads.
#[derive(Default)]
pub(crate) struct Lines<T> {
    all: Vec<T>,
    first: usize,
}

impl<T: Copy + Default> Lines<T> {
    /// Bytes of memory that so many numbers take.
    pub(crate) const fn memory(len: usize) -> usize {
        len * size_of::<T>() + LINE
    }

    /// Makes room for `len` numbers at least, which are not kept.
    pub(crate) fn grow(&mut self, len: usize) -> Result<(), Error> {
        if len > self.len() {
            let spare = LINE / size_of::<T>();
            grow(&mut self.all, len + spare)?;
            // The system's alignment is that of the type at least, so that there is such a number.
            self.first = self.all.as_ptr().align_offset(LINE).min(spare);
        }
        Ok(())
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.all[self.first..]
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.all[self.first..]
    }
}

/// Makes a vector at least `len` long.
pub(crate) fn grow<T: Clone + Default>(all: &mut Vec<T>, len: usize) -> Result<(), Error> {
    if let Some(more) = len.checked_sub(all.len()) {
        let memory =
            |_| Error::Memory { bytes: (len * size_of::<T>()) as u64, source: OutOfMemory.into() };
        all.try_reserve_exact(more).map_err(memory)?;
        all.resize(len, T::default());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_is_the_first_of_a_line() {
        let mut lines = Lines::<f32>::default();
        for len in [0, 1, 15, 1000, 999, 70_001] {
            lines.grow(len).unwrap();
            assert!(
                lines.len() >= len && (len == 0 || lines.as_ptr().addr().is_multiple_of(LINE)),
                "{len}"
            );
        }
        lines[70_000] = 1.0;
    }
}
