//! Memory of images.

use crate::runtime::ImageMemory;

/// Memory that images take, in bytes: of a card if it computes the tower, else of the host.
///
/// Rows of a run are not counted until it ends, nor are further prepared images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VisionMemory {
    /// Weights during a run of a tower that is not resident, with the ones that the host reads
    /// ahead.
    pub weights_in_passing: u64,
    /// All weights of the tower: the ones that a resident tower keeps.
    pub weights: u64,
    /// Activations of an image of the maximum size, scratch memory and stacks. A resident tower
    /// keeps them.
    pub activations_at_max_tokens: u64,
    /// Maximum of the embedding cache, on the host.
    pub cache: u64,
    /// Rows of a token, on the host.
    pub token_rows: u64,
    /// Maximum of the rows of prompts that are not computed yet, on the host.
    pub max_rows: u64,
    /// Decoded image of the maximum size, and its values for the tower, on the host.
    pub decoded: u64,
}

impl VisionMemory {
    /// Memory for a plan, of a tower that `is_resident` or not, and `is_on_card` or not.
    pub(crate) fn planned(&self, is_resident: bool, is_on_card: bool) -> ImageMemory {
        let weights = if is_resident { self.weights } else { self.weights_in_passing };
        let tower = weights.saturating_add(self.activations_at_max_tokens);
        let kept = self.cache.saturating_add(self.decoded);
        let (host, card) = match is_on_card {
            true => (kept, tower),
            false => (kept.saturating_add(tower), 0),
        };
        ImageMemory { host, card, token_rows: self.token_rows, max_rows: self.max_rows }
    }
}
