//! Time that a model stays loaded without requests.

use std::{str::FromStr, time::Duration};

/// Seconds of each unit, of which `ms` comes before `m` and `s`.
const UNITS: [(&str, f64); 4] = [("ms", 1e-3), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];

/// Time that a model stays loaded without requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAlive {
    /// It is unloaded after this time.
    For(Duration),
    /// It stays loaded.
    Forever,
}

impl KeepAlive {
    /// A number of seconds; below 0 is for ever.
    pub fn from_seconds(seconds: f64) -> Self {
        // Below 0, or longer than any process runs.
        Duration::try_from_secs_f64(seconds).map_or(Self::Forever, Self::For)
    }

    /// The time; `None` is for ever.
    pub fn time(self) -> Option<Duration> {
        match self {
            Self::For(time) => Some(time),
            Self::Forever => None,
        }
    }
}

/// A time such as `5m`, `1h30m`, `90` (seconds) or `-1` (for ever).
impl FromStr for KeepAlive {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let help = "write a time such as 10m, 1h30m or 90s; -1 is for ever";
        let text = text.trim();
        if let Ok(seconds) = text.parse() {
            return Ok(Self::from_seconds(seconds));
        }
        let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
        let mut sum = 0.0;
        while !rest.is_empty() {
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or(help)?;
            let number: f64 = rest[..end].parse().map_err(|_| help)?;
            let unit = UNITS.iter().find(|(unit, _)| rest[end..].starts_with(unit));
            let (unit, seconds) = unit.ok_or(help)?;
            sum += number * seconds;
            rest = &rest[end + unit.len()..];
        }
        match text.ends_with(|c: char| c.is_ascii_alphabetic()) {
            true => Ok(Self::from_seconds(sign * sum)),
            false => Err(help),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_numbers_with_units() {
        let seconds = |seconds| Ok(KeepAlive::For(Duration::from_secs_f64(seconds)));
        for (text, expected) in [
            ("0", seconds(0.0)),
            ("0s", seconds(0.0)),
            ("2.5", seconds(2.5)),
            (" 5m ", seconds(300.0)),
            ("1h30m", seconds(5400.0)),
            ("250ms", seconds(0.25)),
            ("-1", Ok(KeepAlive::Forever)),
            ("-1m", Ok(KeepAlive::Forever)),
            ("1e99", Ok(KeepAlive::Forever)),
        ] {
            assert_eq!(text.parse(), expected, "{text}");
        }
        for wrong in ["", "-", "soon", "5x", "m", "5 m", "1h3"] {
            assert!(wrong.parse::<KeepAlive>().is_err(), "{wrong}");
        }
    }
}
