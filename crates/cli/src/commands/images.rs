//! Images that a command names: files, and the rows of the model's vision tower.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, anyhow};
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

/// Images that a conversation has named, by digest.
#[derive(Default)]
pub(super) struct Pictures(HashMap<[u8; 32], Arc<PreparedImage>>);

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
        let image = encoder(engine)?.prepare(&image(path)?, ImageDetail::Auto);
        let image = image.with_context(|| path.display().to_string())?;
        if let Some(note) = image.note() {
            ui.note(format_args!("{}: {note}", path.display()));
        }
        let digest = *image.digest();
        let tokens = image.tokens() as usize;
        self.0.insert(digest, image);
        Ok(MessageImage { at: 0, tokens, digest })
    }

    /// Images of a prompt with their rows.
    ///
    /// # Errors
    /// An image is not one of these, the tower cannot be loaded, or the user interrupted it.
    pub(super) fn of_prompt(
        &self,
        placed: &[PlacedImage],
        engine: &Engine,
        ui: Ui,
    ) -> anyhow::Result<PromptImages> {
        let mut images = PromptImages::default();
        if placed.is_empty() {
            return Ok(images);
        }
        let prepared = placed.iter().map(|placed| {
            let found = self.0.get(&placed.digest).map(|image| &**image);
            found.ok_or_else(|| anyhow!("the conversation has an image that was not saved with it"))
        });
        let prepared: Vec<_> = prepared.collect::<Result<_, _>>()?;
        let armed = interrupt::arm();
        let bar = ui.share(&units::plural(placed.len() as u64, "image"));
        let mut progress = |share: f64| bar.share(share);
        let mut control = StepControl::default().cancel(armed.flag()).progress(&mut progress);
        let rows = encoder(engine)?.rows_of(&prepared, &mut control)?;
        for (placed, rows) in placed.iter().zip(rows) {
            images.push(placed.place, placed.digest, rows);
        }
        Ok(images)
    }
}

/// Encoder of a model's images.
///
/// # Errors
/// The model takes none.
fn encoder(engine: &Engine) -> anyhow::Result<&ImageEncoder> {
    engine.images().context("this model reads text only: its checkpoint has no vision tower")
}
