//! Sizes of memory as users write them.

/// Suffixes of sizes. Single letters and those with an `i` are binary, others decimal.
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

/// Parses a size such as `8GiB`, `8G` (the same), `8GB` (8 * 10^9), `512MiB`, `1.5g` or a number of
/// bytes.
///
/// # Errors
/// The text is not a size; the message shows the format.
pub fn parse_size(text: &str) -> Result<u64, String> {
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
    // Doubles are exact up to 2^53; no machine has that much memory.
    if bytes >= (1u64 << 53) as f64 {
        return Err(format!("{text} is more than any machine has: {}", help()));
    }
    Ok(bytes as u64)
}
