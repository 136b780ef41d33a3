//! `tokenizer.json` as a stream: vocabulary and merges go into flat memory as they are read.
//!
//! The vocabulary and the merges of a published file have up to 40 MB; the rest, a few MB at most,
//! is read as JSON values for the `tokenizers` library.

use std::{
    cell::Cell,
    fmt,
    io::{self, BufReader, Read},
};

use moeflux_base::seam::MAX_TOKENIZER;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, ModelWrapper};

use super::byte_pairs::{BytePairSettings, BytePairs, MergeList, TokenList};

/// Maximum bytes besides vocabulary and merges.
const MAX_SETTINGS: usize = 8 << 20;
/// Maximum bytes of the tokens of other models than BPE, which the library holds.
const MAX_OTHER_TOKENS: usize = 8 << 20;
/// Bytes read at a time.
const BLOCK: usize = 64 << 10;

/// Bytes of settings that may still be read.
struct SettingsLimit {
    left: Cell<usize>,
    /// Whether the reader is within vocabulary or merges, which do not count.
    in_tables: Cell<bool>,
}

impl SettingsLimit {
    /// Runs `read`, whose bytes do not count. The reader is up to a block ahead.
    fn in_tables<T>(&self, read: impl FnOnce() -> T) -> T {
        self.in_tables.set(true);
        let read = read();
        self.in_tables.set(false);
        read
    }
}

/// Reader that counts settings, and ends with an error when there are too many.
struct LimitedReader<'a, R> {
    inner: R,
    limit: &'a SettingsLimit,
    file_left: u64,
}

impl<R: Read> Read for LimitedReader<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buf)?;
        let too_large = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let file_left = self.file_left.checked_sub(read as u64);
        self.file_left = file_left
            .ok_or_else(|| too_large(format!("a tokenizer has at most {MAX_TOKENIZER} bytes")))?;
        if !self.limit.in_tables.get() {
            let left = self.limit.left.get().checked_sub(read);
            self.limit.left.set(left.ok_or_else(|| {
                too_large(format!("more than {MAX_SETTINGS} bytes besides vocabulary and merges"))
            })?);
        }
        Ok(read)
    }
}

/// Contents of a `tokenizer.json`.
#[derive(Default)]
pub(super) struct TokenizerJson {
    pub(super) added_tokens: Vec<ListedAddedToken>,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) post_processor: Value,
    pub(super) decoder: Value,
    model: Option<ModelJson>,
}

/// Entry of `added_tokens`. The id follows from the vocabulary and the order.
#[derive(Deserialize)]
pub(super) struct ListedAddedToken {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    pub(super) token: AddedToken,
}

/// Contents of `model`.
#[derive(Default)]
struct ModelJson {
    settings: Map<String, Value>,
    vocabulary: Option<Vocabulary>,
    merges: Option<MergeList>,
}

/// Vocabulary of a model.
enum Vocabulary {
    /// Ids by token, as most models have.
    Ids(TokenList),
    /// Scores by token, of unigram models.
    Scores(Vec<Value>),
}

/// Model of a tokenizer.
pub(super) enum ReadModel {
    /// Byte pair encoding.
    Bpe(BytePairs),
    /// Other models, which the library holds.
    Other(ModelWrapper),
}

impl TokenizerJson {
    /// # Errors
    /// The bytes are not a tokenizer, or too many.
    pub(super) fn read(reader: impl Read) -> Result<Self, serde_json::Error> {
        let limit =
            SettingsLimit { left: Cell::new(MAX_SETTINGS + BLOCK), in_tables: Cell::new(false) };
        let reader = LimitedReader { inner: reader, limit: &limit, file_left: MAX_TOKENIZER };
        let reader = BufReader::with_capacity(BLOCK, reader);
        let mut json = serde_json::Deserializer::from_reader(reader);
        let read = FileVisitor(&limit).deserialize(&mut json)?;
        json.end()?;
        Ok(read)
    }

    /// The model.
    ///
    /// # Errors
    /// There is none, or its parts contradict each other.
    pub(super) fn take_model(&mut self) -> Result<ReadModel, String> {
        let model = self.model.take().ok_or("it has no model")?;
        let ModelJson { mut settings, vocabulary, merges } = model;
        let kind = settings.get("type").and_then(Value::as_str);
        let is_bpe = kind.map_or(merges.is_some(), |kind| kind == "BPE");
        match vocabulary {
            Some(Vocabulary::Ids(tokens)) if is_bpe => {
                let merges = merges.ok_or("its model has no merges")?;
                let settings = BytePairSettings::deserialize(Value::Object(settings))
                    .map_err(|e| e.to_string())?;
                Ok(ReadModel::Bpe(BytePairs::new(tokens, merges, settings)?))
            }
            _ if is_bpe => Err("its model has no vocabulary".into()),
            vocabulary => {
                let vocabulary = match vocabulary {
                    Some(Vocabulary::Ids(tokens)) if tokens.bytes() > MAX_OTHER_TOKENS => {
                        return Err(format!(
                            "a vocabulary of more than {MAX_OTHER_TOKENS} bytes that is not BPE"
                        ));
                    }
                    Some(Vocabulary::Ids(tokens)) => {
                        let entry = |(token, id): (&str, u32)| (token.to_owned(), id.into());
                        Some(Value::Object(tokens.iter().map(entry).collect()))
                    }
                    Some(Vocabulary::Scores(scores)) => Some(Value::Array(scores)),
                    None => None,
                };
                settings.extend(vocabulary.map(|vocabulary| ("vocab".to_owned(), vocabulary)));
                let model = serde_json::from_value(Value::Object(settings));
                model.map(ReadModel::Other).map_err(|e| e.to_string())
            }
        }
    }
}

#[derive(Clone, Copy)]
struct FileVisitor<'a>(&'a SettingsLimit);

impl<'de> DeserializeSeed<'de> for FileVisitor<'_> {
    type Value = TokenizerJson;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<TokenizerJson, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FileVisitor<'_> {
    type Value = TokenizerJson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tokenizer")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TokenizerJson, A::Error> {
        let mut file = TokenizerJson::default();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "version" => {
                    let version: String = map.next_value()?;
                    if version != "1.0" {
                        return Err(A::Error::custom(format!("unknown version {version:?}")));
                    }
                }
                "added_tokens" => file.added_tokens = map.next_value()?,
                "normalizer" => file.normalizer = map.next_value()?,
                "pre_tokenizer" => file.pre_tokenizer = map.next_value()?,
                "post_processor" => file.post_processor = map.next_value()?,
                "decoder" => file.decoder = map.next_value()?,
                "model" => file.model = Some(map.next_value_seed(ModelVisitor(self.0))?),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(file)
    }
}

#[derive(Clone, Copy)]
struct ModelVisitor<'a>(&'a SettingsLimit);

impl<'de> DeserializeSeed<'de> for ModelVisitor<'_> {
    type Value = ModelJson;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<ModelJson, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ModelVisitor<'_> {
    type Value = ModelJson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the model of a tokenizer")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ModelJson, A::Error> {
        let mut model = ModelJson::default();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "vocab" => {
                    model.vocabulary = Some(map.next_value_seed(VocabularyVisitor(self.0))?);
                }
                "merges" => {
                    let merges = self.0.in_tables(|| map.next_value_seed(MergesVisitor))?;
                    model.merges = Some(merges);
                }
                _ => {
                    model.settings.insert(key, map.next_value()?);
                }
            }
        }
        Ok(model)
    }
}

#[derive(Clone, Copy)]
struct VocabularyVisitor<'a>(&'a SettingsLimit);

impl<'de> DeserializeSeed<'de> for VocabularyVisitor<'_> {
    type Value = Vocabulary;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Vocabulary, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for VocabularyVisitor<'_> {
    type Value = Vocabulary;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
        let mut tokens = TokenList::default();
        self.0.in_tables(|| {
            while map.next_key_seed(TokenVisitor(&mut tokens))?.is_some() {
                let id = map.next_value()?;
                tokens.set_last_id(id);
            }
            Ok(Vocabulary::Ids(tokens))
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocabulary, A::Error> {
        let mut scores = Vec::new();
        while let Some(score) = seq.next_element()? {
            scores.push(score);
        }
        Ok(Vocabulary::Scores(scores))
    }
}

/// Appends a token to a list. Its id follows.
struct TokenVisitor<'a>(&'a mut TokenList);

impl<'de> DeserializeSeed<'de> for TokenVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for TokenVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E: serde::de::Error>(self, token: &str) -> Result<(), E> {
        self.0.push(token, 0).map_err(E::custom)
    }
}

struct MergesVisitor;

impl<'de> DeserializeSeed<'de> for MergesVisitor {
    type Value = MergeList;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<MergeList, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for MergesVisitor {
    type Value = MergeList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MergeList, A::Error> {
        let mut merges = MergeList::default();
        while seq.next_element_seed(MergeVisitor(&mut merges))?.is_some() {}
        Ok(merges)
    }
}

/// Appends a merge to a list: `"a b"` or `["a", "b"]`.
struct MergeVisitor<'a>(&'a mut MergeList);

impl<'de> DeserializeSeed<'de> for MergeVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MergeVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge of two tokens")
    }

    fn visit_str<E: serde::de::Error>(self, line: &str) -> Result<(), E> {
        self.0.push_line(line).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut next = || seq.next_element::<String>();
        let (Some(left), Some(right), None) = (next()?, next()?, next()?) else {
            return Err(A::Error::custom("a merge is not two tokens"));
        };
        self.0.push(&left, &right).map_err(A::Error::custom)
    }
}
