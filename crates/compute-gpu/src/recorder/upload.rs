//! Upload ring: small data of ops (tokens, expert lists, RoPE tables), written before submission.

use std::collections::VecDeque;

use moeflux_ops::{Error, ROPE_AXES, RopePositions};

use super::recorder::Recorder;
use crate::store::DeviceBuffer;

/// Words of the upload buffer.
pub(crate) const UPLOAD_WORDS: usize = 1 << 20;
/// RoPE tables that are remembered; the layers of a step share few.
const MAX_ANGLE_TABLES: usize = 8;

/// Offset in the upload buffer, in words.
pub(crate) type UploadOffset = u32;

/// RoPE table in the upload buffer, with the arguments that it was computed from.
struct AngleTable {
    frequencies: Vec<f32>,
    scale: f32,
    positions: TablePositions,
    offset: UploadOffset,
}

/// Positions of the rows of a table.
enum TablePositions {
    /// First position and rows of each span.
    Spans(Vec<(usize, usize)>),
    Axes(Vec<u8>, Vec<[u32; ROPE_AXES]>),
}

impl TablePositions {
    fn new(positions: RopePositions<'_>) -> Self {
        match positions {
            RopePositions::Spans(spans) => {
                Self::Spans(spans.iter().map(|s| (s.position, s.rows)).collect())
            }
            RopePositions::Axes { axes, ids } => Self::Axes(axes.to_vec(), ids.to_vec()),
        }
    }

    fn is_same(&self, positions: RopePositions<'_>) -> bool {
        match (self, positions) {
            (Self::Spans(own), RopePositions::Spans(spans)) => {
                own.iter().copied().eq(spans.iter().map(|s| (s.position, s.rows)))
            }
            (Self::Axes(own, rows), RopePositions::Axes { axes, ids }) => {
                own == axes && rows == ids
            }
            _ => false,
        }
    }
}

/// Upload buffer and its contents on the host.
pub(super) struct UploadRing {
    words: Vec<u32>,
    /// Words that have been written to the buffer.
    sent: usize,
    buffer: DeviceBuffer,
    /// RoPE tables among the words.
    angle_tables: VecDeque<AngleTable>,
}

impl UploadRing {
    pub(super) fn new(buffer: DeviceBuffer) -> Self {
        Self {
            words: Vec::with_capacity(UPLOAD_WORDS),
            sent: 0,
            buffer,
            angle_tables: VecDeque::new(),
        }
    }

    /// Writes new words to the buffer, before the next submission.
    pub(super) fn write(&mut self, queue: &wgpu::Queue) {
        if self.sent < self.words.len() {
            let new = bytemuck::cast_slice(&self.words[self.sent..]);
            queue.write_buffer(&self.buffer.raw, self.sent as u64 * 4, new);
            self.sent = self.words.len();
        }
    }
}

impl Recorder {
    /// The upload buffer.
    pub(crate) const fn upload_buffer(&self) -> &DeviceBuffer {
        &self.upload.buffer
    }

    /// Reserves `count` consecutive words for an op. Submits recorded work and starts over at
    /// offset 0 if the buffer is full.
    pub(crate) fn reserve_upload(&mut self, count: usize) -> Result<(), Error> {
        if count > UPLOAD_WORDS {
            return Err(Error::Shape(format!(
                "an op uploads {count} words, more than the maximum of {UPLOAD_WORDS}"
            )));
        }
        if !self.has_upload_room(count) {
            if self.recording.is_some() {
                return Err(Error::Shape(format!(
                    "{count} more words do not fit into the upload of a step recorded ahead"
                )));
            }
            self.submit();
            // Later writes to the buffer are ordered after everything submitted.
            self.upload.words.clear();
            self.upload.angle_tables.clear();
            self.upload.sent = 0;
        }
        Ok(())
    }

    /// Whether `count` more words fit into the upload buffer.
    pub(crate) fn has_upload_room(&self, count: usize) -> bool {
        self.upload.words.len() + count <= UPLOAD_WORDS
    }

    /// Appends words to the upload buffer, after [`Recorder::reserve_upload`].
    pub(crate) fn upload(&mut self, words: impl IntoIterator<Item = u32>) -> UploadOffset {
        let offset = self.upload.words.len();
        self.upload.words.extend(words);
        debug_assert!(self.upload.words.len() <= UPLOAD_WORDS);
        offset as u32
    }

    /// Replaces words of the upload buffer, to be written again by the next submission. Returns
    /// false if they are outside of it.
    pub(crate) fn replace_upload(&mut self, offset: UploadOffset, words: &[u32]) -> bool {
        let offset = offset as usize;
        let Some(dst) = self.upload.words.get_mut(offset..offset + words.len()) else {
            return false;
        };
        dst.copy_from_slice(words);
        // A readback in between may have sent the old words.
        self.upload.sent = self.upload.sent.min(offset);
        true
    }

    /// Offset of the RoPE table in the upload buffer: by row, then by pair, cosine and sine times
    /// `scale`.
    ///
    /// The host computes the table: its range reduction is exact at any position, and the layers of
    /// a step share one table.
    pub(crate) fn angle_table(
        &mut self,
        frequencies: &[f32],
        scale: f32,
        positions: RopePositions<'_>,
    ) -> Result<UploadOffset, Error> {
        let same = |table: &AngleTable| {
            table.positions.is_same(positions)
                && table.scale == scale
                && table.frequencies == frequencies
        };
        if let Some(found) = self.upload.angle_tables.iter().rev().find(|table| same(table)) {
            return Ok(found.offset);
        }
        let rows = match positions {
            RopePositions::Spans(spans) => spans.iter().map(|s| s.rows).sum(),
            RopePositions::Axes { ids, .. } => ids.len(),
        };
        let words = (0..rows).flat_map(|row| {
            let ids = positions.ids(row);
            frequencies.iter().enumerate().flat_map(move |(pair, f)| {
                let (sin, cos) = f64::from(ids[positions.axis(pair)] * f).sin_cos();
                [(cos as f32 * scale).to_bits(), (sin as f32 * scale).to_bits()]
            })
        });
        self.reserve_upload(rows * frequencies.len() * 2)?;
        let offset = self.upload(words);
        if self.upload.angle_tables.len() >= MAX_ANGLE_TABLES {
            self.upload.angle_tables.pop_front();
        }
        self.upload.angle_tables.push_back(AngleTable {
            frequencies: frequencies.to_vec(),
            scale,
            positions: TablePositions::new(positions),
            offset,
        });
        Ok(offset)
    }
}
