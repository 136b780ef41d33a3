//! Tokenizer and chat template of the metadata, as the files that the Hub has.

use std::{collections::HashSet, io::Write};

use moeflux_base::Error;
use serde_json::{Map, Value, json};

use super::{
    super::data_file::DataFile, metadata::Metadata, pre_tokenizers::PreTokenizer,
    scored_merges::each_scored_merge,
};

/// Text of tokens that end an answer, in all models that have them as control tokens.
const END_TOKENS: [&str; 15] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_text|>",
    "[EOS]",
    "[EOT]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<|end|>",
];

/// Types of tokens.
pub(super) const UNKNOWN: u64 = 2;
pub(super) const CONTROL: u64 = 3;
pub(super) const USER_DEFINED: u64 = 4;
pub(super) const BYTE: u64 = 6;

/// Contents of text files.
pub(in crate::checkpoint) struct GgufText {
    /// `tokenizer.json`.
    pub(in crate::checkpoint) tokenizer: Vec<u8>,
    /// `tokenizer_config.json`.
    pub(in crate::checkpoint) config: Vec<u8>,
    /// `generation_config.json`.
    pub(in crate::checkpoint) generation: Vec<u8>,
    /// `chat_template.jinja`.
    pub(in crate::checkpoint) template: Option<Vec<u8>>,
    /// Remark on the pre-tokenizer.
    pub(in crate::checkpoint) note: Option<String>,
}

/// Token with a role besides text.
struct RoleToken {
    id: u64,
    text: String,
    is_control: bool,
}

/// Tokens that a text may not make, and those around it.
struct RoleTokens {
    named: Vec<RoleToken>,
    bos: Option<RoleToken>,
    eos: Option<RoleToken>,
    unknown: Option<RoleToken>,
    /// Ids of all tokens that end an answer.
    end: Vec<u64>,
}

/// A key of the tokenizer.
pub(super) fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// Kind of a tokenizer: how text becomes the characters that are merged, and back.
enum TokenizerKind {
    /// Bytes as characters.
    ByteLevel(PreTokenizer),
    /// U+2581 for spaces, and tokens for bytes that no other token has.
    SpaceMark {
        /// Whether texts begin with BOS where the file does not say.
        adds_bos: bool,
    },
    /// SentencePiece's BPE: as `SpaceMark`, with scores in place of merges.
    Scored {
        /// Whether a space is put before each text between special tokens.
        space_prefix: bool,
    },
}

/// Pre-tokenizer of a kind that has none of [`PreTokenizer`].
const SPACE_MARK: &str = "sarvam-moe";

impl TokenizerKind {
    /// Finds the kind, with the pre-tokenizer that is asked for, or else the file's.
    fn find(metadata: &Metadata, files: &[DataFile], asked: Option<&str>) -> Result<Self, Error> {
        let model = key("model");
        match metadata.text(files, &model)?.as_deref() {
            Some("gpt2") => Self::of_merges(metadata, files, asked),
            Some(other) if asked.is_some() => {
                let problem = format!(
                    "is {other:?}; only \"gpt2\" has pre-tokenizers: leave --tokenizer-pre out"
                );
                Err(metadata.problem(&model, &problem))
            }
            Some("gemma4") => Ok(Self::SpaceMark { adds_bos: true }),
            Some("llama") => {
                let space_prefix = metadata.boolean(&key("add_space_prefix"))?.unwrap_or(true);
                Ok(Self::Scored { space_prefix })
            }
            Some(other) => {
                let problem =
                    format!("is {other:?}, which is not read; read are gpt2, gemma4 and llama");
                Err(metadata.problem(&model, &problem))
            }
            None => Err(metadata.missing(&model)),
        }
    }

    /// The kind of a tokenizer with merges, by its pre-tokenizer.
    fn of_merges(
        metadata: &Metadata,
        files: &[DataFile],
        asked: Option<&str>,
    ) -> Result<Self, Error> {
        let pre = key("pre");
        let named = metadata.text(files, &pre)?.filter(|name| !name.is_empty());
        let name = asked.or(named.as_deref());
        if name == Some(SPACE_MARK) {
            return Ok(Self::SpaceMark { adds_bos: false });
        }
        PreTokenizer::by_name(name).map(Self::ByteLevel).ok_or_else(|| {
            let known: Vec<_> = PreTokenizer::names().chain([SPACE_MARK]).collect();
            let problem = format!(
                "is {:?}, an unknown pre-tokenizer; known are {}: --tokenizer-pre NAME takes one \
                 of them in its place",
                name.unwrap_or_default(),
                known.join(", ")
            );
            metadata.problem(if asked.is_some() { "--tokenizer-pre" } else { &pre }, &problem)
        })
    }

    /// Note on a default pre-tokenizer that the file has or leaves to its reader.
    fn note(&self, metadata: &Metadata) -> Option<String> {
        let Self::ByteLevel(pre) = self else { return None };
        let pre_key = key("pre");
        let problem = match metadata.has(&pre_key) {
            true => "names no model's pre-tokenizer",
            false => "is missing",
        };
        let problem = format!(
            "{problem}: texts are cut as llama.cpp cuts them by default, which makes answers \
             worse; --tokenizer-pre NAME gives the model's pre-tokenizer"
        );
        pre.is_default().then(|| metadata.problem(&pre_key, &problem).to_string())
    }

    /// Whether texts begin with BOS where the file does not say.
    fn adds_bos(&self) -> bool {
        match self {
            Self::ByteLevel(pre) => pre.adds_bos,
            Self::SpaceMark { adds_bos } => *adds_bos,
            Self::Scored { .. } => true,
        }
    }

    /// Id of a role's token where the file does not say.
    fn role_id(&self, role: &str) -> Option<u64> {
        match (self, role) {
            (Self::Scored { .. }, "unknown") => Some(0),
            (Self::Scored { .. }, "bos") => Some(1),
            (Self::Scored { .. }, "eos") => Some(2),
            _ => None,
        }
    }

    /// Entries of a `tokenizer.json` besides tokens and model.
    fn parts(&self) -> Value {
        match self {
            Self::ByteLevel(pre) => {
                let bytes = json!({
                    "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                    "use_regex": false,
                });
                json!({
                    "normalizer": pre.is_composed.then(|| json!({"type": "NFC"})),
                    "pre_tokenizer": pre.json(&bytes),
                    "decoder": bytes,
                })
            }
            Self::SpaceMark { .. } => json!({
                "normalizer": replace(" ", "▁"),
                "pre_tokenizer": {
                    "type": "Split", "pattern": {"String": " "},
                    "behavior": "MergedWithPrevious", "invert": false,
                },
                "decoder": {"type": "Sequence", "decoders": spaces_and_bytes()},
            }),
            Self::Scored { space_prefix } => {
                let prefix = json!({"type": "Prepend", "prepend": "▁"});
                let normalizers: Vec<_> =
                    space_prefix.then_some(prefix).into_iter().chain([replace(" ", "▁")]).collect();
                let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
                let decoders: Vec<_> =
                    spaces_and_bytes().into_iter().chain(space_prefix.then_some(strip)).collect();
                json!({
                    "normalizer": {"type": "Sequence", "normalizers": normalizers},
                    "pre_tokenizer": null,
                    "decoder": {"type": "Sequence", "decoders": decoders},
                })
            }
        }
    }

    /// Settings of the model.
    fn model(&self, unknown: Option<&RoleToken>) -> Value {
        match self {
            Self::ByteLevel(pre) => json!({"type": "BPE", "ignore_merges": pre.ignores_merges}),
            Self::SpaceMark { .. } | Self::Scored { .. } => json!({
                "type": "BPE", "byte_fallback": true, "fuse_unk": true,
                "unk_token": unknown.map(|token| &token.text),
            }),
        }
    }
}

/// Normalizer or decoder that replaces a text.
fn replace(from: &str, to: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": from}, "content": to})
}

/// Decoders of U+2581 for spaces and of tokens for bytes.
fn spaces_and_bytes() -> [Value; 3] {
    [replace("▁", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})]
}

/// Makes text files of the metadata, with another pre-tokenizer if one is asked for.
///
/// # Errors
/// A key is missing, or the kind of tokenizer or the pre-tokenizer is not read.
pub(super) fn text_files(
    metadata: &Metadata,
    files: &[DataFile],
    asked: Option<&str>,
) -> Result<GgufText, Error> {
    let kind = TokenizerKind::find(metadata, files, asked)?;
    let tokens = RoleTokens::read(metadata, files, &kind)?;
    let flag = |name: &str| metadata.boolean(&key(name));
    let bos = flag("add_bos_token")?.unwrap_or(kind.adds_bos()).then_some(&tokens.bos);
    let eos = flag("add_eos_token")?.unwrap_or(false).then_some(&tokens.eos);
    let around = Around { bos: bos.and_then(Option::as_ref), eos: eos.and_then(Option::as_ref) };
    let mut config = Map::new();
    for (role, token) in [("bos_token", &tokens.bos), ("eos_token", &tokens.eos)] {
        config.extend(token.iter().map(|token| (role.into(), token.text.clone().into())));
    }
    let template = metadata.text(files, "tokenizer.chat_template")?;
    Ok(GgufText {
        tokenizer: tokenizer(metadata, files, &kind, &tokens, around)?,
        config: Value::Object(config).to_string().into_bytes(),
        generation: json!({ "eos_token_id": tokens.end }).to_string().into_bytes(),
        template: template.map(String::into_bytes),
        note: kind.note(metadata).filter(|_| asked.is_none()),
    })
}

impl RoleTokens {
    fn read(metadata: &Metadata, files: &[DataFile], kind: &TokenizerKind) -> Result<Self, Error> {
        let (tokens, types) = (key("tokens"), key("token_type"));
        let count = metadata.count(&tokens)?.ok_or_else(|| metadata.missing(&tokens))?;
        let kinds = metadata.integers(files, &types)?;
        if kinds.as_ref().is_some_and(|kinds| kinds.len() as u64 != count) {
            let problem = format!("has not one value for each of {count} tokens");
            return Err(metadata.problem(&types, &problem));
        }
        let id_of = |role: &str| -> Result<Option<u64>, Error> {
            let key = key(&format!("{role}_token_id"));
            match metadata.integer(&key)?.or(kind.role_id(role)) {
                // Some files have -1 for none, as u32.
                Some(id) if id == u64::from(u32::MAX) => Ok(None),
                Some(id) if id >= count => {
                    Err(metadata.problem(&key, &format!("is {id}, of {count} tokens")))
                }
                id => Ok(id),
            }
        };
        let (bos_id, eos_id, unknown_id) = (id_of("bos")?, id_of("eos")?, id_of("unknown")?);
        let (mut bos, mut eos, mut unknown) = (None, None, None);
        let (mut named, mut id) = (Vec::new(), 0);
        let mut seen = HashSet::new();
        let each = |text: &str| {
            // Two texts of one hash are as good as never among a vocabulary.
            if !seen.insert(digest(text)) {
                return Err(format!("has the token {text:?} twice"));
            }
            let kind = kinds.as_ref().and_then(|kinds| kinds.get(id as usize)).copied();
            let is_control = kind == Some(CONTROL);
            let token = || RoleToken { id, text: text.into(), is_control };
            if is_control || kind == Some(USER_DEFINED) {
                named.push(token());
            }
            if Some(id) == bos_id {
                bos = Some(token());
            }
            if Some(id) == eos_id {
                eos = Some(token());
            }
            if Some(id) == unknown_id {
                unknown = Some(token());
            }
            id += 1;
            Ok(())
        };
        metadata.each_text(files, &tokens, each)?;
        let mut end: Vec<u64> =
            [eos_id, id_of("eot")?, id_of("eom")?].into_iter().flatten().collect();
        let has = |text: &str| named.iter().any(|token| token.text == text);
        // In harmony the token ends a message, not the answer.
        let is_harmony = has("<|return|>") && has("<|call|>");
        let ends = |token: &&RoleToken| {
            let text = token.text.as_str();
            token.is_control && END_TOKENS.contains(&text) && !(is_harmony && text == "<|end|>")
        };
        end.extend(named.iter().filter(ends).map(|token| token.id));
        end.sort_unstable();
        end.dedup();
        Ok(Self { named, bos, eos, unknown, end })
    }
}

/// 64 bits that stand for a text.
fn digest(text: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Tokens around a text.
#[derive(Clone, Copy)]
struct Around<'a> {
    bos: Option<&'a RoleToken>,
    eos: Option<&'a RoleToken>,
}

impl Around<'_> {
    /// The post-processor that adds them.
    fn post_processor(self) -> Value {
        if self.bos.is_none() && self.eos.is_none() {
            return Value::Null;
        }
        let special = |token: &RoleToken| json!({"SpecialToken": {"id": token.text, "type_id": 0}});
        let around = |id: &str| -> Vec<Value> {
            let text = json!({"Sequence": {"id": id, "type_id": 0}});
            let (bos, eos) = (self.bos.map(special), self.eos.map(special));
            bos.into_iter().chain([text]).chain(eos).collect()
        };
        let entry = |token: &RoleToken| {
            let entry = json!({"id": token.text, "ids": [token.id], "tokens": [token.text]});
            (token.text.clone(), entry)
        };
        let tokens: Map<String, Value> =
            [self.bos, self.eos].into_iter().flatten().map(entry).collect();
        let pair = [around("A"), around("B")].concat();
        json!({
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": pair,
            "special_tokens": tokens,
        })
    }
}

/// Writes a `tokenizer.json`.
fn tokenizer(
    metadata: &Metadata,
    files: &[DataFile],
    kind: &TokenizerKind,
    tokens: &RoleTokens,
    around: Around<'_>,
) -> Result<Vec<u8>, Error> {
    let added: Vec<Value> = tokens
        .named
        .iter()
        .map(|token| {
            json!({
                "id": token.id, "content": token.text, "special": token.is_control,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let mut parts = kind.parts();
    parts["added_tokens"] = added.into();
    parts["post_processor"] = around.post_processor();
    // Objects without their closing brace, as the vocabulary follows.
    let open = |value: &Value| {
        let mut text = value.to_string();
        text.pop();
        text
    };
    let model = kind.model(tokens.unknown.as_ref());
    let mut json = format!(r#"{},"model":{},"vocab":{{"#, open(&parts), open(&model)).into_bytes();
    let mut id = 0u64;
    let mut token = |json: &mut Vec<u8>, text: &str| -> Result<(), String> {
        let comma = if id == 0 { "" } else { "," };
        let text = Value::String(text.into());
        write!(json, "{comma}{text}:{id}").map_err(|e| e.to_string())?;
        id += 1;
        Ok(())
    };
    metadata.each_text(files, &key("tokens"), |text| token(&mut json, text))?;
    json.extend(br#"},"merges":["#);
    let mut comma = "";
    let mut pair = |left: &str, right: &str| {
        write!(json, "{comma}{}", json!([left, right])).map_err(|e| e.to_string())?;
        comma = ",";
        Ok(())
    };
    if let TokenizerKind::Scored { .. } = kind {
        each_scored_merge(metadata, files, pair)?;
    } else {
        let merges = key("merges");
        let found = metadata.each_text(files, &merges, |text| {
            // A merge may begin with a space.
            let first = text.chars().next().map_or(0, char::len_utf8);
            let space = text[first..].find(' ').map(|at| at + first);
            let at = space.ok_or_else(|| format!("has the merge {text:?} without two parts"))?;
            pair(&text[..at], &text[at + 1..])
        })?;
        found.ok_or_else(|| metadata.missing(&merges))?;
    }
    json.extend(b"]}}");
    Ok(json)
}
