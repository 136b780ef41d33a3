//! Processors of checkpoints.

use std::{io, path::Path};

use moeflux_base::{Error, TextFile};
use sha2::{Digest, Sha256};

use super::{
    family::{Family, Normalization},
    fields::{Fields, JsonFile, shown},
    patches::{Levels, PatchOrder},
    pixel_values::PixelValues,
    size_rule::{ImageLayout, SizeRule},
};
use crate::{decode::ImageData, image_size::ImageSize, resample::resample};

/// First bytes of what a digest is of. The number grows with each change of its layout.
const DIGEST_DOMAIN: &[u8] = b"moeflux image 1";

/// A checkpoint's image processor: it turns images into values and counts their tokens.
#[derive(Clone, Debug)]
pub struct Processor {
    rule: SizeRule,
    patches: PatchOrder,
    levels: Box<Levels>,
    max_tokens: Option<u32>,
}

impl Processor {
    /// Reads the processor of the model in `folder`: `preprocessor_config.json`, else
    /// `processor_config.json`. Missing fields have the defaults of the `model_type` in
    /// `config.json`. Weights are not read.
    ///
    /// # Errors
    /// [`Error::File`] if `config.json` is missing or a file cannot be read. [`Error::Checkpoint`]
    /// if the `model_type` has no processor here, or a field has a wrong type or range, or asks for
    /// another computation.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let config = JsonFile::read(folder, "config.json")?.ok_or_else(|| {
            let doing = "cannot read the config: is this the folder of a model?";
            Error::file(folder.join("config.json"), doing)(io::ErrorKind::NotFound.into())
        })?;
        let file = match JsonFile::read(folder, "preprocessor_config.json")? {
            Some(file) => Some(file),
            None => JsonFile::read(folder, "processor_config.json")?,
        };
        Self::read(&config, file)
    }

    /// Reads a processor from the contents of `config.json` and of the processor's file, if there
    /// is one.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] as for [`Processor::open`].
    pub fn from_files(config: &TextFile<'_>, file: Option<&TextFile<'_>>) -> Result<Self, Error> {
        Self::read(&JsonFile::parse(config)?, file.map(JsonFile::parse).transpose()?)
    }

    fn read(config: &JsonFile, file: Option<JsonFile>) -> Result<Self, Error> {
        let config = config.fields(&[]);
        let model_type = config.text("model_type")?.unwrap_or_default();
        let family = Family::named(&model_type).ok_or_else(|| {
            let expected = "expected a model whose images are read: Qwen3-VL to Qwen3.8, GLM-4V, \
                            Gemma 4 or Kimi-K2.5";
            let problem = format!("{expected}, got {:?}", shown(&model_type));
            config.refusal("model_type", &problem, "choose such a model, or leave the images out")
        })?;
        let file = file.unwrap_or_else(JsonFile::empty);
        let fields = file.fields(&["media_proc_cfg", "image_processor"]);
        let (rule, patches) = family.read(&fields)?;
        let levels = levels(&fields, &family.normalization())?;
        Ok(Self { rule, patches, levels, max_tokens: None })
    }

    /// Lowers the maximum size of images to `tokens` tokens each; `None` leaves the checkpoint's.
    #[must_use]
    pub fn with_max_tokens(mut self, tokens: impl Into<Option<u32>>) -> Self {
        self.max_tokens = tokens.into();
        self
    }

    /// Returns the tokens of the largest images.
    pub fn max_tokens(&self) -> u32 {
        let own = self.rule.max_tokens();
        self.max_tokens.map_or(own, |most| most.min(own))
    }

    /// Returns the size to which an image of `size` is scaled, and its tokens.
    ///
    /// # Errors
    /// [`Error::Image`] if the processor refuses the size, such as sides in a ratio above 200.
    pub fn layout(&self, size: ImageSize) -> Result<ImageLayout, Error> {
        Ok(self.rule.layout(size, self.max_tokens)?)
    }

    /// Returns the values that the tower reads, as transformers 5.24.0 with torchvision 0.29.2
    /// computes them.
    ///
    /// # Errors
    /// As [`Processor::layout`].
    pub fn process(&self, image: &ImageData) -> Result<PixelValues, Error> {
        let ImageLayout { resized, grid, tokens } = self.layout(image.size())?;
        let rgb = resample(image, resized);
        let [_, rows, columns] = grid.map(|side| side as usize);
        Ok(PixelValues {
            values: self.patches.values(&rgb, resized, [rows, columns], &self.levels),
            rows: rows * columns,
            width: self.patches.width(),
            grid,
            block: self.patches.block,
            tokens,
            digest: self.digest(&rgb, resized, grid),
        })
    }

    fn digest(&self, rgb: &[u8], size: ImageSize, grid: [u32; 3]) -> [u8; 32] {
        let PatchOrder { patch, block, frames, channels_last } = self.patches;
        let mut hash = Sha256::new_with_prefix(DIGEST_DOMAIN);
        let order = [patch, block, frames, usize::from(channels_last)].map(|n| n as u32);
        let merge = [self.rule.merge as u32];
        for number in [size.width, size.height].iter().chain(&grid).chain(&order).chain(&merge) {
            hash.update(number.to_le_bytes());
        }
        for level in self.levels.as_flattened() {
            hash.update(level.to_le_bytes());
        }
        hash.update(rgb);
        hash.finalize().into()
    }
}

/// Value of each sample of each channel: `(x - mean / f) / (deviation / f)` for the factor f of
/// rescaling, which is fused into the normalization. Without normalization `x * f`.
fn levels(fields: &Fields<'_>, default: &Normalization) -> Result<Box<Levels>, Error> {
    let factor = fields.positive("rescale_factor")?.unwrap_or(1.0 / 255.0);
    let factor = if fields.flag("do_rescale")?.unwrap_or(true) { factor } else { 1.0 };
    let normalizes = fields.flag("do_normalize")?.unwrap_or(default.is_default);
    let mean = fields.channels("image_mean")?.unwrap_or(default.mean);
    let deviation = fields.channels("image_std")?.unwrap_or(default.deviation);
    let steps = (1.0 / factor) as f32;
    let level = |channel: usize, sample: usize| {
        if normalizes {
            (sample as f32 - mean[channel] * steps) / (deviation[channel] * steps)
        } else {
            sample as f32 * factor as f32
        }
    };
    let levels: Levels = std::array::from_fn(|c| std::array::from_fn(|sample| level(c, sample)));
    if !levels.as_flattened().iter().all(|level| level.is_finite()) {
        let problem = format!("expected values that stay finite, got {deviation:?} with {mean:?}");
        return Err(fields.problem("image_std", &problem));
    }
    Ok(Box::new(levels))
}

#[cfg(test)]
mod tests;
