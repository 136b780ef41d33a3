//! Contents of a sequence that its token ids do not tell: images, by place and digest.

use std::{any::Any, ops::Range, sync::Arc};

use moeflux_base::{Error, SessionError};
use moeflux_compute::ROPE_AXES;
use moeflux_model::{
    blueprint::{Blueprint, ImageInputs},
    seam::hex_digest,
};
use serde::{Deserialize, Serialize};

use super::image_rows::ImageRows;

/// Content of a sequence that its token ids do not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ContentDigest {
    /// Index of the first token whose states depend on it.
    pub(crate) place: usize,
    /// SHA-256 of the content.
    #[serde(with = "hex_digest")]
    pub(crate) digest: [u8; 32],
    /// Rows and columns of an image in tokens; `None` for other contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) grid: Option<[usize; 2]>,
}

impl ContentDigest {
    /// Tokens of the image.
    pub(crate) fn tokens(&self) -> Range<usize> {
        let count = self.grid.map_or(0, |[rows, columns]| rows.saturating_mul(columns));
        self.place..self.place.saturating_add(count)
    }

    /// Positions that the image takes less than its tokens.
    fn saved(&self) -> usize {
        self.grid.map_or(0, |[rows, columns]| self.tokens().len().saturating_sub(rows.max(columns)))
    }
}

/// The image that has both the token before `index` and the token there.
pub(crate) fn image_around(contents: &[ContentDigest], index: usize) -> Option<&ContentDigest> {
    let before = contents.partition_point(|content| content.place < index);
    contents[..before].iter().rev().find(|content| content.tokens().contains(&index))
}

/// Positions that the images before token `index` take less than their tokens: the position of a
/// token of text is its index without them.
///
/// Bai et al., "Qwen2-VL", 2024, section 2.1: an image takes as many positions as the longer of its
/// sides.
pub(crate) fn saved_positions(contents: &[ContentDigest], index: usize) -> usize {
    let before = |content: &&ContentDigest| content.tokens().end <= index;
    contents.iter().filter(before).map(ContentDigest::saved).sum()
}

/// Position of token `index` by axis: time, row and column.
pub(crate) fn position_ids(contents: &[ContentDigest], index: usize) -> [u32; ROPE_AXES] {
    let inside = contents.iter().find(|content| content.tokens().contains(&index));
    let (start, [row, column]) = match inside {
        Some(&ContentDigest { place, grid: Some([_, columns]), .. }) => {
            (place, [(index - place) / columns, (index - place) % columns])
        }
        _ => (index, [0; 2]),
    };
    // More than `start` only if images overlap, which `PromptImages::check` refuses.
    let first = start.saturating_sub(saved_positions(contents, start));
    [first, first + row, first + column].map(|id| id as u32)
}

/// Images of a prompt, in the order of their places.
#[derive(Clone, Debug, Default)]
pub struct PromptImages {
    contents: Vec<ContentDigest>,
    /// `None` for images whose states a session or the prefix cache has.
    rows: Vec<Option<Arc<ImageRows>>>,
    /// Room of the rows, which is free once no prompt has them.
    room: Option<Arc<dyn Any + Send + Sync>>,
}

impl PromptImages {
    /// No images.
    pub const NONE: &'static Self = &Self { contents: Vec::new(), rows: Vec::new(), room: None };

    /// Adds an image whose first placeholder has the index `place` in the prompt, after the other
    /// images. `digest`: SHA-256 of all that its rows follow from. Prompts share the states of
    /// equal tokens if their digests are equal.
    pub fn push(&mut self, place: usize, digest: [u8; 32], rows: Arc<ImageRows>) {
        self.contents.push(ContentDigest { place, digest, grid: Some(rows.grid) });
        self.rows.push(Some(rows));
    }

    /// Images without their rows.
    pub(crate) fn without_rows(contents: &[ContentDigest]) -> Self {
        let contents: Vec<_> = contents.iter().filter(|c| c.grid.is_some()).copied().collect();
        Self { rows: vec![None; contents.len()], contents, room: None }
    }

    /// Holds `room` as long as the rows: until all tokens of the prompt are computed.
    pub fn hold(&mut self, room: Arc<dyn Any + Send + Sync>) {
        self.room = Some(room);
    }

    /// Forgets the rows, once the states of all images are in memory.
    pub(crate) fn drop_rows(&mut self) {
        self.room = None;
        self.rows.iter_mut().for_each(|rows| *rows = None);
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.contents.is_empty()
    }

    /// Position of token `index` by axis, in a model that tells rows and columns of images apart:
    /// time, row and column. Tokens of text have three equal ones.
    pub fn position_ids(&self, index: usize) -> [u32; ROPE_AXES] {
        position_ids(&self.contents, index)
    }

    pub(crate) fn contents(&self) -> &[ContentDigest] {
        &self.contents
    }

    /// Checks that the images are in order, and that their rows are the model's. Images that end
    /// after the first `done` tokens need rows.
    pub(crate) fn check(&self, blueprint: &Blueprint, done: usize) -> Result<(), Error> {
        let Some(ImageInputs { deepstack, .. }) = blueprint.images else {
            return Err(SessionError::NoImages.into());
        };
        let mut end = 0;
        for (content, rows) in self.contents.iter().zip(&self.rows) {
            let (place, hidden) = (content.place, blueprint.hidden);
            let tokens = content.tokens().len();
            let is_after = place >= std::mem::replace(&mut end, content.tokens().end);
            let Some(rows) = rows.as_deref().filter(|_| is_after && tokens > 0) else {
                let problem = match (is_after, tokens) {
                    (false, _) => "expected it after the image before it".into(),
                    (true, 0) => format!("expected rows and columns, got {:?}", content.grid),
                    (true, _) if end <= done => continue,
                    (true, _) => "expected its rows, as its states are not in memory".into(),
                };
                return Err(SessionError::WrongImage { place, problem }.into());
            };
            let layers = [&rows.values].into_iter().chain(&rows.deepstack);
            let problem = if rows.width != hidden || rows.deepstack.len() != deepstack {
                format!(
                    "expected rows of {hidden} values and {deepstack} rows for DeepStack, got {} \
                     and {}: take both from one model",
                    rows.width,
                    rows.deepstack.len()
                )
            } else if layers.into_iter().any(|l| Some(l.len()) != tokens.checked_mul(hidden)) {
                format!("expected {tokens} rows of {hidden} values")
            } else {
                continue;
            };
            return Err(SessionError::WrongImage { place, problem }.into());
        }
        Ok(())
    }

    /// Checks that each image has its placeholders among `tokens`, the whole of a prompt.
    pub(crate) fn check_places(&self, blueprint: &Blueprint, tokens: &[u32]) -> Result<(), Error> {
        for content in &self.contents {
            let (place, range) = (content.place, content.tokens());
            let expected = blueprint.images.map(|images| images.placeholder);
            let problem = match tokens.get(range.clone()) {
                None => format!("it ends at token {}, the prompt at {}", range.end, tokens.len()),
                Some(under) => match under.iter().find(|token| Some(**token) != expected) {
                    None => continue,
                    Some(other) => format!("expected placeholders under it, got token {other}"),
                },
            };
            return Err(SessionError::WrongImage { place, problem }.into());
        }
        Ok(())
    }

    /// Parts of images among the tokens of `range`, in their order.
    pub(crate) fn parts(&self, range: Range<usize>) -> impl Iterator<Item = ImagePart<'_>> {
        self.contents.iter().zip(&self.rows).filter_map(move |(content, rows)| {
            let (rows, tokens) = (rows.as_deref()?, content.tokens());
            let (start, end) = (tokens.start.max(range.start), tokens.end.min(range.end));
            (start < end).then(|| ImagePart {
                first: start - range.start,
                rows,
                of_image: start - tokens.start..end - tokens.start,
            })
        })
    }
}

/// Part of an image in a range of tokens.
pub(crate) struct ImagePart<'a> {
    /// Index in the range of its first token.
    pub(crate) first: usize,
    rows: &'a ImageRows,
    of_image: Range<usize>,
}

impl<'a> ImagePart<'a> {
    /// Rows of the range that it replaces.
    pub(crate) fn tokens(&self) -> Range<usize> {
        self.first..self.first + self.of_image.len()
    }

    /// Values that replace embeddings, or with an index into DeepStack's rows the added values;
    /// empty without such rows.
    pub(crate) fn values(&self, deepstack: Option<usize>) -> &'a [f32] {
        let ImageRows { width, values, deepstack: added, .. } = self.rows;
        let all = deepstack.map_or(Some(values), |layer| added.get(layer));
        all.and_then(|all| all.get(self.of_image.start * width..self.of_image.end * width))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(place: usize, grid: [usize; 2]) -> ContentDigest {
        ContentDigest { place, digest: [0; 32], grid: Some(grid) }
    }

    #[test]
    fn an_image_takes_as_many_positions_as_its_longer_side() {
        let contents = [image(2, [2, 3]), image(9, [1, 1])];
        let ids: Vec<_> = (0..11).map(|i| position_ids(&contents, i)).collect();
        let text = |id| [id; 3];
        let first = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]];
        let expected = [text(0), text(1)].into_iter().chain(first);
        let expected = expected.chain([text(5), text(6), text(7)]);
        assert_eq!(ids, expected.collect::<Vec<_>>());
        assert_eq!(saved_positions(&contents, 7), 0);
        assert_eq!(saved_positions(&contents, 8), 3);
    }

    #[test]
    fn an_image_surrounds_all_its_tokens_but_the_first() {
        let contents = [image(2, [2, 3])];
        let around = |index| image_around(&contents, index).is_some();
        assert_eq!((0..10).filter(|i| around(*i)).collect::<Vec<_>>(), [3, 4, 5, 6, 7]);
    }
}
