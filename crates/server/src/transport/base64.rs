//! Base64 with the alphabet of RFC 4648, section 4.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Characters of a whole group, which has three bytes.
const GROUP: usize = 4;

/// Base64 of bytes, with padding.
pub(crate) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * GROUP);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..GROUP {
            let index = (bits >> (18 - 6 * i)) & 63;
            text.push(match i > group.len() {
                true => '=',
                false => char::from(ALPHABET[index as usize]),
            });
        }
    }
    text
}

/// Number of bytes that a text stands for, if it is valid.
pub(crate) fn decoded_len(text: &str) -> usize {
    let symbols = text.bytes().filter(|byte| !b"\r\n=".contains(byte)).count();
    symbols / GROUP * 3 + (symbols % GROUP).saturating_sub(1)
}

/// Bytes of a text, with or without padding. Line breaks are skipped.
///
/// # Errors
/// A character is not of the alphabet, or the text is cut off; the error says where.
pub(crate) fn decode(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(decoded_len(text));
    let (mut bits, mut symbols, mut padding) = (0_u32, 0_usize, 0_usize);
    for (i, byte) in text.bytes().enumerate() {
        let value = match byte {
            b'\r' | b'\n' => continue,
            b'=' => {
                padding += 1;
                continue;
            }
            _ => value(byte).filter(|_| padding == 0),
        };
        let wrong = || {
            let c = text.get(i..).and_then(|rest| rest.chars().next()).unwrap_or_default();
            format!("expected base64, got {c:?} at byte {i}")
        };
        bits = bits << 6 | value.ok_or_else(wrong)?;
        symbols += 1;
        if symbols.is_multiple_of(GROUP) {
            bytes.extend_from_slice(&bits.to_be_bytes()[1..]);
            bits = 0;
        }
    }
    let rest = symbols % GROUP;
    if rest == 1 || (padding > 0 && (rest == 0 || rest + padding != GROUP)) {
        let expected = "expected base64 in groups of four characters";
        return Err(format!("{expected}, got {symbols} and {padding} of padding"));
    }
    let [_, first, second, _] = (bits << (6 * (GROUP - rest) % 24)).to_be_bytes();
    bytes.extend([first, second].into_iter().take(rest.saturating_sub(1)));
    Ok(bytes)
}

fn value(byte: u8) -> Option<u32> {
    let value = match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(value.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_rfc_4648_become_their_bytes() {
        let texts = ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"];
        for (len, text) in texts.iter().enumerate() {
            let bytes = &b"foobar"[..len];
            assert_eq!(encode(bytes), *text);
            let broken: String = text.chars().flat_map(|c| [c, '\r', '\n']).collect();
            for text in [*text, text.trim_end_matches('='), &broken] {
                assert_eq!((decoded_len(text), &*decode(text).unwrap()), (len, bytes), "{text:?}");
            }
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)).unwrap(), all);
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, problem) in [
            ("Zm9-", "got '-' at byte 3"),
            ("Zm9_", "got '_' at byte 3"),
            ("Zm 9", "got ' ' at byte 2"),
            ("Zmé=", "got 'é' at byte 2"),
            ("Zg==Zg==", "got 'Z' at byte 4"),
            ("Z", "1 and 0 of padding"),
            ("Zm9vY", "5 and 0 of padding"),
            ("Zg=", "2 and 1 of padding"),
            ("Zm9=v", "got 'v' at byte 4"),
            ("Zm9v=", "4 and 1 of padding"),
            ("Zm9v====", "4 and 4 of padding"),
            ("=", "0 and 1 of padding"),
        ] {
            let error = decode(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
