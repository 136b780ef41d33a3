//! Images as a model's tower takes them.

use moeflux_vision::{ImageSize, PixelValues};

/// Detail in which a request has an image read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageDetail {
    /// At most 256 tokens.
    Low,
    /// At most the tokens of [`ImageOptions::max_tokens`](crate::vision::ImageOptions).
    #[default]
    Auto,
    /// The same as `Auto`.
    High,
}

impl ImageDetail {
    /// Maximum tokens of an image.
    pub(super) const fn max_tokens(self) -> Option<u32> {
        match self {
            Self::Low => Some(256),
            Self::Auto | Self::High => None,
        }
    }
}

/// Decoded image in the size of its tokens.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PreparedImage {
    /// Size of the file's image, upright.
    pub size: ImageSize,
    /// Size to which it was scaled.
    pub resized: ImageSize,
    /// Rows and columns of tokens.
    pub grid: [usize; 2],
    /// Whether [`ImageOptions::max_tokens`](crate::vision::ImageOptions) left it fewer tokens than
    /// it has by the checkpoint and the request's detail.
    pub is_limited: bool,
    /// Values that the tower reads.
    pub pixels: PixelValues,
}

impl PreparedImage {
    /// Tokens of the image in a prompt, without the ones around it.
    pub fn tokens(&self) -> u32 {
        self.pixels.tokens
    }

    /// SHA-256 of the scaled pixels and of the processor's constants: equal images have equal rows.
    pub fn digest(&self) -> &[u8; 32] {
        &self.pixels.digest
    }

    /// A remark for users if the image lost detail to
    /// [`ImageOptions::max_tokens`](crate::vision::ImageOptions).
    pub fn note(&self) -> Option<String> {
        let sides = |ImageSize { width, height }: ImageSize| format!("{width} x {height}");
        let (from, to) = (sides(self.size), sides(self.resized));
        let tokens = self.tokens();
        self.is_limited.then(|| {
            format!(
                "image scaled from {from} to {to}: {tokens} tokens; --image-max-tokens raises it"
            )
        })
    }
}
