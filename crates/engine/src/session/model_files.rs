//! Files of a model: their identity when it was opened, and how they are opened again.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use moeflux_base::Error;
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, CheckpointOptions, ModelId, RopeScaling},
};

use super::file_watch::FileWatch;
use crate::experts::{
    io::{PageCache, ReadOptions, Reader, open as open_reader, open_rows},
    row_batches::RowBatches,
    row_store::{ReopenedRows, RowStore},
    source::ExpertSource,
};

/// Wraps each reader of experts or of rows of tables that is opened. For tests that shuffle, delay
/// or fail reads.
pub type WrapReader = Box<dyn Fn(Box<dyn Reader>) -> Box<dyn Reader> + Send>;

/// Identities of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelIdentity {
    pub(crate) model: ModelId,
    /// Identity of the model in these very files.
    pub(crate) files: ModelId,
}

/// Files of a model, and the identity that they had when the model was opened.
pub(super) struct ModelOrigin {
    folder: PathBuf,
    options: CheckpointOptions,
    rope_scaling: Option<RopeScaling>,
    identity: OnceLock<ModelIdentity>,
    watch: Mutex<FileWatch>,
}

impl ModelOrigin {
    /// Origin of an open checkpoint. Reads its identity, unless its weights are still arriving: the
    /// samples would delay the first token.
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let origin = Self {
            folder: checkpoint.folder().into(),
            options: checkpoint.options(),
            rope_scaling: checkpoint.rope_scaling(),
            identity: OnceLock::new(),
            watch: Mutex::new(FileWatch::new(Arc::clone(checkpoint.files()))),
        };
        if origin.options.arriving.is_empty() {
            origin.identify(checkpoint)?;
        }
        Ok(origin)
    }

    /// The identity, if it has been read.
    pub(super) fn known_identity(&self) -> Option<&ModelIdentity> {
        self.identity.get()
    }

    /// The files as they are now.
    fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint::open_with(&self.folder, &self.options)?;
        if let Some(scaling) = self.rope_scaling {
            checkpoint.scale_rope(scaling)?;
        }
        Ok(checkpoint)
    }

    pub(super) fn watch(&self) -> MutexGuard<'_, FileWatch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn identity(&self) -> Result<ModelIdentity, Error> {
        match self.identity.get() {
            Some(identity) => Ok(*identity),
            None => self.identify(&self.checkpoint()?),
        }
    }

    /// Reads the identity from an opened checkpoint, and keeps it.
    fn identify(&self, checkpoint: &Checkpoint) -> Result<ModelIdentity, Error> {
        let model = checkpoint.identity()?;
        let files = checkpoint.identity_of_files(model);
        Ok(*self.identity.get_or_init(|| ModelIdentity { model, files }))
    }
}

/// Arguments to open the files of experts and of tables, and to reopen them after a disk was
/// detached: it may return as another device.
pub(super) struct ReopenArgs {
    pub(super) origin: Arc<ModelOrigin>,
    pub(super) reads: ReadOptions,
    pub(super) slots: usize,
    pub(super) pages: PageCache,
    pub(super) wrap_reader: Option<WrapReader>,
}

/// Files that were opened again, and their readers.
pub(super) struct ReopenedFiles {
    pub(super) source: Arc<ExpertSource>,
    pub(super) reader: Box<dyn Reader>,
    pub(super) rows: Option<ReopenedRows>,
    pub(super) watch: FileWatch,
}

impl ReopenArgs {
    /// Reader of experts.
    pub(super) fn reader(&self, source: &Arc<ExpertSource>) -> Result<Box<dyn Reader>, Error> {
        let reader = open_reader(source, &self.reads, self.slots, self.pages)?;
        Ok(self.wrap(reader))
    }

    /// Reader of batches of rows, for this number of slots.
    pub(super) fn row_reader(
        &self,
        batches: &Arc<RowBatches>,
        slots: usize,
    ) -> Result<Box<dyn Reader>, Error> {
        Ok(self.wrap(open_rows(batches, &self.reads, slots, self.pages)?))
    }

    fn wrap(&self, reader: Box<dyn Reader>) -> Box<dyn Reader> {
        match &self.wrap_reader {
            Some(wrap) => wrap(reader),
            None => reader,
        }
    }

    /// The files as they are now. `None` if they belong to another model, or an expert or a row has
    /// moved.
    pub(super) fn open(
        &self,
        previous: &ExpertSource,
        row_store: Option<&RowStore>,
    ) -> Result<Option<ReopenedFiles>, Error> {
        let checkpoint = self.origin.checkpoint()?;
        let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
        let source = ExpertSource::for_checkpoint(&checkpoint, &blueprint);
        let is_other = match self.origin.identity.get() {
            Some(identity) => checkpoint.identity()? != identity.model,
            None => false,
        };
        if is_other || source.layers() != previous.layers() {
            return Ok(None);
        }
        let open_rows = |batches: &Arc<RowBatches>, slots| self.row_reader(batches, slots);
        let rows = match row_store {
            Some(store) => match store.reopen(&checkpoint, &blueprint, &open_rows)? {
                Some(rows) => Some(rows),
                None => return Ok(None),
            },
            None => None,
        };
        let source = Arc::new(source);
        let watch = FileWatch::new(Arc::clone(checkpoint.files()));
        Ok(Some(ReopenedFiles { reader: self.reader(&source)?, source, rows, watch }))
    }
}
