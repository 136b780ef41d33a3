//! Trace recorder: writes the routing of each finished step to a file.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use moeflux_base::{Error, ToolError, seam::create};

use super::trace::{MAGIC, TraceHeader, VERSION};

/// Writes finished steps. Buffers one step, and allocates nothing after construction.
pub(crate) struct TraceRecorder {
    path: PathBuf,
    file: File,
    /// Bytes of the file: header and all finished steps.
    written: u64,
    step: Vec<u8>,
}

impl TraceRecorder {
    /// Creates a file with a header.
    pub(crate) fn create(path: &Path, header: &TraceHeader) -> Result<Self, Error> {
        if let Some(problem) = header.problem() {
            return Err(ToolError::Routing { problem }.into());
        }
        let json = serde_json::to_vec(header).map_err(|e| {
            Error::internal(format!("the header of a routing trace cannot be written: {e}"))
        })?;
        let mut start = MAGIC.to_vec();
        start.extend(VERSION.to_le_bytes());
        start.extend((json.len() as u32).to_le_bytes());
        start.extend(json);
        let failed = || Error::file(path, "cannot write the routing trace");
        let mut file = create(path).map_err(failed())?;
        file.write_all(&start).map_err(failed())?;
        let max_bytes = 4 + header.layers.iter().map(|l| 2 + 2 * l.experts).sum::<usize>();
        Ok(Self {
            path: path.into(),
            file,
            written: start.len() as u64,
            step: Vec::with_capacity(max_bytes),
        })
    }

    /// Starts a step and drops an unfinished one.
    pub(crate) fn start_step(&mut self, rows: usize) {
        self.step.clear();
        self.step.extend((rows as u32).to_le_bytes());
    }

    /// Appends the experts that the next layer needs, in ascending order.
    pub(crate) fn record_layer(&mut self, ids: impl ExactSizeIterator<Item = usize>) {
        self.step.extend((ids.len() as u16).to_le_bytes());
        self.step.extend(ids.flat_map(|id| (id as u16).to_le_bytes()));
    }

    /// Writes the finished step.
    pub(crate) fn finish_step(&mut self) -> Result<(), Error> {
        if let Err(error) = self.file.write_all(&self.step) {
            // Part of a step would make all later ones unreadable. If truncating fails, readers
            // report the damage.
            let _ = self.file.set_len(self.written);
            let _ = self.file.seek(SeekFrom::Start(self.written));
            return Err(Error::file(
                &self.path,
                "cannot write the routing trace; is the disk full?",
            )(error));
        }
        self.written += self.step.len() as u64;
        Ok(())
    }
}
