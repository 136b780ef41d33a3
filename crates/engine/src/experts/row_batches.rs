//! Batches of rows: the requests of a row store to a read queue.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use moeflux_base::Error;
use moeflux_model::{
    checkpoint::{RowTable, Segment},
    seam::DataFile,
};

/// Tables of rows, and the segments of the batches that are being read; shared by all threads.
#[derive(Debug)]
pub(crate) struct RowBatches {
    files: Arc<Vec<DataFile>>,
    /// Folders with copies of some of the files.
    mirrors: Vec<PathBuf>,
    tables: Vec<RowTable>,
    /// By slot: segments of the batch.
    segments: Mutex<Vec<Vec<Segment>>>,
}

impl RowBatches {
    /// Batches of up to `segments` segments each, one for each of `slots` slots.
    pub(crate) fn new(
        files: Arc<Vec<DataFile>>,
        mirrors: Vec<PathBuf>,
        tables: Vec<RowTable>,
        slots: usize,
        segments: usize,
    ) -> Self {
        let batches = (0..slots).map(|_| Vec::with_capacity(segments)).collect();
        Self { files, mirrors, tables, segments: Mutex::new(batches) }
    }

    pub(crate) fn files(&self) -> &Arc<Vec<DataFile>> {
        &self.files
    }

    pub(crate) fn mirrors(&self) -> &[PathBuf] {
        &self.mirrors
    }

    pub(crate) fn tables(&self) -> &[RowTable] {
        &self.tables
    }

    /// Bytes of the largest row of any table.
    pub(crate) fn row_bytes(&self) -> usize {
        self.tables.iter().map(RowTable::row_bytes).max().unwrap_or(0)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<Segment>>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the batch of a slot.
    pub(crate) fn set(&self, slot: usize, segments: impl Iterator<Item = Segment>) {
        if let Some(batch) = self.lock().get_mut(slot) {
            batch.clear();
            batch.extend(segments);
        }
    }

    /// Bytes of a batch.
    pub(crate) fn bytes(&self, slot: usize) -> Option<usize> {
        self.with_segments(slot, |segments| segments.iter().map(|s| s.bytes).sum())
    }

    /// Calls `f` with the segments of a batch.
    pub(crate) fn with_segments<T>(
        &self,
        slot: usize,
        f: impl FnOnce(&[Segment]) -> T,
    ) -> Option<T> {
        self.lock().get(slot).map(|segments| f(segments))
    }

    /// Error of a read at an offset of a file, with the tensor and the row.
    pub(crate) fn failure(
        &self,
        file: usize,
        offset: u64,
        path: &Path,
        source: &io::Error,
    ) -> Error {
        let shards = self.tables.iter().flat_map(|table| &table.shards);
        let found = shards.clone().find_map(|shard| {
            let offset = offset.checked_sub(shard.first.offset)?;
            let row = offset / shard.first.bytes.max(1) as u64;
            (shard.first.file as usize == file && row < shard.rows).then_some((shard, row))
        });
        match found {
            Some((shard, row)) => Error::Tensor {
                tensor: shard.name.clone(),
                path: path.into(),
                problem: format!("row {row} at byte {offset} cannot be read: {source}"),
            },
            None => Error::Tensor {
                tensor: "scales of rows".into(),
                path: path.into(),
                problem: format!("the scale at byte {offset} cannot be read: {source}"),
            },
        }
    }
}
