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

/// Measurement with three digits, below 1 with two: `1190`, `45.6`, `0.89`. More do not repeat.
pub fn figure(value: f64) -> String {
    let size = value.abs();
    let decimals = match size {
        _ if size == 0.0 || !size.is_finite() => 0,
        // Rounded to a multiple of a power of ten.
        _ if size >= 999.5 => {
            let step = 10f64.powi(size.log10().floor() as i32 - 2);
            return format!("{:.0}", (value / step).round() * step);
        }
        _ if size >= 99.95 => 0,
        _ if size >= 9.995 => 1,
        _ if size >= 0.0995 => 2,
        _ => (1.0 - size.log10().floor()).min(9.0) as usize,
    };
    format!("{value:.decimals$}")
}

/// Bandwidth of a disk or of memory: `1.18 GB/s`, `950 MB/s`.
pub fn speed(bytes_per_second: f64) -> String {
    match bytes_per_second {
        b if (0.995e9..99.5e9).contains(&b) => format!("{} GB/s", figure(b / 1e9)),
        b => format!("{}/s", disk(b)),
    }
}

/// Time: `1.23 us`, `45.6 ms`.
pub fn time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 0.9995e-3 => (s * 1e6, "us"),
        s if s < 0.9995 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    format!("{} {unit}", figure(number))
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

/// Rate in tokens per second: `12.3 tok/s`.
pub fn rate(per_second: f64) -> String {
    match per_second.is_finite() {
        true => format!("{} tok/s", figure(per_second)),
        false => bare_rate(per_second),
    }
}

/// Rate in tokens per second without the unit, for table columns.
pub fn bare_rate(per_second: f64) -> String {
    if per_second.is_finite() { figure(per_second) } else { "-".to_owned() }
}

/// Fraction from 0 to 1 in per cent.
pub fn percent(share: f64) -> String {
    // Below 1, at most 99.9 % is shown: a single miss stays visible.
    let tenths = (share * 1000.0).round() / 10.0;
    let shown = if share < 1.0 { tenths.min(99.9) } else { tenths };
    match shown {
        100.0.. => format!("{shown:.0} %"),
        _ => format!("{shown:.1} %"),
    }
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
            ["1.18 GB/s", "28.1 GB/s", "950 MB/s", "400 GB/s"]
        );
        let ages = [5, 90, 7200, 200_000].map(|s| ago(std::time::Duration::from_secs(s)));
        assert_eq!(ages, ["just now", "1 minute ago", "2 hours ago", "2 days ago"]);
    }

    #[test]
    fn times_are_shown_with_the_digits_that_matter() {
        assert_eq!(
            [1.234e-6, 45.67e-6, 0.000_999_9, 0.0123, 2.5].map(time),
            ["1.23 us", "45.7 us", "1.00 ms", "12.3 ms", "2.50 s"]
        );
    }

    #[test]
    fn measurements_have_three_digits_at_most() {
        let shown = [123_456.7, 1187.3, 999.6, 123.4567, 45.67, 9.996, 1.0, 0.894, 0.004_321, 0.0];
        assert_eq!(
            shown.map(figure),
            ["123000", "1190", "1000", "123", "45.7", "10.0", "1.00", "0.89", "0.0043", "0"]
        );
        assert_eq!(rate(123.4567), "123 tok/s");
        assert_eq!([1187.3, f64::NAN].map(bare_rate), ["1190", "-"]);
    }

    #[test]
    fn a_miss_never_rounds_away() {
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(percent(0.99999), "99.9 %");
        assert_eq!(percent(0.873), "87.3 %");
    }
}
