//! Surrogates without their other half, which clients send where they cut a text within a
//! character. JSON allows the escapes, UTF-8 has no such character.

/// Bytes of an escape such as `\ud83d`.
const ESCAPE: usize = 6;

/// U+FFFD as an escape: as many bytes as the one that it replaces.
const REPLACEMENT: &[u8; ESCAPE] = b"\\ufffd";

/// Replaces each escaped surrogate of a JSON text that has no other half by U+FFFD, and each
/// surrogate that was encoded as if it were a character.
pub(super) fn mend(text: &mut [u8]) {
    let mut i = 0;
    while let Some(next) = text[i..].iter().position(|byte| matches!(byte, b'\\' | 0xed)) {
        i += next;
        if text[i] == 0xed {
            // Of three bytes; U+FFFD has three, too.
            if matches!(text[i..], [_, 0xa0..=0xbf, 0x80..=0xbf, ..]) {
                text[i..i + 3].copy_from_slice("\u{fffd}".as_bytes());
            }
            i += 1;
            continue;
        }
        match unit(&text[i..]) {
            Some(0xd800..=0xdbff) => match unit(&text[i + ESCAPE..]) {
                Some(0xdc00..=0xdfff) => i += 2 * ESCAPE,
                _ => {
                    text[i..i + ESCAPE].copy_from_slice(REPLACEMENT);
                    i += ESCAPE;
                }
            },
            Some(0xdc00..=0xdfff) => {
                text[i..i + ESCAPE].copy_from_slice(REPLACEMENT);
                i += ESCAPE;
            }
            Some(_) => i += ESCAPE,
            // An escaped character, which may be a backslash.
            None => i = (i + 2).min(text.len()),
        }
    }
}

/// The same of a JSON text within a string, such as the arguments of a call.
pub(crate) fn mended(text: String) -> String {
    let mut bytes = text.into_bytes();
    mend(&mut bytes);
    // Only ASCII was replaced, by ASCII.
    String::from_utf8(bytes).unwrap_or_default()
}

/// Code unit of the escape with which a text starts.
fn unit(text: &[u8]) -> Option<u16> {
    let [b'\\', b'u', digits @ ..] = text else { return None };
    let digits = str::from_utf8(digits.get(..4)?).ok()?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mended(text: &[u8]) -> Vec<u8> {
        let mut text = text.to_vec();
        mend(&mut text);
        text
    }

    #[test]
    fn only_lone_surrogates_are_replaced() {
        for (text, expected) in [
            (r#""\ud83d""#, r#""\ufffd""#),
            (r#""\uDE00 x""#, r#""\ufffd x""#),
            (r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#),
            (r#""\ud83d\n""#, r#""\ufffd\n""#),
            (r#""\ude00\ud83d""#, r#""\ufffd\ufffd""#),
            (r#""\ud83d\u0041""#, r#""\ufffd\u0041""#),
        ] {
            assert_eq!(mended(text.as_bytes()), expected.as_bytes(), "{text}");
        }
        for same in [
            r#""\ud83d\ude00""#,
            r#""\\ud83d""#,
            r#""\\\\ud83d""#,
            r#""é \u00e9 \"x""#,
            "\\u",
            "\\",
        ] {
            assert_eq!(mended(same.as_bytes()), same.as_bytes(), "{same}");
        }
        assert_eq!(mended(br#""\\\ud83d""#), br#""\\\ufffd""#);
        assert_eq!(mended(b"\xed\xa0\xbd \xed\x9f\xbf"), "\u{fffd} \u{d7ff}".as_bytes());
    }
}
