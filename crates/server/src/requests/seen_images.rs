//! Images of messages as a model is given them, for tests of all APIs.

use moeflux::ChatOptions;
use serde_json::Value;

use super::{
    ask::{Conversation, MessageList},
    images::{ReadImage, SentImage},
};
use crate::transport::json::{Fields, JsonText};

/// Result of `read` with the fields of a body.
pub(crate) fn with_fields<T>(body: &Value, read: impl FnOnce(&Fields<'_>) -> T) -> T {
    let text = JsonText::new(body.to_string().into_bytes()).unwrap();
    read(&Fields::of_body(text.value()).unwrap())
}

/// Number and role of the message, offset, file and detail of each image.
pub(crate) fn seen_images(list: MessageList) -> Vec<String> {
    let Conversation { mut messages, images, .. } = Conversation::new(list, ChatOptions::default());
    let mut files = Vec::new();
    let of_messages = messages.iter_mut().flat_map(|message| &mut message.images);
    images
        .resolve(of_messages, |image| {
            files.push(image.clone());
            Ok(ReadImage { tokens: 7, digest: [files.len() as u8; 32], note: None })
        })
        .unwrap();
    let mut seen = Vec::new();
    for (i, message) in messages.iter().enumerate() {
        for image in &message.images {
            assert!(image.tokens == 7 && message.content.is_char_boundary(image.at));
            let SentImage { file, detail, .. } = &files[usize::from(image.digest[0]) - 1];
            let (role, at, file) = (&message.role, image.at, str::from_utf8(file).unwrap());
            seen.push(format!("{i} {role} {at} {file} {detail:?}"));
        }
    }
    seen
}
