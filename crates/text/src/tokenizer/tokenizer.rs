//! The tokenizer of a model.

use std::{
    collections::HashSet,
    io::Read,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use moeflux_base::{Error, seam::guarded};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{
    DecoderWrapper, Encoding, Model as _, NormalizerWrapper, PostProcessor as _,
    PostProcessorWrapper, PreTokenizerWrapper, Token, TokenizerImpl,
};

use super::{
    checks,
    decoder::{self, Decoder},
    literal_text::LiteralText,
    model::TokenModel,
    pieces::{self, Splitter},
    tokenizer_json::TokenizerJson,
};

/// Bytes of a text from which on it is encoded in pieces.
pub(super) const LONG_TEXT: usize = 64 << 10;
/// Text that is encoded and decoded once when a tokenizer is read, to find out what fails.
const SAMPLE: &str = "Ab 1, é\n";

/// Tokenizer of the library, with a model in flat memory.
pub(super) type Inner = TokenizerImpl<
    TokenModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// Tokenizer of a checkpoint, read from `tokenizer.json` or `tiktoken.model`. Clones share it.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<TokenizerInner>);

#[derive(Debug)]
struct TokenizerInner {
    inner: Inner,
    special: HashSet<u32>,
    vocab_size: usize,
    /// Maximum bytes of a text per token; `None` without a bound.
    longest: Option<usize>,
    around: SpecialAround,
    /// Made at the first text with special tokens that stay text.
    literal: OnceLock<LiteralText>,
    /// Whether the tokens of this thread's text are needed no more.
    is_cancelled: OnceLock<fn() -> bool>,
    path: PathBuf,
}

/// Special token as it is spelled in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpecialToken {
    pub(crate) text: String,
    /// Whether the token takes the white space before it.
    pub(crate) takes_before: bool,
    /// Whether the token takes the white space behind it.
    pub(crate) takes_behind: bool,
}

/// Text of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenText {
    /// Bytes of text.
    Bytes(Vec<u8>),
    /// A mark, which is no text.
    Mark(String),
}

/// Special tokens that a tokenizer puts around a text.
#[derive(Debug, Default)]
struct SpecialAround {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl SpecialAround {
    /// # Errors
    /// The library's.
    fn new(inner: &Inner) -> tokenizers::Result<Self> {
        /// Stands for the text.
        const TEXT: u32 = u32::MAX;
        let Some(template) = inner.get_post_processor() else { return Ok(Self::default()) };
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let ids = template.process(text, None, true)?;
        let mut parts = ids.get_ids().split(|id| *id == TEXT).map(<[u32]>::to_vec);
        let before = parts.next().unwrap_or_default();
        Ok(Self { before, after: parts.next_back().unwrap_or_default() })
    }
}

/// Parses a part of a tokenizer after it was checked. A null is none.
fn parse_part<T: DeserializeOwned>(part: Value) -> Result<Option<T>, String> {
    checks::check(&part)?;
    serde_json::from_value(part).map_err(|e| e.to_string())
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`; `path` is for error messages.
    ///
    /// Truncation, padding and dropout in the file are training settings and are ignored: prompts
    /// are encoded completely.
    ///
    /// # Errors
    /// [`Error::Text`] if the bytes are not a tokenizer, or it has no tokens.
    pub fn from_bytes(tokenizer_json: &[u8], path: &Path) -> Result<Tokenizer, Error> {
        Self::from_reader(tokenizer_json, path)
    }

    /// Reads a `tokenizer.json` as a stream, in little more memory than the result needs.
    ///
    /// # Errors
    /// As [`Tokenizer::from_bytes`]; reading fails.
    pub fn from_reader(tokenizer_json: impl Read, path: &Path) -> Result<Tokenizer, Error> {
        let read = guarded(|| {
            let json = TokenizerJson::read(tokenizer_json)
                .map_err(|e| format!("{e}; is the download complete?"))?;
            Self::build(json, path)
        });
        let read = read.unwrap_or_else(|panic| Err(library_failed(&panic)));
        read.map_err(|e| Error::Text {
            path: path.to_path_buf(),
            problem: format!("not a tokenizer that can be read: {e}"),
        })
    }

    fn build(mut json: TokenizerJson, path: &Path) -> Result<Tokenizer, String> {
        let model = json.take_model()?;
        let mut inner = Inner::new(TokenModel::from(model));
        let error = |e: tokenizers::Error| e.to_string();
        inner
            .with_normalizer(parse_part::<NormalizerWrapper>(json.normalizer)?)
            .map_err(error)?
            .with_pre_tokenizer(parse_part::<PreTokenizerWrapper>(json.pre_tokenizer)?)
            .with_post_processor(parse_part::<PostProcessorWrapper>(json.post_processor)?)
            .with_decoder(parse_part::<DecoderWrapper>(json.decoder)?);
        inner.add_tokens(json.added_tokens.into_iter().map(|added| added.token)).map_err(error)?;
        Self::assemble(inner, path)
    }

    /// Tries the tokenizer on a short text, as the library panics on some settings only then.
    pub(super) fn assemble(inner: Inner, path: &Path) -> Result<Tokenizer, String> {
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let rows = added.keys().map(|id| *id as usize + 1).max();
        let vocab_size = rows.into_iter().chain([inner.get_model().rows()]).max().unwrap_or(0);
        if vocab_size == 0 {
            return Err("it has no tokens".into());
        }
        let longest = pieces::longest(&inner);
        let around = guarded(|| SpecialAround::new(&inner))
            .map_err(|panic| library_failed(&panic))?
            .map_err(|e| format!("its post_processor fails: {e}"))?;
        let path = path.to_path_buf();
        let tokenizer = Tokenizer(Arc::new(TokenizerInner {
            inner,
            special,
            vocab_size,
            longest,
            around,
            literal: OnceLock::new(),
            is_cancelled: OnceLock::new(),
            path,
        }));
        // A text of unknown characters is an error of that text alone.
        guarded(|| {
            let ids = tokenizer.0.inner.encode_fast(SAMPLE, false);
            let ids = ids.map(|ids| ids.get_ids().to_vec()).unwrap_or_default();
            let _ = tokenizer.decode_all(&ids, true);
        })
        .map_err(|panic| library_failed(&panic))?;
        Ok(tokenizer)
    }

    /// Token ids of `text`. Special tokens spelled out in the text become their ids, as chat
    /// templates need. `add_special` also adds the tokens that the tokenizer puts around a text; a
    /// rendered chat template contains them already.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        Ok(self.encode_within(text, add_special, usize::MAX)?.unwrap_or_default())
    }

    /// Token ids of `text` as [`encode`](Self::encode), or `None` if they are more than `limit`.
    /// Ends as soon as that is certain.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_within(
        &self,
        text: &str,
        add_special: bool,
        limit: usize,
    ) -> Result<Option<Vec<u32>>, Error> {
        if self.exceeds(text.len(), limit) {
            return Ok(None);
        }
        let mut ids = Vec::new();
        let encoded = self.encode_pieces(text, add_special, &mut |piece| {
            ids.extend_from_slice(piece);
            if ids.len() > limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        Ok(encoded?.is_continue().then_some(ids))
    }

    /// Whether a text of `bytes` certainly has more than `limit` tokens.
    pub(crate) fn exceeds(&self, bytes: usize, limit: usize) -> bool {
        self.0.longest.is_some_and(|longest| bytes.div_ceil(longest.max(1)) > limit)
    }

    /// Gives the token ids of `text` to `take` in order, as long as it goes on. A long text is
    /// encoded in pieces, so that little memory is needed besides the text.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_pieces(
        &self,
        text: &str,
        add_special: bool,
        take: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, Error> {
        let TokenizerInner { inner, around, .. } = &*self.0;
        if add_special && !around.before.is_empty() && take(&around.before).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let mut take = |ids: &[u32]| match self.is_cancelled() {
            true => ControlFlow::Break(()),
            false => take(ids),
        };
        let encoded = guarded(|| match text.len() {
            ..LONG_TEXT => Ok(take(inner.encode_fast(text, false)?.get_ids())),
            _ => pieces::encode(&Splitter::new(inner), text, &mut take),
        });
        let encoded = self.encoded(encoded)?;
        if encoded.is_continue() && add_special && !around.after.is_empty() {
            return Ok(take(&around.after));
        }
        Ok(encoded)
    }

    /// Token ids of `text` as [`encode_within`](Self::encode_within), without any special token:
    /// those spelled out stay text. The text continues another one.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn encode_literal(
        &self,
        text: &str,
        limit: usize,
    ) -> Result<Option<Vec<u32>>, Error> {
        if self.exceeds(text.len(), limit) {
            return Ok(None);
        }
        let TokenizerInner { inner, literal, .. } = &*self.0;
        let mut ids = Vec::new();
        let encoded = guarded(|| {
            let literal = literal.get_or_init(|| LiteralText::new(inner));
            literal.encode(inner, text, &mut |piece| {
                ids.extend_from_slice(piece);
                let is_enough = ids.len() > limit || self.is_cancelled();
                if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        });
        Ok(self.encoded(encoded)?.is_continue().then_some(ids))
    }

    /// Ends the encoding of a long text early, with [`Error::Cancelled`], where `is_cancelled` says
    /// on its thread that the tokens are needed no more. Clones share the function, which is set
    /// once.
    pub fn cancel_when(&self, is_cancelled: fn() -> bool) {
        // A server has one rule.
        let _ = self.0.is_cancelled.set(is_cancelled);
    }

    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.get().is_some_and(|is_cancelled| is_cancelled())
    }

    /// Result of the library, unless it was cancelled.
    fn encoded(
        &self,
        encoded: Result<tokenizers::Result<ControlFlow<()>>, String>,
    ) -> Result<ControlFlow<()>, Error> {
        let encoded = encoded
            .unwrap_or_else(|panic| Err(library_failed(&panic).into()))
            .map_err(|e| self.problem(format!("cannot encode the text: {e}")))?;
        if encoded.is_break() && self.is_cancelled() {
            return Err(Error::Cancelled);
        }
        Ok(encoded)
    }

    /// Special tokens, and the added token `also`, as they are spelled in a text.
    pub(crate) fn special_tokens(&self, also: Option<u32>) -> Vec<SpecialToken> {
        let added = self.0.inner.get_added_vocabulary().get_added_tokens_decoder().iter();
        let chosen = added.filter(|(id, token)| token.special || also == Some(**id));
        let special = chosen.map(|(_, token)| SpecialToken {
            text: token.content.clone(),
            takes_before: token.lstrip,
            takes_behind: token.rstrip,
        });
        special.collect()
    }

    /// Decodes all `ids` at once. Invalid UTF-8 becomes U+FFFD. Ids without a token are skipped, as
    /// the vocabulary of a model is often padded.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        guarded(|| self.decode_all(ids, skip_special))
            .unwrap_or_else(|panic| Err(library_failed(&panic).into()))
            .map_err(|e| self.problem(format!("cannot decode: {e}")))
    }

    fn decode_all(&self, ids: &[u32], skip_special: bool) -> tokenizers::Result<String> {
        let is_text =
            |&id: &u32| !(skip_special && self.is_special(id)) && self.piece(id).is_some();
        let Some(first) = ids.iter().position(is_text) else {
            // Some decoders panic on empty input.
            return Ok(String::new());
        };
        self.0.inner.decode(&ids[first..], skip_special)
    }

    /// Incremental [`Decoder`] that omits special tokens.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// Largest id plus one, added tokens included. The model's vocabulary must be at least this
    /// large.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// Id of a token as spelled in the vocabulary, for example `<|im_end|>`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.inner.token_to_id(token)
    }

    /// Whether `id` is a special token, such as `<|im_end|>`, which is not part of the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.contains(&id)
    }

    /// Whether `id` is a token that was added to the vocabulary of the model.
    pub(crate) fn is_added(&self, id: u32) -> bool {
        self.0.inner.get_added_vocabulary().simple_id_to_token(id).is_some()
    }

    /// Token as spelled in the vocabulary, the input of the tokenizer's decoder.
    pub(super) fn piece(&self, id: u32) -> Option<String> {
        let inner = &self.0.inner;
        inner
            .get_added_vocabulary()
            .simple_id_to_token(id)
            .or_else(|| inner.get_model().id_to_token(id))
    }

    /// Text of a token between others; `None` for an id without a token. An added token that spells
    /// a mark is one, special or not.
    pub(crate) fn token_text(&self, id: u32) -> Option<TokenText> {
        let piece = self.piece(id)?;
        let is_mark = || {
            let first = piece.chars().next();
            first.is_some_and(|c| !c.is_alphanumeric() && !c.is_whitespace())
        };
        if self.is_special(id) || self.is_added(id) && is_mark() {
            return Some(TokenText::Mark(piece));
        }
        Some(TokenText::Bytes(match self.is_byte_level() {
            true => decoder::piece_bytes(&piece),
            false => decoder::fallback_bytes(&piece),
        }))
    }

    /// Bytes of a token between others, a part of a character too; `None` for an id without a
    /// token. A special token has those of its name.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        match self.token_text(id)? {
            TokenText::Mark(text) => Some(text.into_bytes()),
            TokenText::Bytes(bytes) => Some(bytes),
        }
    }

    /// Whether the vocabulary is byte-level, as in GPT-2.
    pub(super) fn is_byte_level(&self) -> bool {
        matches!(self.0.inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
    }

    pub(crate) fn problem(&self, problem: String) -> Error {
        Error::Text { path: self.0.path.clone(), problem }
    }
}

/// Problem of a file on which the library panicked.
fn library_failed(panic: &str) -> String {
    format!("the tokenizers library fails on it ({panic}): it is damaged, or made by hand")
}
#[cfg(test)]
mod tests;
