//! Formatting of sizes, rates, times and counts for people.

/// Size in memory, in binary units: `61 MiB`, `7.5 GiB`.
pub fn memory(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Size on disk, in decimal units: `1.2 MB`, `17.2 GB`.
pub fn disk(bytes: f64) -> String {
    scaled(bytes, 1000.0, &["B", "KB", "MB", "GB", "TB"])
}

/// Number of parameters: `17.7 M`, `30.5 B`.
pub fn count(n: u64) -> String {
    scaled(n as f64, 1000.0, &["", "K", "M", "B", "T"]).trim_end().to_owned()
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // A value that rounds up to a whole step is shown in the next unit.
    while value >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 99.95);
    let number = format!("{value:.digits$}");
    format!("{} {}", number.strip_suffix(".0").unwrap_or(&number), units[unit])
}

/// Bandwidth of a disk or of memory, with two decimals in the GB/s range: `1.18 GB/s`.
pub fn speed(bytes_per_second: f64) -> String {
    match bytes_per_second {
        b if (0.995e9..99.5e9).contains(&b) => format!("{:.2} GB/s", b / 1e9),
        b => format!("{}/s", disk(b)),
    }
}

/// Time with three or four digits: `1.23 us`, `45.6 ms`.
pub fn time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = if number < 9.995 { 2 } else { usize::from(number < 99.95) };
    format!("{number:.digits$} {unit}")
}

/// Age: `just now`, `3 hours ago`.
pub fn ago(age: std::time::Duration) -> String {
    match age.as_secs() {
        0..60 => "just now".to_owned(),
        s @ 60..3600 => format!("{} ago", plural(s / 60, "minute")),
        s @ 3600..86400 => format!("{} ago", plural(s / 3600, "hour")),
        s => format!("{} ago", plural(s / 86400, "day")),
    }
}

/// Rate in tokens per second, with three digits: `12.3 tok/s`.
pub fn rate(per_second: f64) -> String {
    match per_second.is_finite() {
        true => format!("{} tok/s", bare_rate(per_second)),
        false => bare_rate(per_second),
    }
}

/// Rate in tokens per second without the unit, for table columns.
pub fn bare_rate(per_second: f64) -> String {
    if !per_second.is_finite() {
        return "-".to_owned();
    }
    let digits = if per_second < 9.995 { 2 } else { 1 };
    format!("{per_second:.digits$}")
}

/// Fraction from 0 to 1 in per cent.
pub fn percent(share: f64) -> String {
    // Below 1, at most 99.9 % is shown: a single miss stays visible.
    let tenths = (share * 1000.0).round() / 10.0;
    let shown = if share < 1.0 { tenths.min(99.9) } else { tenths };
    format!("{shown:.1} %")
}

/// Count with its noun: `1 token`, `2 tokens`, `2 dispatches`.
pub fn plural(n: u64, noun: &str) -> String {
    let end = match n {
        1 => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{n} {noun}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn speeds_and_ages_are_shown_with_the_digits_that_matter() {
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
