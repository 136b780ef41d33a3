//! Parsers of argument values: sizes, speeds, percentages, numbers, names.

use std::path::PathBuf;

use clap::builder::{PathBufValueParser, PossibleValuesParser, TypedValueParser};
use moeflux::{
    runtime::{CardBudgets, KvFormat},
    tools::synth,
};

use crate::folders;

pub(crate) use moeflux::runtime::parse_size;

/// Parses a size, or 0 for no memory at all.
///
/// # Errors
/// As [`parse_size`].
pub(crate) fn parse_size_or_zero(text: &str) -> Result<u64, String> {
    match text.trim() {
        "0" => Ok(0),
        size => parse_size(size),
    }
}

/// Parses one size, or sizes of several cards with commas: `20GiB,10GiB`.
///
/// # Errors
/// A part is not a size, or there are too many.
pub(crate) fn parse_card_sizes(text: &str) -> Result<CardBudgets, String> {
    let sizes = text.split(',').map(parse_size).collect::<Result<Vec<_>, _>>()?;
    CardBudgets::new(&sizes).map_err(|error| error.to_string())
}

/// Parses bytes per second, such as `3.5GB/s`, `900MB` (the same, per second) or `1GiB/s`.
///
/// # Errors
/// The text is not a speed; the message shows the format.
pub(super) fn parse_speed(text: &str) -> Result<f64, String> {
    let size = text.trim().trim_end_matches("/s");
    parse_size(size)
        .map(|bytes| bytes as f64)
        .map_err(|_| "write a speed such as 3.5GB/s".to_owned())
}

/// Parses `10%` or `10` as 0.1.
///
/// # Errors
/// The text is not a number from 0 to 100.
pub(super) fn parse_percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().trim_end_matches('%').trim_end().parse().ok();
    let number = number.filter(|n| (0.0..=100.0).contains(n));
    number
        .map(|n| n / 100.0)
        .ok_or_else(|| "write a percentage from 0 to 100, such as 10%".to_owned())
}

/// Parses a share: a number from 0 to 1, or a percentage with its sign.
pub(super) fn parse_share(text: &str) -> Result<f64, String> {
    let share = match text.ends_with('%') {
        true => parse_percent(text).ok(),
        false => text.parse().ok().filter(|share| (0.0..=1.0).contains(share)),
    };
    share.ok_or_else(|| "expected a share from 0 to 1, or from 0% to 100%, such as 80%".to_owned())
}

/// Parser of paths. `~/` at the start is the home folder: shells expand it at the start of a word
/// only, not after `=`, and service managers never do.
pub(super) fn path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().map(|path| folders::below_home(&path))
}

/// Parser of names of presets.
pub(super) fn preset() -> PossibleValuesParser {
    PossibleValuesParser::new(synth::presets().iter().map(|p| p.name))
}

/// Parser of KV cache formats.
pub(super) fn kv_format() -> impl TypedValueParser<Value = KvFormat> {
    PossibleValuesParser::new(KvFormat::ALL.map(KvFormat::name))
        .try_map(|name| KvFormat::by_name(&name))
}

/// Parses the name of a device, or of several cards with commas.
pub(super) fn device(text: &str) -> Result<String, String> {
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let is_card = |name: &str| name.trim().strip_prefix("gpu:").is_some_and(is_number);
    let known = ["auto", "cpu", "gpu", "reference"].contains(&text);
    match known || text.split(',').all(is_card) {
        true => Ok(text.to_owned()),
        false => {
            Err("choose auto, cpu, gpu, gpu:N, several cards such as gpu:0,gpu:1, or reference"
                .to_owned())
        }
    }
}

/// Parser of finite numbers from `low` to `high`.
pub(super) fn within(low: f32, high: f32) -> impl Fn(&str) -> Result<f32, String> + Clone {
    move |text| {
        let rule = || match (low, high) {
            (0.0, f32::MAX) => "a number of 0 or more".to_owned(),
            (f32::MIN_POSITIVE, f32::MAX) => "a number above 0".to_owned(),
            (f32::MIN_POSITIVE, _) => format!("a number above 0 and up to {high}"),
            _ => format!("a number from {low} to {high}"),
        };
        let number: Option<f32> = text.parse().ok();
        number
            .filter(|n| n.is_finite() && (low..=high).contains(n))
            .ok_or_else(|| format!("it must be {}", rule()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_in_usual_spellings() {
        let read = [
            ("8GiB", 8 << 30),
            ("8G", 8 << 30),
            ("8g", 8 << 30),
            ("8GB", 8_000_000_000),
            ("1.5 MiB", 3 << 19),
            (".5k", 512),
            ("100", 100),
            ("100b", 100),
            ("2TB", 2_000_000_000_000),
            (" 7kb ", 7000),
        ];
        for (text, bytes) in read {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn other_texts_are_no_sizes() {
        for text in [
            "", "G", "eight", "-1G", "1..5G", "8 apples", "0", "0.0001k", "nan", "inf", "1e9",
            "99999T",
        ] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains("8GiB"), "{text}: {error}");
        }
    }

    #[test]
    fn speeds_and_percentages_are_parsed() {
        assert_eq!(parse_speed("3.5GB/s"), Ok(3.5e9));
        assert_eq!(parse_speed(" 900MB"), Ok(9e8));
        assert!(parse_speed("fast").unwrap_err().contains("GB/s"));
        assert_eq!((parse_percent("10%"), parse_percent("2.5")), (Ok(0.1), Ok(0.025)));
        assert!(["", "-1", "101%", "nan", "ten"].iter().all(|text| parse_percent(text).is_err()));
        assert_eq!(["80%", "0.8", "1", "0"].map(parse_share), [Ok(0.8), Ok(0.8), Ok(1.0), Ok(0.0)]);
        assert!(
            ["", "-1", "101%", "1.5", "80", "nan"].iter().all(|text| parse_share(text).is_err())
        );
    }
}
