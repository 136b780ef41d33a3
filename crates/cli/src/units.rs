//! Sizes and rates as people write and read them.

/// Suffixes of sizes: those with an `i`, and single letters, count in 1024, those with a `B` alone in 1000.
const SUFFIXES: [(&str, u64); 13] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
];

/// Reads a size such as `8GiB`, `8G` (the same), `8GB` (8 * 10^9), `512MiB`, `1.5g` or a number of bytes.
///
/// # Errors
/// It is no size; the error says what is.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let help = || "write a size such as 8GiB, 1.5G or 900MB".to_owned();
    let lower = text.trim().to_ascii_lowercase();
    let end = lower.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(lower.len());
    let (number, suffix) = (&lower[..end], lower[end..].trim_start());
    let number: f64 = number.parse().map_err(|_| help())?;
    let unit = match SUFFIXES.iter().find(|(name, _)| *name == suffix) {
        Some((_, unit)) => *unit,
        None if suffix == "tb" => 1_000_000_000_000,
        None => return Err(help()),
    };
    let bytes = number * unit as f64;
    if bytes < 1.0 {
        return Err(format!("{text} is no memory at all: {}", help()));
    }
    // Beyond 2^53 a double is not exact, and no machine has that much.
    if bytes >= (1u64 << 53) as f64 {
        return Err(format!("{text} is more than any machine has: {}", help()));
    }
    Ok(bytes as u64)
}

/// Reads bytes per second, such as `3.5GB/s`, `900MB` (the same, per second) or `1GiB/s`.
///
/// # Errors
/// It is no speed; the error says what is.
pub(crate) fn parse_speed(text: &str) -> Result<f64, String> {
    let size = text.trim().trim_end_matches("/s");
    parse_size(size)
        .map(|bytes| bytes as f64)
        .map_err(|_| "write a speed such as 3.5GB/s".to_owned())
}

/// Reads `10%` or `10` as 0.1.
///
/// # Errors
/// It is no number from 0 to 100.
pub(crate) fn parse_percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().trim_end_matches('%').trim_end().parse().ok();
    let number = number.filter(|n| (0.0..=100.0).contains(n));
    number
        .map(|n| n / 100.0)
        .ok_or_else(|| "write a percentage from 0 to 100, such as 10%".to_owned())
}

/// Bytes in memory: `61 MiB`, `7.5 GiB`.
pub(crate) fn memory(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Bytes on disk: `1.2 MB`, `17.2 GB`.
pub(crate) fn disk(bytes: f64) -> String {
    scaled(bytes, 1000.0, &["B", "KB", "MB", "GB", "TB"])
}

/// A number of parameters: `17.7 M`, `30.5 B`.
pub(crate) fn count(n: u64) -> String {
    scaled(n as f64, 1000.0, &["", "K", "M", "B", "T"]).trim_end().to_owned()
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // What would be rounded up to a whole step belongs to the next unit.
    while value >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 99.95);
    let number = format!("{value:.digits$}");
    format!("{} {}", number.strip_suffix(".0").unwrap_or(&number), units[unit])
}

/// Bytes per second of a disk or of memory: `1.18 GB/s`, where the second digit matters.
pub(crate) fn speed(bytes_per_second: f64) -> String {
    match bytes_per_second {
        b if (0.995e9..99.5e9).contains(&b) => format!("{:.2} GB/s", b / 1e9),
        b => format!("{}/s", disk(b)),
    }
}

/// Three digits or four: `1.23 us`, `45.6 ms`.
pub(crate) fn time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = if number < 9.995 { 2 } else { usize::from(number < 99.95) };
    format!("{number:.digits$} {unit}")
}

/// How long ago: `just now`, `3 hours ago`.
pub(crate) fn ago(age: std::time::Duration) -> String {
    match age.as_secs() {
        0..60 => "just now".to_owned(),
        s @ 60..3600 => format!("{} ago", plural(s / 60, "minute")),
        s @ 3600..86400 => format!("{} ago", plural(s / 3600, "hour")),
        s => format!("{} ago", plural(s / 86400, "day")),
    }
}

/// Tokens per second: three digits are enough.
pub(crate) fn rate(per_second: f64) -> String {
    match per_second.is_finite() {
        true => format!("{} tok/s", bare_rate(per_second)),
        false => bare_rate(per_second),
    }
}

/// The same for a column whose head names the unit.
pub(crate) fn bare_rate(per_second: f64) -> String {
    if !per_second.is_finite() {
        return "-".to_owned();
    }
    let digits = if per_second < 9.995 { 2 } else { 1 };
    format!("{per_second:.digits$}")
}

/// A share from 0 to 1 in per cent.
pub(crate) fn percent(share: f64) -> String {
    // 99.96 % is not 100.0 %: a miss is a miss.
    let tenths = (share * 1000.0).round() / 10.0;
    let shown = if share < 1.0 { tenths.min(99.9) } else { tenths };
    format!("{shown:.1} %")
}

/// `1 token`, `2 tokens`, `2 dispatches`.
pub(crate) fn plural(n: u64, what: &str) -> String {
    let end = match n {
        1 => "",
        _ if what.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{n} {what}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
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
    fn what_is_no_size_is_refused() {
        for text in [
            "", "G", "eight", "-1G", "1..5G", "8 apples", "0", "0.0001k", "nan", "inf", "1e9",
            "99999T",
        ] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains("8GiB"), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_are_shown_with_the_digits_that_matter() {
        assert_eq!(memory(0), "0 B");
        assert_eq!(memory(1023), "1023 B");
        assert_eq!(memory(61 << 20), "61 MiB");
        assert_eq!(memory(512 << 20), "512 MiB");
        assert_eq!(memory((1 << 30) - 1), "1 GiB");
        assert_eq!(disk(1_234_567.0), "1.2 MB");
        assert_eq!(disk(999_999.0), "1 MB");
        assert_eq!(disk(17.2e9), "17.2 GB");
        assert_eq!(count(17_700_000), "17.7 M");
        assert_eq!(count(12), "12");
    }

    #[test]
    fn speeds_shares_and_ages_are_read_and_shown() {
        assert_eq!(parse_speed("3.5GB/s"), Ok(3.5e9));
        assert_eq!(parse_speed(" 900MB"), Ok(9e8));
        assert!(parse_speed("fast").unwrap_err().contains("GB/s"));
        assert_eq!((parse_percent("10%"), parse_percent("2.5")), (Ok(0.1), Ok(0.025)));
        assert!(["", "-1", "101%", "nan", "ten"].iter().all(|text| parse_percent(text).is_err()));
        assert_eq!(
            [1.183e9, 28.1e9, 9.5e8, 4e11].map(speed),
            ["1.18 GB/s", "28.10 GB/s", "950 MB/s", "400 GB/s"]
        );
        let ages = [5, 90, 7200, 200_000].map(|s| ago(std::time::Duration::from_secs(s)));
        assert_eq!(ages, ["just now", "1 minute ago", "2 hours ago", "2 days ago"]);
    }

    #[test]
    fn times_are_shown_with_the_digits_that_matter() {
        assert_eq!(
            [1.234e-6, 45.67e-6, 0.000_999_9, 0.0123, 2.5].map(time),
            ["1.23 us", "45.7 us", "1000 us", "12.3 ms", "2.50 s"]
        );
    }

    #[test]
    fn a_miss_never_rounds_away() {
        assert_eq!(percent(1.0), "100.0 %");
        assert_eq!(percent(0.99999), "99.9 %");
        assert_eq!(percent(0.873), "87.3 %");
    }
}
