//! Images that a command names: from files to the rows of the model's vision tower.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context;
use moeflux::{
    Checkpoint, StepControl,
    runtime::{DeviceOptions, ImageRows, PromptImages},
    text::{MessageImage, PlacedImage},
    vision::{ImageData, ImageLimits, PixelValues, Processor, VisionTower},
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

/// Images of files as the model in `folder` sees them.
///
/// # Errors
/// A file is no image, or the model has no processor.
pub(super) fn pixels(files: &[PathBuf], folder: &Path) -> anyhow::Result<Vec<PixelValues>> {
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

/// Images of a prompt with their rows.
pub(super) fn placed(images: &[PlacedImage], rows: Vec<Arc<ImageRows>>) -> PromptImages {
    let mut placed = PromptImages::default();
    for (image, rows) in images.iter().zip(rows) {
        placed.push(image.place, image.digest, rows);
    }
    placed
}

/// Rows of images, by the vision tower of a model.
///
/// # Errors
/// The model has no tower, it cannot be loaded, or the user interrupted it.
pub(super) fn rows(
    images: &[PixelValues],
    checkpoint: &Checkpoint,
    options: &DeviceOptions,
    ui: Ui,
) -> anyhow::Result<Vec<Arc<ImageRows>>> {
    let mut tower = VisionTower::open(checkpoint, options, &mut |_| ())?.with_context(|| {
        format!("{}: the model has no vision tower", checkpoint.folder().display())
    })?;
    let armed = interrupt::arm();
    let patches = images.iter().map(|image| image.rows as u64).sum();
    let bar = ui.share(&format!("computing {}", units::plural(patches, "patch of images")));
    let mut all = Vec::with_capacity(images.len());
    for (i, image) in images.iter().enumerate() {
        let mut progress = |share: f64| bar.share((i as f64 + share) / images.len() as f64);
        let mut control = StepControl::default().cancel(armed.flag()).progress(&mut progress);
        all.push(Arc::new(tower.rows(image, &mut control)?));
    }
    Ok(all)
}
