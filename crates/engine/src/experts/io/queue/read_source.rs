//! Contents of a read queue: experts of layers, or batches of rows.

use std::{io, path::Path, sync::Arc};

use moeflux_base::Error;
use moeflux_model::seam::DataFile;

use super::{read_queue::PendingRequest, split::split};
use crate::experts::{
    io::{reader::ReadRequest, transfer::ReadRange},
    row_batches::RowBatches,
    source::ExpertSource,
};

/// Locations of what a read queue reads. A request names a record by a layer and an index: an
/// expert, or a batch of rows.
#[derive(Clone)]
pub(in crate::experts::io) enum ReadSource {
    Experts(Arc<ExpertSource>),
    Rows(Arc<RowBatches>),
}

/// Bytes of a record.
#[derive(Clone, Copy)]
pub(super) struct RecordBytes {
    pub(super) in_file: usize,
    pub(super) in_memory: usize,
}

impl ReadSource {
    pub(in crate::experts::io) fn files(&self) -> &Arc<Vec<DataFile>> {
        match self {
            Self::Experts(source) => source.files(),
            Self::Rows(rows) => rows.files(),
        }
    }

    /// Bytes of a record; `None` if there is none.
    pub(super) fn record(&self, layer: usize, index: usize) -> Option<RecordBytes> {
        match self {
            Self::Experts(source) => {
                let experts = source.layer(layer).filter(|l| index < l.count)?;
                Some(RecordBytes { in_file: experts.file_bytes, in_memory: experts.slot_bytes })
            }
            Self::Rows(rows) => {
                let bytes = rows.bytes(index)?;
                Some(RecordBytes { in_file: bytes, in_memory: bytes })
            }
        }
    }

    /// Most bytes of a contiguous part of a record.
    pub(in crate::experts::io) fn largest_part(&self) -> usize {
        match self {
            Self::Experts(source) => {
                source.layers().iter().flatten().map(|l| l.file_bytes).max().unwrap_or(0)
            }
            Self::Rows(rows) => rows.row_bytes(),
        }
    }

    /// Whether records were read before, by layer and index; empty where it does not matter.
    pub(super) fn never_read(&self) -> Vec<Vec<bool>> {
        match self {
            Self::Experts(source) => {
                let counts = source.layers().iter().map(|l| l.as_ref().map_or(0, |l| l.count));
                counts.map(|count| vec![false; count]).collect()
            }
            Self::Rows(_) => Vec::new(),
        }
    }

    /// Whether a layer's records need [`ExpertSource::finish`].
    pub(super) fn needs_finish(&self, layer: usize) -> Option<&Arc<ExpertSource>> {
        match self {
            Self::Experts(source) => Some(source).filter(|source| source.needs_finish(layer)),
            Self::Rows(_) => None,
        }
    }

    /// Splits the next read off a request, `max_bytes` at most.
    pub(super) fn split(
        &self,
        pending: &mut PendingRequest,
        max_bytes: usize,
    ) -> Option<ReadRange> {
        let ReadRequest { layer, expert: index, .. } = pending.request;
        match self {
            Self::Experts(source) => {
                split(pending, source.layer(layer)?.segments(index), max_bytes)
            }
            Self::Rows(rows) => rows
                .with_segments(index, |all| split(pending, all.iter().copied(), max_bytes))
                .flatten(),
        }
    }

    /// The error of a read that failed for good.
    pub(super) fn failure(
        &self,
        layer: usize,
        index: usize,
        range: &ReadRange,
        path: &Path,
        source: io::Error,
    ) -> Error {
        let &ReadRange { file, offset, bytes, .. } = range;
        match self {
            Self::Experts(_) => {
                let path = path.into();
                Error::Expert { layer, expert: index, path, offset, bytes, source }
            }
            Self::Rows(rows) => rows.failure(file, offset, path, &source),
        }
    }
}
