//! Content of a message as it is read: texts and images, in their order.

use moeflux::{Message, text::MessageImage};

use super::images::ImageDigest;
use crate::transport::error::ApiError;

/// Content of a message. Images stand between the bytes of its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) text: String,
    /// Images, ascending by offset.
    pub(crate) images: Vec<MessageImage>,
    /// Whether the last part is a text.
    ends_in_text: bool,
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        let mut content = Self::default();
        content.push_text("", text);
        content
    }
}

impl Content {
    /// Whether it has no parts.
    pub(crate) fn is_empty(&self) -> bool {
        self.images.is_empty() && !self.ends_in_text
    }

    /// Appends a text, after `separator` if it follows another one.
    pub(crate) fn push_text(&mut self, separator: &str, text: &str) {
        if self.ends_in_text {
            self.text.push_str(separator);
        }
        self.text.push_str(text);
        self.ends_in_text = true;
    }

    /// Appends an image of the request's table.
    pub(crate) fn push_image(&mut self, digest: ImageDigest) {
        self.images.push(MessageImage { at: self.text.len(), tokens: 0, digest });
        self.ends_in_text = false;
    }

    /// A message with this content, which is at `path` in the request.
    ///
    /// # Errors
    /// It has images, and a message of the role may have none.
    pub(crate) fn into_message(self, role: &str, path: &str) -> Result<Message, ApiError> {
        if !self.images.is_empty() && !["user", "tool"].contains(&role) {
            let expected = "images are read in messages of users and results of tools";
            let message = format!("{path}: {expected}, got one in a message of the role {role}");
            return Err(ApiError::invalid(path, message));
        }
        Ok(Message::new(role, self.text).images(self.images))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_separate_texts() {
        let mut content = Content::default();
        assert!(content.is_empty());
        content.push_text("\n", "a");
        content.push_text("\n", "b");
        content.push_image([1; 32]);
        content.push_image([2; 32]);
        content.push_text("\n", "");
        content.push_text("\n", "c");
        assert_eq!(content.text, "a\nb\nc");
        let places = content.images.iter().map(|image| (image.at, image.digest[0]));
        assert_eq!(places.collect::<Vec<_>>(), [(3, 1), (3, 2)]);
        let message = content.clone().into_message("user", "content").unwrap();
        assert_eq!(
            (message.content, message.images),
            (content.text.clone(), content.images.clone())
        );
        let error = content.into_message("system", "messages[0].content").unwrap_err();
        assert!(error.message().starts_with("messages[0].content: images are read in messages of"));
    }
}
