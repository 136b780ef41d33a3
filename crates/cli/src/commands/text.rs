//! Texts from files and from stdin.

use std::{io::Read, path::Path};

use anyhow::{Context, bail};

/// Contents of a file; `-` is stdin.
pub(super) fn read_text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return read_stdin();
    }
    let bytes = std::fs::read(path);
    decode(
        bytes.with_context(|| format!("{}: cannot be read", path.display()))?,
        &path.display().to_string(),
    )
}

pub(super) fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("standard input cannot be read")?;
    decode(bytes, "standard input")
}

/// Text of `source`, without a byte order mark.
///
/// # Errors
/// It is not UTF-8; the message says where.
pub(super) fn decode(bytes: Vec<u8>, source: &str) -> anyhow::Result<String> {
    match String::from_utf8(bytes) {
        Ok(mut text) => {
            if text.starts_with('\u{feff}') {
                text.drain(..'\u{feff}'.len_utf8());
            }
            Ok(text)
        }
        Err(error) => {
            let at = error.utf8_error().valid_up_to();
            let bytes = error.as_bytes();
            let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
            let is_utf16 = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
            bail!(
                "{source} is not UTF-8 text: byte 0x{:02x} at offset {at}, in line {line}; convert \
                 it first, as with `iconv -f {} -t utf-8`",
                bytes.get(at).copied().unwrap_or_default(),
                if is_utf16 { "utf-16" } else { "latin1" }
            )
        }
    }
}
