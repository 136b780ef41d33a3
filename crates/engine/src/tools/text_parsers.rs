//! Parsers of text files.

use std::path::Path;

use moeflux_base::{Error, TextFile};
use moeflux_sampling::GenerationConfig;
use moeflux_text::{ChatOptions, ChatTemplate, Message, Tokenizer, TokenizerConfig};

use super::parser::Parser;

/// Runs the parser of a text file.
pub(super) fn text(parser: Parser, bytes: &[u8], folder: &Path) -> Result<(), Error> {
    match parser {
        Parser::Tokenizer => try_tokenizer(&Tokenizer::from_bytes(bytes, folder)?),
        Parser::Tiktoken => {
            let file = |bytes| TextFile { bytes, path: folder.into() };
            try_tokenizer(&Tokenizer::from_tiktoken(&file(bytes), &file(b"{}"))?)
        }
        Parser::TokenizerConfig => {
            let config = TokenizerConfig::from_bytes(bytes, folder)?;
            try_template(ChatTemplate::from_files(None, &config)?)
        }
        Parser::Template => {
            let file = TextFile { bytes, path: folder.into() };
            try_template(ChatTemplate::from_files(Some(&file), &TokenizerConfig::default())?)
        }
        Parser::GenerationConfig => GenerationConfig::from_bytes(bytes, folder).map(drop),
        _ => Ok(()),
    }
}

/// Encodes a text, and decodes it and the first ids token by token.
fn try_tokenizer(tokenizer: &Tokenizer) -> Result<(), Error> {
    let ids = tokenizer.encode("Ab ab, é狐 12\n", true)?;
    tokenizer.decode(&ids, false)?;
    let mut decoder = tokenizer.decoder();
    for id in ids.into_iter().chain(0..tokenizer.vocab_size().min(64) as u32) {
        decoder.push(id)?;
    }
    decoder.finish().map(drop)
}

/// Renders a conversation.
fn try_template(template: Option<ChatTemplate>) -> Result<(), Error> {
    let messages = [Message::system("s"), Message::user("u"), Message::assistant("a")];
    template
        .map_or(Ok(String::new()), |t| t.render(&messages, true, &ChatOptions::default()))
        .map(drop)
}
