//! Pre-tokenizers by the names that GGUF gives them, as their makers publish them.

use serde_json::{Value, json};

use super::{super::data_file::DataFile, metadata::Metadata};
use crate::base::error::Error;

/// How a text is cut before byte pair encoding.
#[derive(Clone, Copy)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    /// Expressions, applied one after the other.
    patterns: &'static [&'static str],
    /// Whether characters are composed first (NFC).
    pub(super) is_composed: bool,
    /// Whether a piece that is a token stays whole.
    pub(super) ignores_merges: bool,
    /// Whether texts begin with BOS where the file does not say.
    pub(super) adds_bos: bool,
}

/// Entry of a pre-tokenizer without peculiarities.
const PLAIN: PreTokenizer = PreTokenizer {
    names: &[],
    patterns: &[],
    is_composed: false,
    ignores_merges: false,
    adds_bos: false,
};

/// Contractions of English, in either case.
macro_rules! contractions {
    () => {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

/// White space at the end of an expression.
macro_rules! spaces {
    () => {
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}

/// Words in lower and upper case, with contractions.
macro_rules! words {
    ($and:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
            $and,
            r"]*[\p{Ll}\p{Lm}\p{Lo}\p{M}",
            $and,
            "]+",
            contractions!(),
            r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
            $and,
            r"]+[\p{Ll}\p{Lm}\p{Lo}\p{M}",
            $and,
            "]*",
            contractions!(),
            "?"
        )
    };
}

const PRE_TOKENIZERS: [PreTokenizer; 12] = [
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"],
        patterns: &[QWEN2],
        is_composed: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen35"],
        patterns: &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            spaces!()
        )],
        is_composed: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
            concat!(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
                r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
                spaces!()
            ),
        ],
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["kimi-k2"],
        patterns: &[concat!(
            r"[\p{Han}]+|",
            words!(r"&&[^\p{Han}]"),
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
            spaces!()
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["glm4", "chatglm-bpe"],
        patterns: &[LLAMA3],
        ignores_merges: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama-v3", "llama3"],
        patterns: &[LLAMA3],
        ignores_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-4o"], patterns: &[O200K], ..PLAIN },
    PreTokenizer { names: &["minimax-m2"], patterns: &[O200K], ..PLAIN },
    PreTokenizer { names: &["gpt-2", "olmo"], patterns: &[GPT2], ..PLAIN },
    PreTokenizer { names: &["mellum2"], patterns: &[r"\p{N}", GPT2], ..PLAIN },
    PreTokenizer { names: &["hunyuan", "solar-open"], patterns: &[QWEN2], ..PLAIN },
    PreTokenizer {
        names: &["exaone-moe"],
        patterns: &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
        ..PLAIN
    },
];

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const QWEN2: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces!()
);

const LLAMA3: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces!()
);

const O200K: &str = concat!(words!(""), r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*", spaces!());

impl PreTokenizer {
    /// The pre-tokenizer that the value of `key` names.
    ///
    /// # Errors
    /// It is missing or unknown.
    pub(super) fn find(metadata: &Metadata, files: &[DataFile], key: &str) -> Result<Self, Error> {
        let name = metadata.text(files, key)?.ok_or_else(|| metadata.missing(key))?;
        let known = PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name.as_str()));
        known.copied().ok_or_else(|| {
            let read: Vec<_> =
                PRE_TOKENIZERS.iter().flat_map(|known| known.names).copied().collect();
            let problem =
                format!("is {name:?}, an unknown pre-tokenizer; known are: {}", read.join(", "));
            metadata.problem(key, &problem)
        })
    }

    /// The pre-tokenizer of a `tokenizer.json`, with `byte_level` at the end.
    pub(super) fn json(&self, byte_level: &Value) -> Value {
        let split = |pattern: &&str| {
            json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": false,
            })
        };
        let all: Vec<_> = self.patterns.iter().map(split).chain([byte_level.clone()]).collect();
        json!({"type": "Sequence", "pretokenizers": all})
    }
}
