//! Writer of safetensors files whose rows arrive one by one, as logits do.

use std::{
    collections::BTreeMap,
    io::{Seek, SeekFrom, Write},
    path::Path,
};

use anyhow::Context;
use moeflux::base::Readers;
use serde::Serialize;

use crate::atomic_file::AtomicFile;

/// Entry of the header.
#[derive(Debug, Serialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Tensor that the header announces, of 4-byte elements. Rows are along its first dimension.
pub(crate) struct PlannedTensor {
    pub(crate) name: String,
    /// `F32` or `I32`.
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
}

/// Location of a tensor in the file.
#[derive(Clone, Copy, Debug)]
struct TensorLocation {
    offset: u64,
    row_bytes: u64,
}

/// A file being written.
pub(crate) struct TensorWriter {
    file: AtomicFile,
    /// Location of each tensor by name.
    locations: BTreeMap<String, TensorLocation>,
    buffer: Vec<u8>,
}

impl TensorWriter {
    /// Creates the file, so that a folder that cannot be written is reported before anything is
    /// computed.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(crate) fn create(target: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            file: AtomicFile::create(target, Readers::Umask)?,
            locations: BTreeMap::new(),
            buffer: Vec::new(),
        })
    }

    /// Writes the header. The tensors follow it in order, without gaps.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn header(&mut self, tensors: &[PlannedTensor]) -> anyhow::Result<()> {
        let mut entries = serde_json::Map::new();
        let mut end = 0;
        for t in tensors {
            let shape: Vec<u64> = t.shape.iter().map(|side| *side as u64).collect();
            let row = shape.iter().skip(1).product::<u64>() * 4;
            let from = end;
            end += shape.first().unwrap_or(&0) * row;
            self.locations.insert(t.name.clone(), TensorLocation { offset: from, row_bytes: row });
            let entry = HeaderEntry { dtype: t.dtype.into(), shape, data_offsets: (from, end) };
            entries.insert(t.name.clone(), serde_json::to_value(entry)?);
        }
        let mut header = serde_json::to_vec(&entries)?;
        // Padding aligns the data.
        header.resize(header.len().next_multiple_of(8), b' ');
        let data = 8 + header.len() as u64;
        self.locations.values_mut().for_each(|location| location.offset += data);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        self.file.file().write_all(&bytes).with_context(|| self.file.failed())
    }

    /// Writes rows of a tensor, starting at row `first`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn rows(
        &mut self,
        name: &str,
        first: usize,
        words: impl Iterator<Item = [u8; 4]>,
    ) -> anyhow::Result<()> {
        let TensorLocation { offset, row_bytes } =
            *self.locations.get(name).with_context(|| format!("{name} was not planned"))?;
        self.buffer.clear();
        self.buffer.extend(words.flatten());
        let write = || {
            self.file.file().seek(SeekFrom::Start(offset + first as u64 * row_bytes))?;
            self.file.file().write_all(&self.buffer)
        };
        write().with_context(|| self.file.failed())
    }

    /// Current path: a temporary name until [`finish`](Self::finish).
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Renames the file to its target.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.file.finish()
    }
}
