//! Content of a message as templates take it: a text, or a list of texts and images.

use serde::{Serialize, Serializer};

use super::message::{Message, MessageImage};

/// Text of a message, and the images in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Content {
    pub(super) text: String,
    /// Images, ascending by offset, each between two characters.
    images: Vec<MessageImage>,
}

/// A part of a content, in OpenAI's form, without the image itself.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum ContentPart<'a> {
    Text {
        text: &'a str,
    },
    Image {
        #[serde(skip)]
        image: MessageImage,
    },
}

impl Content {
    /// The content of `message`, with each piece of its text as `literal` gives it.
    ///
    /// # Errors
    /// The offset of an image is inside a character, beyond the content, or before the offset of an
    /// earlier image.
    pub(super) fn new(message: &Message, literal: impl Fn(&str) -> String) -> Result<Self, String> {
        let Message { content: given, images, .. } = message;
        let mut content = Self::default();
        let mut from = 0;
        for image in images {
            let piece = given.get(from..image.at).ok_or_else(|| {
                format!(
                    "expected images at ascending offsets between characters of {} bytes of \
                     content, got offset {} after {from}",
                    given.len(),
                    image.at
                )
            })?;
            content.text += &literal(piece);
            content.images.push(MessageImage { at: content.text.len(), ..*image });
            from = image.at;
        }
        content.text += &literal(&given[from..]);
        Ok(content)
    }

    /// An image of no conversation.
    pub(super) fn any_image() -> Self {
        Self {
            text: String::new(),
            images: vec![MessageImage { at: 0, tokens: 1, digest: [0; 32] }],
        }
    }

    pub(super) fn images(&self) -> &[MessageImage] {
        &self.images
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.images.is_empty()
    }

    /// Bytes of the content.
    pub(super) fn len(&self) -> usize {
        self.text.len() + size_of_val(&*self.images)
    }

    /// Appends another content after a blank line.
    pub(super) fn append(&mut self, other: impl Into<Self>) {
        let other = other.into();
        if !self.is_empty() && !other.is_empty() {
            self.text.push_str("\n\n");
        }
        self.join(other);
    }

    /// Appends another content without anything between.
    pub(super) fn join(&mut self, other: impl Into<Self>) {
        let Self { text, images } = other.into();
        let start = self.text.len();
        self.images.extend(images.iter().map(|i| MessageImage { at: start + i.at, ..*i }));
        self.text.push_str(&text);
    }

    /// The content between two texts.
    pub(super) fn within(self, before: &str, after: &str) -> Self {
        let mut whole = Self::from(before);
        whole.join(self);
        whole.join(after);
        whole
    }

    /// Takes the images out of the content, and leaves a text in their places.
    pub(super) fn take_images(&mut self, instead: &str) -> Self {
        let mut text = String::with_capacity(self.text.len());
        for part in self.parts() {
            text.push_str(match part {
                ContentPart::Text { text } => text,
                ContentPart::Image { .. } => instead,
            });
        }
        self.text = text;
        let images = std::mem::take(&mut self.images).into_iter();
        let images = images.map(|image| MessageImage { at: 0, ..image }).collect();
        Self { text: String::new(), images }
    }

    /// Texts and images in their order, without empty texts.
    fn parts(&self) -> Vec<ContentPart<'_>> {
        let mut parts = Vec::new();
        let mut from = 0;
        for image in &self.images {
            parts.push(ContentPart::Text { text: &self.text[from..image.at] });
            parts.push(ContentPart::Image { image: *image });
            from = image.at;
        }
        parts.push(ContentPart::Text { text: &self.text[from..] });
        parts.retain(|part| !matches!(part, ContentPart::Text { text: "" }));
        parts
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self { text, images: Vec::new() }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// A string without images, else the list of parts.
impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.images.is_empty() {
            true => self.text.serialize(serializer),
            false => self.parts().serialize(serializer),
        }
    }
}
