//! Images among the tokens of a prompt.

#[cfg(test)]
mod tests;

use std::iter::{from_fn, repeat_n};

use moeflux_base::Error;
use serde::{Deserialize, Serialize};

use crate::{
    chat::{ChatOptions, Message, MessageImage},
    text::Text,
};

/// Image among the tokens of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedImage {
    /// Index of its first token.
    pub place: usize,
    /// Number of its tokens, all of which are the model's placeholder.
    pub tokens: usize,
    /// SHA-256 of its pixels as the model sees them.
    pub digest: [u8; 32],
}

impl PlacedImage {
    /// Index of the token after the image.
    fn end(&self) -> usize {
        self.place.saturating_add(self.tokens)
    }

    fn is(&self, image: &MessageImage) -> bool {
        self.tokens == image.tokens && self.digest == image.digest
    }
}

/// Tokens in which each image has all of its placeholders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpandedTokens {
    /// Tokens with the placeholders.
    pub tokens: Vec<u32>,
    /// Images among them, ascending by place.
    pub images: Vec<PlacedImage>,
}

impl ExpandedTokens {
    /// Appends the tokens that follow these.
    pub(super) fn append(&mut self, next: Self) {
        let start = self.tokens.len();
        let moved = |image: PlacedImage| PlacedImage { place: start + image.place, ..image };
        self.images.extend(next.images.into_iter().map(moved));
        self.tokens.extend(next.tokens);
    }
}

impl Text {
    /// Repeats the placeholder of each image to the number of the image's tokens. `tokens` has one
    /// placeholder per image.
    ///
    /// # Errors
    /// There are more or fewer placeholders than images; an image has no tokens; the result is
    /// longer than the context.
    pub fn expand_images(
        &self,
        tokens: &[u32],
        images: &[MessageImage],
    ) -> Result<ExpandedTokens, Error> {
        let added = self.added_by_images(self.placeholders(tokens), images)?;
        let length = tokens.len().saturating_add(added);
        if length > self.limit {
            return Err(self.too_long(length));
        }
        let mut expanded =
            ExpandedTokens { tokens: Vec::with_capacity(length), ..ExpandedTokens::default() };
        let mut images = images.iter();
        for token in tokens {
            let is_placeholder = self.image_token() == Some(*token);
            let image = if is_placeholder { images.next() } else { None };
            let place = expanded.tokens.len();
            let count = image.map_or(1, |image| image.tokens);
            expanded.tokens.extend(repeat_n(*token, count));
            expanded.images.extend(image.map(|image| PlacedImage {
                place,
                tokens: count,
                digest: image.digest,
            }));
        }
        Ok(expanded)
    }

    /// Tokens of a text that is no conversation, with images at their offsets. Around each image
    /// are the tokens that the chat template writes there.
    ///
    /// # Errors
    /// As for [`Text::chat`]; an offset is not between two characters of the text.
    pub fn encode_with_images(
        &self,
        text: &str,
        images: &[MessageImage],
    ) -> Result<ExpandedTokens, Error> {
        if images.is_empty() {
            return Ok(ExpandedTokens { tokens: self.encode(text)?, images: Vec::new() });
        }
        let image = MessageImage { at: 0, tokens: 1, digest: [0; 32] };
        let options = ChatOptions::default();
        let question = |images| self.chat(&[Message::user("").images(images)], &options);
        let (with, without) = (question(vec![image])?, question(Vec::new())?);
        let same = |a: &mut dyn Iterator<Item = &u32>, b: &mut dyn Iterator<Item = &u32>| {
            a.zip(b).take_while(|(a, b)| a == b).count()
        };
        let start = same(&mut with.iter(), &mut without.iter());
        let rest = (&with[start..], &without[start..]);
        let end = with.len() - same(&mut rest.0.iter().rev(), &mut rest.1.iter().rev());
        let (mut tokens, mut done) = (Vec::new(), 0);
        for (index, image) in images.iter().enumerate() {
            let part = text.get(done..image.at);
            let part = part.ok_or_else(|| {
                let problem = format!("expected images at ascending offsets, got {}", image.at);
                self.tokenizer().problem(problem)
            })?;
            tokens.extend(match index {
                0 => self.encode(part)?,
                _ => self.encode_continuation(part)?,
            });
            tokens.extend_from_slice(&with[start..end]);
            done = image.at;
        }
        tokens.extend(self.encode_continuation(&text[done..])?);
        self.expand_images(&tokens, images)
    }

    /// Number of placeholders among `tokens`.
    pub(super) fn placeholders(&self, tokens: &[u32]) -> usize {
        tokens.iter().filter(|token| self.image_token() == Some(**token)).count()
    }

    /// Number of tokens that images have besides the `placeholders` of a prompt.
    ///
    /// # Errors
    /// There are more or fewer placeholders than images; an image has no tokens.
    pub(super) fn added_by_images(
        &self,
        placeholders: usize,
        images: &[MessageImage],
    ) -> Result<usize, Error> {
        let count = images.len();
        let problem = match self.image_token() {
            _ if images.iter().any(|image| image.tokens == 0) => {
                "expected images of at least one token, got one of 0".to_owned()
            }
            _ if placeholders == count => {
                let added = images.iter().map(|image| image.tokens.saturating_sub(1));
                return Ok(added.fold(0, usize::saturating_add));
            }
            None => format!(
                "the model has no placeholder for images: expected text alone, got {count} images"
            ),
            Some(token) => format!(
                "expected {count} placeholders of images (token {token}), one for each image, got \
                 {placeholders}; some chat templates leave out images that are not in messages of \
                 the user"
            ),
        };
        Err(self.tokenizer().problem(problem))
    }

    /// Whether `images` are the first of `given`, and have placeholders in `tokens`, one image
    /// after the other.
    pub(super) fn has_images(
        &self,
        tokens: &[u32],
        images: &[PlacedImage],
        given: &[MessageImage],
    ) -> bool {
        let mut from = 0;
        let mut is_at = |image: &PlacedImage| {
            let last = std::mem::replace(&mut from, image.end());
            let run = tokens.get(image.place..from);
            image.place >= last && run.is_some_and(|run| self.placeholders(run) == run.len())
        };
        let mut pairs = images.iter().zip(given);
        images.len() <= given.len() && pairs.all(|(image, given)| image.is(given) && is_at(image))
    }

    /// Lengths of the prefixes of a prompt that end with a special token, or with an image.
    pub(super) fn special_ends<'a>(
        &'a self,
        prompt: &'a ExpandedTokens,
    ) -> impl Iterator<Item = usize> + 'a {
        let mut images = prompt.images.iter().peekable();
        let mut from = 0;
        from_fn(move || {
            loop {
                let at = from;
                from = match images.next_if(|image| image.place == at) {
                    Some(image) => image.end(),
                    None => at + 1,
                };
                if self.is_control(*prompt.tokens.get(at)?) {
                    return Some(from);
                }
            }
        })
    }
}
