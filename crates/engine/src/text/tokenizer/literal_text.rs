//! Text in which special tokens stay text.

use std::ops::ControlFlow;

use tokenizers::{AddedToken, AddedVocabulary};

use super::{
    Inner, LONG_TEXT,
    pieces::{self, Splitter},
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

    /// Token ids of a text that continues another one.
    ///
    /// # Errors
    /// Those of the library.
    pub(super) fn encode(&self, tokenizer: &Inner, text: &str) -> tokenizers::Result<Vec<u32>> {
        let splitter = Splitter::with_added(tokenizer, &self.added);
        let has_before = !text.contains(BEFORE);
        let text = if has_before { format!("{BEFORE}{text}") } else { text.to_owned() };
        let mut ids = Vec::new();
        if text.len() < LONG_TEXT {
            ids = splitter.ids(&text)?;
        } else {
            let _ = pieces::encode(&splitter, &text, &mut |piece| {
                ids.extend_from_slice(piece);
                ControlFlow::Continue(())
            })?;
        }
        if has_before {
            ids.remove(0);
        }
        Ok(ids)
    }
}
