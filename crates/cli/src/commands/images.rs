//! Images that a command names: files, and the rows of the model's vision tower.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, ensure};
use moeflux::{
    Engine, StepControl,
    runtime::PromptImages,
    text::{MessageImage, PlacedImage},
    vision::{
        ImageData, ImageDetail, ImageEncoder, ImageLimits, PixelValues, PreparedImage, Processor,
    },
};
use moeflux_bench::units;

use crate::{interrupt, progress::Ui};

/// Image of a file.
///
/// # Errors
/// The file cannot be read, or is no image.
pub(super) fn image(path: &Path) -> anyhow::Result<ImageData> {
    let limits = ImageLimits::default();
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // A byte more shows that the file is too large.
        File::open(path)?.take(limits.max_bytes as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().with_context(|| format!("{}: cannot read the image", path.display()))?;
    ImageData::decode(&bytes, &limits).with_context(|| path.display().to_string())
}

/// Images as the processor of the model in `folder` scales them.
///
/// # Errors
/// A file is no image, or the model has no processor.
pub(super) fn pixels(files: &[PathBuf], folder: &Path) -> anyhow::Result<Vec<PixelValues>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let processor = Processor::open(folder)?;
    files.iter().map(|file| Ok(processor.process(&image(file)?)?)).collect()
}

/// The same as images at the start of a message.
pub(super) fn of_message(images: &[PixelValues]) -> Vec<MessageImage> {
    let of_image = |image: &PixelValues| MessageImage {
        at: 0,
        tokens: image.tokens as usize,
        digest: image.digest,
    };
    images.iter().map(of_image).collect()
}

/// Images that a conversation has named.
#[derive(Default)]
pub(super) struct Pictures {
    /// Their files, by digest. They are read again for the tower, as pixels take more memory.
    files: HashMap<[u8; 32], PathBuf>,
    /// The image that was read last.
    last: Option<Arc<PreparedImage>>,
}

impl Pictures {
    /// Reads a file as an image at the start of a message.
    ///
    /// # Errors
    /// The file is no image, or the model takes none.
    pub(super) fn add(
        &mut self,
        path: &Path,
        engine: &Engine,
        ui: Ui,
    ) -> anyhow::Result<MessageImage> {
        let image = self.read(path, encoder(engine)?)?;
        if let Some(note) = image.note() {
            ui.note(format_args!("{}: {note}", path.display()));
        }
        let digest = *image.digest();
        let tokens = image.tokens() as usize;
        self.files.insert(digest, path.to_owned());
        self.last = Some(image);
        Ok(MessageImage { at: 0, tokens, digest })
    }

    fn read(&mut self, path: &Path, encoder: &ImageEncoder) -> anyhow::Result<Arc<PreparedImage>> {
        self.last = None;
        let image = encoder.prepare(&image(path)?, ImageDetail::Auto);
        image.with_context(|| path.display().to_string())
    }

    /// An image for the tower.
    ///
    /// # Errors
    /// It is not one of these, or its file has changed.
    fn prepared(
        &mut self,
        digest: &[u8; 32],
        encoder: &ImageEncoder,
    ) -> anyhow::Result<Arc<PreparedImage>> {
        if let Some(last) = self.last.take().filter(|last| last.digest() == digest) {
            return Ok(last);
        }
        let path = self.files.get(digest);
        let path = path.context("the conversation has an image that was not saved with it")?;
        let path = path.clone();
        let image = self.read(&path, encoder)?;
        ensure!(
            image.digest() == digest,
            "{}: the picture has changed since it was shown: show it again",
            path.display()
        );
        Ok(image)
    }

    /// Images of a prompt with their rows.
    ///
    /// # Errors
    /// An image is not one of these, they need more memory than planned, the tower cannot be
    /// loaded, or the user interrupted it.
    pub(super) fn of_prompt(
        &mut self,
        placed: &[PlacedImage],
        engine: &Engine,
        ui: Ui,
    ) -> anyhow::Result<PromptImages> {
        let mut images = PromptImages::default();
        if placed.is_empty() {
            return Ok(images);
        }
        let encoder = encoder(engine)?;
        let sizes = placed.iter().map(|image| (image.digest, image.tokens));
        encoder.row_bytes(sizes, engine.plan().context)?;
        let armed = interrupt::arm();
        let bar = ui.share(&units::plural(placed.len() as u64, "image"));
        let mut known = HashMap::new();
        for (done, &PlacedImage { place, digest, .. }) in placed.iter().enumerate() {
            let rows = match known.get(&digest).cloned().or_else(|| encoder.cached(&digest)) {
                Some(rows) => rows,
                None => {
                    let mut progress =
                        |share: f64| bar.share((done as f64 + share) / placed.len() as f64);
                    let mut control =
                        StepControl::default().cancel(armed.flag()).progress(&mut progress);
                    encoder.rows(&*self.prepared(&digest, encoder)?, &mut control)?
                }
            };
            known.insert(digest, Arc::clone(&rows));
            images.push(place, digest, rows);
        }
        Ok(images)
    }
}

/// Encoder of a model's images.
///
/// # Errors
/// The model takes none.
fn encoder(engine: &Engine) -> anyhow::Result<&ImageEncoder> {
    engine.images().with_context(|| match engine.blueprint().images {
        Some(_) => "the model's vision tower is not open: leave --vision off out, or see the note",
        None => "this model reads text only: its checkpoint has no vision tower",
    })
}
