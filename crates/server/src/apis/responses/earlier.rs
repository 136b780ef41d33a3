//! Conversation of an earlier response.

use moeflux::Message;

use crate::requests::images::ImageTable;

/// Messages of a response, without its instructions.
#[derive(Clone, Debug, Default)]
pub(super) struct EarlierMessages {
    pub(super) messages: Vec<Message>,
    /// Files of their images.
    pub(super) images: ImageTable,
}
