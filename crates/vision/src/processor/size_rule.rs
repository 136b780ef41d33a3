//! Rules by which an image gets its size and its number of tokens.
//!
//! Divisions and roots are in f64, and halves are rounded to even, as in Python: a size at a
//! boundary would differ otherwise.

use moeflux_base::ImageError;

use crate::image_size::ImageSize;

/// Maximum width times height after scaling, times the frames. Published limits are up to it; it
/// bounds the memory that a hostile file can ask for.
pub(super) const MAX_PIXELS: u64 = 1 << 25;

/// Maximum pixels of the rows that scaling holds between its two axes: new width times old height.
const MAX_INTERMEDIATE: u64 = 1 << 26;

/// Maximum ratio of the sides, by Qwen's and GLM's processors.
const MAX_RATIO: f64 = 200.0;

/// Size that an image gets, and its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageLayout {
    /// Size to which the image is scaled. Below and to the right of it, Kimi pads with zeros.
    pub resized: ImageSize,
    /// Frames, rows and columns of patches.
    pub grid: [u32; 3],
    /// Tokens of the image in a prompt, without the ones around it.
    pub tokens: u32,
}

/// Rule of one processor.
#[derive(Clone, Debug)]
pub(super) struct SizeRule {
    /// Side of a patch in pixels.
    pub(super) patch: u64,
    /// Side of a token in patches.
    pub(super) merge: u64,
    /// Frames of an image in the values, all the same.
    pub(super) frames: u64,
    /// Whether images are scaled at all.
    pub(super) resizes: bool,
    pub(super) fit: Fit,
}

/// Quantity that a rule keeps within limits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fit {
    /// Pixels of all frames (Qwen, GLM-4V). Sides become multiples of a token's, the ratio stays
    /// nearly the same.
    Pixels {
        min: u64,
        max: u64,
        frames: u64,
        /// Whether an image below one token is enlarged first.
        widens: bool,
    },
    /// Tokens (Gemma 4). All images get as many as fit.
    Tokens { most: u64 },
    /// Patches, of the image and of a side (Kimi). Images are never enlarged.
    Patches { most: u64, side: u64 },
}

impl Fit {
    /// The rule with a maximum of at most `patches` patches of a frame, of which a token has
    /// `token_patches`, of `patch_pixels` pixels each.
    fn lowered(self, patches: u64, token_patches: u64, patch_pixels: u64) -> Self {
        match self {
            Self::Pixels { min, max, frames, widens } => {
                let max = max.min(patches * patch_pixels * frames);
                Self::Pixels { min: min.min(max), max, frames, widens }
            }
            Self::Tokens { most } => Self::Tokens { most: most.min(patches / token_patches) },
            Self::Patches { most, side } => Self::Patches { most: most.min(patches), side },
        }
    }
}

impl SizeRule {
    /// Size and tokens of an image of a given size. Where these are more than `max_tokens`, the
    /// rule's maximum is lowered to it, and further if rounding or a long side still leaves more.
    ///
    /// # Errors
    /// The rule refuses the size, or no smaller size has so few tokens.
    pub(super) fn layout(
        &self,
        size: ImageSize,
        max_tokens: Option<u32>,
    ) -> Result<ImageLayout, ImageError> {
        let free = self.layout_by(self.fit, size);
        let Some(most) = max_tokens else { return free };
        if let Ok(layout) = free
            && layout.tokens <= most
        {
            return Ok(layout);
        }
        let token_patches = self.merge * self.merge;
        let mut patches = u64::from(most) * token_patches;
        while patches > 0 {
            let fit = self.fit.lowered(patches, token_patches, self.patch * self.patch);
            let layout = self.layout_by(fit, size)?;
            if layout.tokens <= most {
                return Ok(layout);
            }
            let fewer = patches * u64::from(most) / u64::from(layout.tokens);
            patches = if self.resizes { fewer } else { 0 };
        }
        let remedy = "raise the limit of tokens, scale the image down, or crop its long side";
        Err(refused(size, format!("at most {most} tokens"), remedy))
    }

    fn layout_by(&self, fit: Fit, size: ImageSize) -> Result<ImageLayout, ImageError> {
        let resized = if self.resizes { self.fitted(fit, size)? } else { self.kept(fit, size)? };
        let token_side = self.token_side();
        let [rows, columns] =
            [resized.height, resized.width].map(|side| u64::from(side).div_ceil(token_side));
        let pixels = (rows * token_side).saturating_mul(columns * token_side);
        let remedy = "scale it down, or give --image-max-tokens";
        if pixels.saturating_mul(self.frames) > MAX_PIXELS {
            let most = MAX_PIXELS / self.frames;
            let expected = format!("at most {most} pixels after scaling");
            return Err(refused(size, expected, remedy));
        }
        let intermediate = ImageSize { width: resized.width, height: size.height };
        if resized.width != size.width && intermediate.pixels() > MAX_INTERMEDIATE {
            let expected = format!(
                "at most {MAX_INTERMEDIATE} pixels while it is scaled to {} x {}",
                resized.width, resized.height
            );
            return Err(refused(size, expected, remedy));
        }
        let patches = |tokens: u64| (tokens * self.merge) as u32;
        let grid = [1, patches(rows), patches(columns)];
        Ok(ImageLayout { resized, grid, tokens: (rows * columns) as u32 })
    }

    /// Tokens of the largest images, without another limit.
    pub(super) fn max_tokens(&self) -> u32 {
        let area = self.token_side() * self.token_side();
        let of_fit = match self.fit {
            _ if !self.resizes => u64::MAX,
            // A narrow image is one token wide, and as long as the ratio allows.
            Fit::Pixels { max, frames, .. } => (max / (frames * area)).max(MAX_RATIO as u64),
            Fit::Tokens { most } => most,
            // Sides are padded to whole tokens.
            Fit::Patches { most, side } => {
                (most + (self.merge - 1) * (2 * side + self.merge)) / (self.merge * self.merge)
            }
        };
        of_fit.min(MAX_PIXELS / (area * self.frames)) as u32
    }

    /// Side of a token in pixels.
    fn token_side(&self) -> u64 {
        self.patch * self.merge
    }

    fn fitted(&self, fit: Fit, size: ImageSize) -> Result<ImageSize, ImageError> {
        if size.pixels() == 0 {
            return Err(refused(size, "a pixel at least".to_owned(), "give another image"));
        }
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        let unit = self.token_side() as f64;
        let sides = match fit {
            Fit::Pixels { min, max, frames, widens } => {
                let grow = if widens { (unit / height).max(unit / width).max(1.0) } else { 1.0 };
                let (height, width) = ((height * grow).trunc(), (width * grow).trunc());
                if height.max(width) / height.min(width) > MAX_RATIO {
                    let expected = format!("sides in a ratio of at most {MAX_RATIO}");
                    return Err(refused(size, expected, "crop the long side"));
                }
                within_pixels([height, width], unit, frames as f64, [min as f64, max as f64])
            }
            Fit::Tokens { most } => {
                let budget = most as f64 * unit * unit;
                let grow = (budget / (height * width)).sqrt();
                let sides = [height, width].map(|side| (grow * side / unit).floor() * unit);
                let long = |ratio: f64| ratio.floor().min(most as f64) * unit;
                let sides = match sides {
                    [0.0, _] => [unit, long(width / height)],
                    [_, 0.0] => [long(height / width), unit],
                    sides => sides,
                };
                if sides.contains(&0.0) || sides[0] * sides[1] > budget {
                    let expected = format!("a size that fits into {most} tokens");
                    return Err(refused(size, expected, "crop the long side"));
                }
                sides
            }
            Fit::Patches { most, side } => {
                let patch = self.patch as f64;
                let longest = side as f64 * patch;
                let patches = |side: f64| (side / patch).floor().max(1.0);
                let shrink = (most as f64 / (patches(height) * patches(width))).sqrt();
                let shrink = shrink.min(longest / height).min(longest / width).min(1.0);
                [height, width].map(|side| (side * shrink).trunc().max(1.0).min(longest))
            }
        };
        // Conversions saturate, and what is too large is refused by its area.
        let [height, width] = sides.map(|side| side as u32);
        Ok(ImageSize { width, height })
    }

    /// The size of an image that is not scaled.
    fn kept(&self, fit: Fit, size: ImageSize) -> Result<ImageSize, ImageError> {
        let unit = self.token_side();
        let remedy = "the model's processor does not scale: scale the image yourself";
        let is_whole = |side: u32| u64::from(side).is_multiple_of(unit);
        let is_padded = matches!(fit, Fit::Patches { .. });
        let divides = is_padded || is_whole(size.width) && is_whole(size.height);
        if size.pixels() == 0 || !divides {
            return Err(refused(size, format!("sides that are multiples of {unit}"), remedy));
        }
        match fit {
            Fit::Tokens { most } if size.pixels() > most * unit * unit => {
                Err(refused(size, format!("at most {most} tokens"), remedy))
            }
            _ => Ok(size),
        }
    }
}

/// Sides as multiples of `unit`, whose area in `frames` frames is within limits.
fn within_pixels(sides: [f64; 2], unit: f64, frames: f64, [min, max]: [f64; 2]) -> [f64; 2] {
    let nearest = sides.map(|side| (side / unit).round_ties_even() * unit);
    let area = frames * nearest[0] * nearest[1];
    let exact = frames * sides[0] * sides[1];
    if area > max {
        let shrink = (exact / max).sqrt();
        sides.map(|side| ((side / shrink / unit).floor() * unit).max(unit))
    } else if area < min {
        let grow = (min / exact).sqrt();
        sides.map(|side| (side * grow / unit).ceil() * unit)
    } else {
        nearest
    }
}

fn refused(size: ImageSize, expected: String, remedy: &'static str) -> ImageError {
    let ImageSize { width, height } = size;
    ImageError::Size { expected, width, height, remedy }
}

#[cfg(test)]
mod tests;
