//! Text in which special tokens stay text.

use std::{mem, ops::ControlFlow};

use tokenizers::{AddedToken, AddedVocabulary};

use super::{
    pieces::{self, Splitter},
    tokenizer::{Inner, LONG_TEXT},
};

/// Token before a text, so that the tokenizer puts no space there. Texts with it do without.
const BEFORE: &str = "\u{10ffff}\u{10fffe}";

/// Added tokens of a tokenizer without the special ones.
pub(super) struct LiteralText {
    added: AddedVocabulary,
}

impl std::fmt::Debug for LiteralText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiteralText").field("added", &self.added.len()).finish()
    }
}

impl LiteralText {
    pub(super) fn new(tokenizer: &Inner) -> Self {
        let mut added = tokenizer.get_added_vocabulary().clone();
        added.set_encode_special_tokens(true);
        let before = AddedToken::from(BEFORE, false).normalized(false);
        // Without it, some tokenizers put a space before the text.
        let _ = added.add_tokens([before], tokenizer.get_model(), tokenizer.get_normalizer());
        Self { added }
    }

    /// Gives the token ids of a text that continues another one to `take`, as long as it goes on.
    ///
    /// # Errors
    /// Errors of the library.
    pub(super) fn encode(
        &self,
        tokenizer: &Inner,
        text: &str,
        take: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> tokenizers::Result<ControlFlow<()>> {
        let splitter = Splitter::with_added(tokenizer, &self.added);
        let has_before = !text.contains(BEFORE);
        let text = if has_before { format!("{BEFORE}{text}") } else { text.to_owned() };
        let mut skipped = usize::from(has_before);
        let mut take = |ids: &[u32]| take(&ids[mem::take(&mut skipped).min(ids.len())..]);
        match text.len() {
            ..LONG_TEXT => Ok(take(&splitter.ids(&text)?)),
            _ => pieces::encode(&splitter, &text, &mut take),
        }
    }
}
