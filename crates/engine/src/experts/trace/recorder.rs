//! Writing a trace while a model runs.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use super::{MAGIC, TraceHeader, VERSION};
use crate::base::error::Error;

/// Writes steps as they are finished. Holds one step, and allocates nothing once it is made.
pub(crate) struct Recorder {
    path: PathBuf,
    file: File,
    /// Bytes of the file: of its header and all finished steps.
    written: u64,
    step: Vec<u8>,
}

impl Recorder {
    /// Begins a file with a header.
    pub(crate) fn create(path: &Path, header: &TraceHeader) -> Result<Self, Error> {
        if let Some(problem) = header.problem() {
            return Err(Error::Input(format!(
                "the routing of this model cannot be recorded: {problem}"
            )));
        }
        let json = serde_json::to_vec(header).map_err(|e| {
            Error::Input(format!("the header of a routing trace cannot be written: {e}"))
        })?;
        let mut start = MAGIC.to_vec();
        start.extend(VERSION.to_le_bytes());
        start.extend((json.len() as u32).to_le_bytes());
        start.extend(json);
        let failed = || Error::file(path, "cannot write the routing trace");
        let mut file = File::create(path).map_err(failed())?;
        file.write_all(&start).map_err(failed())?;
        let most = 4 + header.layers.iter().map(|l| 2 + 2 * l.experts).sum::<usize>();
        Ok(Self {
            path: path.into(),
            file,
            written: start.len() as u64,
            step: Vec::with_capacity(most),
        })
    }

    /// A step begins; what was noted of one that did not end is dropped.
    pub(crate) fn begin(&mut self, rows: usize) {
        self.step.clear();
        self.step.extend((rows as u32).to_le_bytes());
    }

    /// The experts that the next layer needs, ascending.
    pub(crate) fn layer(&mut self, ids: impl ExactSizeIterator<Item = usize>) {
        self.step.extend((ids.len() as u16).to_le_bytes());
        self.step.extend(ids.flat_map(|id| (id as u16).to_le_bytes()));
    }

    /// The step is finished.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        if let Err(error) = self.file.write_all(&self.step) {
            // Half a step would make those after it unreadable. If this fails too, readers will say so.
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
