//! Pre-tokenizers by the names that GGUF gives them, as their makers publish them.

use serde_json::{Value, json};

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

/// Name of the pre-tokenizer of files that name none.
const DEFAULT: &str = "default";

const PRE_TOKENIZERS: [PreTokenizer; 20] = [
    // The default of llama.cpp: no model was trained with it.
    PreTokenizer {
        names: &[DEFAULT],
        patterns: &[
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        ],
        ..PLAIN
    },
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
        patterns: &[r"\p{N}{1,3}", EAST_ASIAN, DEEPSEEK_WORDS],
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["flint"],
        patterns: &[
            r"\p{N}{1,3}",
            EAST_ASIAN,
            concat!(words!(""), r"| ?[\p{P}\p{S}]+[\r\n]*", spaces!()),
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-llm"],
        patterns: &[
            r"[\r\n]",
            DEEPSEEK_CASED,
            r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
            r"\s+$",
            r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
            r"\p{N}",
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["afmoe"],
        patterns: &[
            // In threes from the end.
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            concat!(
                r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}",
                r"\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}\x{e40}-\x{eff}\x{1780}-\x{17ff}",
                r"\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}",
                r"\x{1100}-\x{11ff}]+"
            ),
            DEEPSEEK_WORDS,
        ],
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
        names: &["glm4", "glm5", "chatglm-bpe"],
        patterns: &[LLAMA3],
        ignores_merges: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama-v3", "llama3", "lfm2"],
        patterns: &[LLAMA3],
        ignores_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-4o"], patterns: &[O200K], ..PLAIN },
    PreTokenizer { names: &["minimax-m2"], patterns: &[O200K], ..PLAIN },
    PreTokenizer { names: &["gpt-2", "olmo"], patterns: &[GPT2], ..PLAIN },
    PreTokenizer { names: &["mellum2", "refact"], patterns: &[r"\p{N}", GPT2], ..PLAIN },
    PreTokenizer { names: &["hunyuan", "solar-open"], patterns: &[QWEN2], ..PLAIN },
    PreTokenizer { names: &["laguna"], patterns: &[r"[^\n]+|[\n]+", QWEN2], ..PLAIN },
    PreTokenizer {
        names: &["bailingmoe", "bailingmoe2"],
        patterns: &[concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["tekken"],
        patterns: &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*",
            spaces!()
        )],
        ignores_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["tiny_aya", "cohere2moe"],
        patterns: &[r"\d{1,3}(?=(?:\d{3})*\b)", O200K],
        ..PLAIN
    },
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

/// Runs of East Asian scripts.
const EAST_ASIAN: &str = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+";

/// Words after numbers and East Asian scripts are cut off.
const DEEPSEEK_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    spaces!()
);

/// Words of letters that have cases.
const DEEPSEEK_CASED: &str = concat!(
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}",
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}",
    r"\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}",
    r"\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}",
    r"\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}",
    r"\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}",
    r"\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}",
    r"\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}",
    r"\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}",
    r"\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}",
    r"\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}",
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}",
    r"\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}",
    r"\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}",
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
);

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
    /// The pre-tokenizer of a name, or the default one.
    pub(super) fn by_name(name: Option<&str>) -> Option<Self> {
        let name = name.unwrap_or(DEFAULT);
        PRE_TOKENIZERS.into_iter().find(|known| known.names.contains(&name))
    }

    /// Names of all pre-tokenizers.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        PRE_TOKENIZERS.into_iter().flat_map(|known| known.names).copied()
    }

    /// Whether it is the pre-tokenizer of files that name none.
    pub(super) fn is_default(&self) -> bool {
        self.names == [DEFAULT]
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

#[cfg(test)]
mod tests {
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper,
    };

    use super::*;

    const TEXT: &str = "I'll pay 1234567 €12, don't\r\n\r\n  go!ÀB λόγος 你好한국x a1\t x日本.Ⅷ  ";

    /// The words of [`TEXT`], with `|` between them.
    fn words(name: &str) -> tokenizers::Result<String> {
        let known = PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name));
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": false,
        });
        let cutter = known.map(|known| known.json(&bytes)).unwrap_or_default();
        let cutter: PreTokenizerWrapper = serde_json::from_value(cutter)?;
        let mut words = PreTokenizedString::from(TEXT);
        cutter.pre_tokenize(&mut words)?;
        let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let words: Vec<_> = words.iter().map(|(_, (from, to), _)| &TEXT[*from..*to]).collect();
        Ok(words.join("|"))
    }

    /// Words of the library in Python, which has another engine for expressions.
    #[test]
    fn texts_are_cut_as_makers_cut_them() {
        for (name, expected) in [
            (
                "default",
                "I|'|ll| pay| |123|456|7| €|12|,| don|'|t|\r\n\r\n | go|!|ÀB| λόγος| 你好한국x| \
                 a|1|\t| x日本|.|Ⅷ|  ",
            ),
            (
                "deepseek-llm",
                "I|'|ll| pay| |1|2|3|4|5|6|7| |€|1|2|,| don|'|t|\r|\n|\r|\n| | go|!|À|B| λόγος| \
                 |你好한국|x| a|1|\t| x|日本|.|Ⅷ|  ",
            ),
            (
                "afmoe",
                "I|'ll| pay| |1|234|567| €|12|,| don|'t|\r\n\r\n| | go|!|ÀB| λόγος| |你好한국|x| \
                 a|1|\t| x|日本|.|Ⅷ|  ",
            ),
            (
                "laguna",
                "I|'ll| pay| |1|2|3|4|5|6|7| €|1|2|,| don|'t|\r|\n|\r|\n| | go|!ÀB| λόγος| \
                 你好한국x| a|1|\t| x日本|.|Ⅷ|  ",
            ),
            (
                "bailingmoe",
                "I|'ll| pay| |1|2|3|4|5|6|7| €|1|2|,| don|'t|\r\n\r\n| | go|!ÀB| λόγος| \
                 你好한국x| a|1|\t| x日本|.|Ⅷ|  ",
            ),
            (
                "tekken",
                "I|'ll| pay| |1|2|3|4|5|6|7| €|1|2|,| don|'t|\r\n\r\n| | go|!ÀB| λόγος| \
                 你好한국x| a|1|\t| x日本|.|Ⅷ|  ",
            ),
            (
                "flint",
                "I'll| pay| |123|456|7| €|12|,| don't|\r\n\r\n| | go|!ÀB| λόγος| |你好|한국x| a|1|\t| \
                 x|日本|.|Ⅷ|  ",
            ),
            (
                "cohere2moe",
                "I'll| pay| |1|234|567| €|12|,| don't|\r\n\r\n| | go|!ÀB| λόγος| 你好한국x| a|1|\t| \
                 x日本|.|Ⅷ|  ",
            ),
        ] {
            assert_eq!(words(name).unwrap(), expected, "{name}");
        }
    }
}
