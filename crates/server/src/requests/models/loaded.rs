//! A loaded model with the state of its answers.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use moeflux::{
    Sampling, StepControl,
    runtime::{CancelToken, PromptImages},
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

/// Image of a file that was read before.
struct KnownImage {
    file: ImageDigest,
    read: ReadImage,
}

/// Images that were read before.
#[derive(Default)]
struct KnownImages {
    files: VecDeque<KnownImage>,
    /// The last one, until the tower takes it.
    last: Option<Arc<PreparedImage>>,
}

/// A model that answers.
pub(crate) struct ServedModel {
    pub(crate) core: ServingCore,
    /// Its name in answers.
    pub(crate) name: String,
    /// Sampling of requests that do not say theirs, in place of the checkpoint's.
    sampling: Option<Sampling>,
    /// Answers for the next turns.
    pub(crate) turns: Arc<TurnMemory>,
    /// Speed of the disk as it was measured, in bytes per second.
    pub(crate) disk_speed: Option<f64>,
    /// Images that were read, the newest last: clients send all of a conversation with each
    /// question. Locked while an image is decoded, which takes up to some hundred MiB.
    known_images: Mutex<KnownImages>,
    /// Held while the vision tower computes the images of a request.
    tower: Arc<Semaphore>,
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
        let LoadedModel { core, sampling, turn_folder, turn_bytes, disk_speed, notices } = loaded;
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
        let (name, known_images) = (name.to_owned(), Mutex::default());
        let tower = Arc::new(Semaphore::new(1));
        Ok(Self { core, name, sampling, turns, disk_speed, known_images, tower, options })
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

    /// Waits until no other request uses the vision tower.
    pub(crate) async fn tower_turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.tower).acquire_owned().await.ok()
    }

    /// Images of a prompt with their rows, which the vision tower computes unless they are kept.
    /// The client may go meanwhile.
    ///
    /// # Errors
    /// The tower failed; the client is gone.
    pub(crate) fn see(&self, files: &[PromptFile]) -> Result<PromptImages, ApiError> {
        let mut images = PromptImages::default();
        let Some(encoder) = self.encoder() else { return Ok(images) };
        let cancel = CancelToken::new();
        for PromptFile { placed, image } in files {
            let mut progress = |_| {
                if is_cancelled() {
                    cancel.cancel();
                }
            };
            let mut control = StepControl::default().cancel(&cancel).progress(&mut progress);
            let rows = match encoder.cached(&placed.digest) {
                Some(rows) => rows,
                None => {
                    let image = self.prepared(placed, image, encoder)?;
                    encoder.rows(&image, &mut control)?
                }
            };
            images.push(placed.place, placed.digest, rows);
        }
        Ok(images)
    }

    /// An image before the tower: the last one that was read, or its file read again, as pixels
    /// take more memory than files.
    fn prepared(
        &self,
        placed: &PlacedImage,
        image: &SentImage,
        encoder: &ImageEncoder,
    ) -> Result<Arc<PreparedImage>, ApiError> {
        let mut known = self.known_images.lock().unwrap_or_else(PoisonError::into_inner);
        match known.last.take().filter(|last| *last.digest() == placed.digest) {
            Some(last) => Ok(last),
            None => Ok(encoder.read(&image.file, image.detail)?),
        }
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
            let mut known = self.known_images.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(found) = known.files.iter().find(|known| known.file == file) {
                return Ok(found.read.clone());
            }
            known.last = None;
            let prepared = encoder.read(&image.file, image.detail)?;
            let (tokens, digest) = (prepared.tokens() as usize, *prepared.digest());
            let read = ReadImage { tokens, digest, note: prepared.note() };
            if known.files.len() == KNOWN_IMAGES {
                known.files.pop_front();
            }
            known.files.push_back(KnownImage { file, read: read.clone() });
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
