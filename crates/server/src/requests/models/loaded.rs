//! A loaded model with the state of its answers.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use moeflux::{
    Error, Sampling, StepControl,
    runtime::{CancelToken, ImageRows},
    serve::ServingCore,
    text::{MaskSource, MessageImage, PlacedImage, Text},
    vision::{ImageEncoder, PreparedImage},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::models::LoadedModel;
use crate::{
    requests::{
        answer_head::AnswerHead,
        counters::RequestCounters,
        fim::FimTokens,
        form::FormRules,
        images::{ImageDigest, ImageTable, PromptFile, ReadImage, ResolvedImages, SentImage},
        latency::Latencies,
        overflow::Overflow,
        turn_folder::TurnFolder,
        turns::TurnMemory,
    },
    transport::{
        error::ApiError, ids, server_error::ServerError, unix_time::now, work::is_cancelled,
    },
};

/// State of the server that answers of all models share.
#[derive(Clone, Default)]
pub(crate) struct AnswerOptions {
    /// Masks of all answers.
    pub(crate) masks: Vec<Arc<dyn MaskSource>>,
    /// Rule for a prompt over the context, unless its request says it.
    pub(crate) overflow: Overflow,
    /// Rules of schemas.
    pub(crate) forms: FormRules,
    pub(crate) latencies: Arc<Latencies>,
    pub(crate) counters: Arc<RequestCounters>,
}

/// Maximum number of images that are known by their files.
const KNOWN_IMAGES: usize = 256;

/// Bytes in which room for rows of images is counted.
const ROOM_UNIT: u64 = 1 << 10;

fn room_units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(ROOM_UNIT)).unwrap_or(u32::MAX)
}

/// Image of a file that was read before.
struct KnownImage {
    file: ImageDigest,
    read: ReadImage,
}

/// Images that were read before.
#[derive(Default)]
struct KnownImages {
    /// The one that was used last is the last.
    files: VecDeque<KnownImage>,
    /// The last one that was decoded, until the tower takes it.
    last: Option<Arc<PreparedImage>>,
}

impl KnownImages {
    /// Image of this file.
    fn find(&mut self, file: &ImageDigest) -> Option<ReadImage> {
        let index = self.files.iter().position(|known| known.file == *file)?;
        let known = self.files.remove(index)?;
        let read = known.read.clone();
        self.files.push_back(known);
        Some(read)
    }

    /// Adds an image, in place of the one that was not used for the longest time.
    fn add(&mut self, known: KnownImage) {
        if self.files.len() == KNOWN_IMAGES {
            self.files.pop_front();
        }
        self.files.push_back(known);
    }
}

/// A model that answers.
pub(crate) struct ServedModel {
    pub(crate) core: ServingCore,
    /// Whether the core outlives the server.
    is_shared: bool,
    /// Its name in answers.
    pub(crate) name: String,
    /// Sampling of requests that do not say theirs, in place of the checkpoint's.
    sampling: Option<Sampling>,
    /// Answers for the next turns.
    pub(crate) turns: Arc<TurnMemory>,
    /// Speed of the disk as it was measured, in bytes per second.
    pub(crate) disk_speed: Option<f64>,
    /// Images that were read: clients send all of a conversation with each question.
    known_images: Mutex<KnownImages>,
    /// Held while an image is decoded, which takes up to some hundred MiB.
    decoding: Mutex<()>,
    /// Held while the vision tower computes an image.
    tower: Arc<Semaphore>,
    /// Room for the rows of images of prompts that are not computed yet, in [`ROOM_UNIT`]s.
    row_room: Arc<Semaphore>,
    pub(crate) options: AnswerOptions,
}

impl ServedModel {
    /// The model with the state of its answers.
    ///
    /// # Errors
    /// It has no tokenizer, or its folder of answers cannot be opened.
    pub(super) fn new(
        name: &str,
        loaded: LoadedModel,
        options: AnswerOptions,
    ) -> Result<Self, ServerError> {
        let LoadedModel { core, sampling, is_shared, disk_speed, .. } = loaded;
        let LoadedModel { turn_folder, turn_bytes, notices, .. } = loaded;
        core.engine().text()?.tokenizer().cancel_when(is_cancelled);
        let open = |path: PathBuf| {
            let failed = |source| ServerError::TurnFolder { path: path.clone(), source };
            TurnFolder::open(path.clone(), turn_bytes, notices).map_err(failed)
        };
        let turn_folder = turn_folder.map(open).transpose()?;
        // Without a folder, all turns are of this model.
        let model = match &turn_folder {
            Some(_) => core.engine().model()?.to_string(),
            None => String::new(),
        };
        let turns = Arc::new(TurnMemory::new(model, turn_folder));
        let context = core.engine().plan().context;
        let row_room = core.engine().images().map_or(0, |images| images.row_room(context));
        Ok(Self {
            core,
            is_shared,
            name: name.to_owned(),
            sampling,
            turns,
            disk_speed,
            known_images: Mutex::default(),
            decoding: Mutex::default(),
            tower: Arc::new(Semaphore::new(1)),
            row_room: Arc::new(Semaphore::new(room_units(row_room) as usize)),
            options,
        })
    }

    /// Accepts no more requests, unless the program shares the core.
    pub(super) fn stop(&self) {
        if !self.is_shared {
            self.core.stop();
        }
    }

    /// Stops, and waits for the last request, unless the program shares the core.
    pub(super) fn join(&self) {
        if !self.is_shared {
            self.core.join();
        }
    }

    /// Tokenizer, template and dialect.
    ///
    /// # Errors
    /// A file of the checkpoint is wrong.
    pub(crate) fn text(&self) -> Result<&Text, ApiError> {
        Ok(self.core.engine().text()?)
    }

    /// Sampling of requests that do not say theirs.
    ///
    /// # Errors
    /// The checkpoint's settings of generation are wrong.
    pub(crate) fn sampling(&self) -> Result<&Sampling, ApiError> {
        match &self.sampling {
            Some(sampling) => Ok(sampling),
            None => Ok(&self.text()?.generation()?.sampling),
        }
    }

    /// Its abilities, in the words of Ollama's API.
    pub(crate) fn capabilities(&self) -> Vec<&'static str> {
        let Ok(text) = self.text() else { return Vec::new() };
        [
            (true, "completion"),
            (self.has_vision(), "vision"),
            (text.call_syntax().is_some(), "tools"),
            (!text.answers_are_plain(), "thinking"),
            (FimTokens::of(text).is_some(), "insert"),
        ]
        .into_iter()
        .filter_map(|(has, name)| has.then_some(name))
        .collect()
    }

    /// Whether it reads images.
    pub(crate) fn has_vision(&self) -> bool {
        self.encoder().is_some()
    }

    /// Encoder of its images, if it has a vision tower.
    fn encoder(&self) -> Option<&ImageEncoder> {
        self.core.engine().images()
    }

    /// Waits until there is room for the rows of the images of a request.
    ///
    /// # Errors
    /// They take more than all of it.
    pub(crate) async fn row_room(
        &self,
        images: impl Iterator<Item = PlacedImage>,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        let encoder = self.encoder().ok_or_else(|| ApiError::internal("no vision tower"))?;
        let images = images.map(|image| (image.digest, image.tokens));
        let units = room_units(encoder.row_bytes(images, self.context())?);
        let room = Arc::clone(&self.row_room).acquire_many_owned(units).await;
        room.map_err(|_| ApiError::internal("the room for images is closed"))
    }

    /// Waits until no other request uses the vision tower.
    pub(crate) async fn tower_turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.tower).acquire_owned().await.ok()
    }

    /// Rows of an image, if they are kept.
    pub(crate) fn kept_rows(&self, image: &PlacedImage) -> Option<Arc<ImageRows>> {
        self.encoder()?.cached(&image.digest)
    }

    /// Rows of an image, which the vision tower computes unless they are kept. The client may go
    /// meanwhile.
    ///
    /// # Errors
    /// The tower failed; the client is gone.
    pub(crate) fn rows(&self, file: &PromptFile) -> Result<Arc<ImageRows>, ApiError> {
        if let Some(rows) = self.kept_rows(&file.placed) {
            return Ok(rows);
        }
        let encoder = self.encoder().ok_or_else(|| ApiError::internal("no vision tower"))?;
        let image = self.prepared(file, encoder)?;
        let cancel = CancelToken::new();
        let mut progress = |_| {
            if is_cancelled() {
                cancel.cancel();
            }
        };
        let mut control = StepControl::default().cancel(&cancel).progress(&mut progress);
        Ok(encoder.rows(&image, &mut control)?)
    }

    /// An image before the tower: the last one that was read, or its file read again, as pixels
    /// take more memory than files.
    fn prepared(
        &self,
        PromptFile { placed, image }: &PromptFile,
        encoder: &ImageEncoder,
    ) -> Result<Arc<PreparedImage>, ApiError> {
        let last = self.known_images().last.take();
        if let Some(last) = last.filter(|last| *last.digest() == placed.digest) {
            return Ok(last);
        }
        let prepared = self.decode(&self.decoding(), image, encoder)?;
        match *prepared.digest() == placed.digest {
            true => Ok(prepared),
            false => Err(ApiError::internal("an image has other pixels when it is read again")),
        }
    }

    /// Decodes an image, while `_decoding` is held.
    fn decode(
        &self,
        _decoding: &MutexGuard<'_, ()>,
        image: &SentImage,
        encoder: &ImageEncoder,
    ) -> Result<Arc<PreparedImage>, Error> {
        if is_cancelled() {
            return Err(Error::Cancelled);
        }
        // Its pixels would take memory beside the new ones.
        self.known_images().last = None;
        encoder.read(&image.file, image.detail)
    }

    fn decoding(&self) -> MutexGuard<'_, ()> {
        self.decoding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_images(&self) -> MutexGuard<'_, KnownImages> {
        self.known_images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `images` their tokens and digests, by the files in `table`.
    ///
    /// # Errors
    /// The model reads no images, or not these; the client is gone.
    pub(crate) fn resolve_images<'a>(
        &self,
        table: ImageTable,
        images: impl Iterator<Item = &'a mut MessageImage>,
    ) -> Result<ResolvedImages, ApiError> {
        let Some(encoder) = self.encoder() else { return table.refuse(&self.name) };
        table.resolve(images, |image| {
            // An address may have another file by now.
            let file = image.digest();
            if let Some(read) = self.known_images().find(&file) {
                return Ok(read);
            }
            let decoding = self.decoding();
            // Another request may have read it meanwhile.
            if let Some(read) = self.known_images().find(&file) {
                return Ok(read);
            }
            let prepared = self.decode(&decoding, image, encoder)?;
            let (tokens, digest) = (prepared.tokens() as usize, *prepared.digest());
            let read = ReadImage { tokens, digest, note: prepared.note() };
            let mut known = self.known_images();
            known.add(KnownImage { file, read: read.clone() });
            known.last = Some(prepared);
            Ok(read)
        })
    }

    /// Tokens of a prompt and its answer.
    pub(crate) fn context(&self) -> usize {
        self.core.engine().plan().context
    }

    /// Fields that all parts of an answer share. `prefix` starts its id.
    pub(crate) fn head(&self, prefix: &str) -> AnswerHead {
        let (id, created, model) = (ids::random_id(prefix), now(), self.name.clone());
        AnswerHead { id, created, model, ..AnswerHead::default() }
    }
}
