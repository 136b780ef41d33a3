//! Settings of a `tokenizer.json` that the `tokenizers` library accepts, and fails on later.

use moeflux_base::seam::guarded;
use serde_json::Value;
use tokenizers::normalizers::Precompiled;

/// Maximum factor by which normalizers or decoders may lengthen a text. Unicode's decompositions
/// need 18, together with the replacement of spaces 54.
const MAX_GROWTH: usize = 256;
/// Maximum bytes that are put before every text or word.
const MAX_PREFIX: usize = 64;
/// Maximum tokens around a text, of all templates together.
const MAX_TEMPLATE: usize = 1024;

/// Checks a normalizer, pre-tokenizer, post-processor or decoder with its parts.
///
/// # Errors
/// The library would panic on it, or take memory without a bound.
pub(super) fn check(part: &Value) -> Result<(), String> {
    let growth = growth(part)?;
    if growth > MAX_GROWTH {
        return Err(format!("its parts make texts longer by a factor of {growth}"));
    }
    Ok(())
}

/// Maximum factor by which a part lengthens a text.
fn growth(part: &Value) -> Result<usize, String> {
    let number = |key: &str| part.get(key).and_then(Value::as_u64);
    let text_len = |key: &str| part.get(key).and_then(Value::as_str).map_or(0, str::len);
    Ok(match kind(part) {
        Some("FixedLength") if number("length") == Some(0) => {
            return Err("a FixedLength of 0: it would cut a text into pieces of nothing".into());
        }
        Some("Strip") if number("stop").is_some_and(|stop| stop > 0) => {
            return Err(
                "a Strip decoder with a stop of more than 0 is not supported: it fails on \
                        tokens that are shorter"
                    .into(),
            );
        }
        Some("Precompiled") => {
            match guarded(|| serde_json::from_str::<Precompiled>(&part.to_string())) {
                Ok(Ok(_)) => 32,
                Ok(Err(e)) => return Err(format!("its precompiled_charsmap is broken: {e}")),
                Err(_) => return Err("its precompiled_charsmap is broken".into()),
            }
        }
        Some("Prepend") if text_len("prepend") > MAX_PREFIX => {
            return Err(format!("it prepends more than {MAX_PREFIX} bytes"));
        }
        // An empty pattern is found between all characters, and a regular expression may be one.
        Some("Replace") => {
            let pattern = part.get("pattern").and_then(|pattern| pattern.get("String"));
            let pattern = pattern.and_then(Value::as_str).map_or(0, str::len);
            match text_len("content") {
                content if pattern == 0 => 1 + content,
                content => content.div_ceil(pattern).max(1),
            }
        }
        Some("NFD" | "Lowercase" | "BertNormalizer") => 4,
        Some("NFKD" | "NFKC") => 18,
        Some("NFC") => 3,
        Some("ByteLevel" | "Prepend" | "Metaspace") => 2,
        Some("TemplateProcessing") if template_len(part) > MAX_TEMPLATE => {
            return Err(format!("it puts more than {MAX_TEMPLATE} tokens around a text"));
        }
        _ => parts(part).try_fold(1usize, |product, part| {
            Ok::<usize, String>(product.saturating_mul(growth(part)?))
        })?,
    })
}

/// Type of a part. Old files have none, and the library goes by the keys.
fn kind(part: &Value) -> Option<&str> {
    const KEYS: [(&str, &str); 7] = [
        ("length", "FixedLength"),
        ("stop", "Strip"),
        ("precompiled_charsmap", "Precompiled"),
        ("prepend", "Prepend"),
        ("content", "Replace"),
        ("special_tokens", "TemplateProcessing"),
        ("prepend_scheme", "Metaspace"),
    ];
    let by_key = KEYS.into_iter().find(|(key, _)| part.get(key).is_some()).map(|(_, kind)| kind);
    part.get("type").and_then(Value::as_str).or(by_key)
}

/// Parts of a sequence.
fn parts(part: &Value) -> impl Iterator<Item = &Value> {
    ["normalizers", "pretokenizers", "processors", "decoders"]
        .into_iter()
        .filter_map(|key| part.get(key)?.as_array())
        .flatten()
}

/// Tokens of a template's pieces, each as long as the longest special token.
fn template_len(part: &Value) -> usize {
    let pieces =
        ["single", "pair"].map(|key| part.get(key).and_then(Value::as_array).map(Vec::len));
    let pieces: usize = pieces.into_iter().flatten().sum();
    let tokens = part.get("special_tokens").and_then(Value::as_object).into_iter().flatten();
    let ids = tokens.filter_map(|(_, token)| token.get("ids")?.as_array()).map(Vec::len).max();
    pieces.saturating_mul(ids.unwrap_or(0))
}
