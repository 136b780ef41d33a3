//! Size and quantization of a model in Ollama's words.

use std::path::Path;

use moeflux::model::blueprint::Blueprint;

use crate::requests::models::weight_counts::{formats, parameters};

/// Facts about a model that is not loaded.
const UNKNOWN: &str = "unknown";

/// Most characters of a quantization in the name of a file.
const MAX_NAME: usize = 16;

/// Number of weights in words, such as `35.1B`.
pub(super) fn parameter_size(blueprint: Option<&Blueprint>) -> String {
    blueprint.map_or_else(|| UNKNOWN.to_owned(), |blueprint| readable(parameters(blueprint)))
}

/// Quantization of most weights, such as `Q4_K_M`, `4bit` or `MXFP4`: by the name of a GGUF file,
/// or of the loaded model.
pub(super) fn quantization_level(path: &Path, blueprint: Option<&Blueprint>) -> String {
    let is_gguf = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    let stem = path.file_stem().and_then(|stem| stem.to_str()).filter(|_| is_gguf);
    let of_name = stem.and_then(level_in_name);
    let of_weights = || {
        let formats = formats(blueprint?);
        let most = formats.into_iter().max_by_key(|(_, parameters)| *parameters)?;
        Some(level_of_format(&most.0))
    };
    of_name.or_else(of_weights).unwrap_or_else(|| UNKNOWN.to_owned())
}

/// A format in the words of clients: `4bit` as folders of mlx-lm are called, others in upper case.
fn level_of_format(name: &str) -> String {
    match name.strip_prefix("affine").and_then(|rest| rest.split_once('/')) {
        Some((bits, _)) => format!("{bits}bit"),
        None => name.to_uppercase(),
    }
}

/// Quantization at the end of the name of a GGUF file, before the number of its part.
fn level_in_name(stem: &str) -> Option<String> {
    let stem = match stem.rsplit_once("-of-") {
        Some((start, _)) => start.rsplit_once('-')?.0,
        None => stem,
    };
    let last = stem.rsplit(['-', '.']).next()?.to_ascii_uppercase();
    let is_plain = ["F32", "F16", "BF16", "FP16"].contains(&&*last) || last.starts_with("MXFP4");
    let digits = ["IQ", "TQ", "Q"].iter().find_map(|start| last.strip_prefix(start));
    let is_quantized = digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    ((is_plain || is_quantized) && last.len() <= MAX_NAME).then_some(last)
}

/// A number with one digit behind the point in the unit that fits.
fn readable(count: u64) -> String {
    let count = count as f64;
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")];
    match units.into_iter().find(|(unit, _)| count >= *unit) {
        Some((unit, name)) => format!("{:.1}{name}", count / unit),
        None => format!("{count}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_be_named_by_its_quantization() {
        for (file, level) in [
            ("Qwen3.6-35B-A3B-Q4_K_M.gguf", "Q4_K_M"),
            ("x-UD-IQ2_XXS-00001-of-00003.gguf", "IQ2_XXS"),
            ("model.q8_0.GGUF", "Q8_0"),
            ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
            ("a-BF16.gguf", "BF16"),
            ("a-Quick.gguf", UNKNOWN),
            ("a-Q4_K_M", UNKNOWN),
            ("", UNKNOWN),
        ] {
            assert_eq!(quantization_level(Path::new(file), None), level, "{file}");
        }
        assert_eq!(level_of_format("affine4/64"), "4bit");
        assert_eq!(level_of_format("mxfp4"), "MXFP4");
    }

    #[test]
    fn numbers_have_one_digit() {
        let sizes = [35_107_000_000, 18_300_000, 999, 1_500].map(readable);
        assert_eq!(sizes, ["35.1B", "18.3M", "999", "1.5K"]);
    }
}
