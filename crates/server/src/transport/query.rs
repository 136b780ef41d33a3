//! Parameters behind the question mark of a request's target.

use axum::http::Uri;

use super::{error::ApiError, json::wrong_type};

/// Value of the parameter `name`, decoded; `None` if it is absent or empty. The first one counts.
pub(crate) fn parameter(uri: &Uri, name: &str) -> Option<String> {
    let pairs = uri.query()?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let value = pairs.into_iter().find_map(|(key, value)| (decoded(key) == name).then_some(value));
    value.map(decoded).filter(|value| !value.is_empty())
}

/// Value of the parameter `name`, a whole number.
///
/// # Errors
/// It is none, or not from `least` to `most`.
pub(crate) fn count(
    uri: &Uri,
    name: &str,
    least: usize,
    most: usize,
) -> Result<Option<usize>, ApiError> {
    let Some(text) = parameter(uri, name) else { return Ok(None) };
    let count = text.parse().ok().filter(|count| (least..=most).contains(count));
    count.map(Some).ok_or_else(|| wrong_type(name, &format!("from {least} to {most}")))
}

/// Text of a part of a query. Bytes that are no UTF-8 become U+FFFD.
fn decoded(part: &str) -> String {
    let bytes = part.as_bytes();
    let (mut out, mut i) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(byte) = bytes.get(i) {
        let hex = bytes.get(i + 1..i + 3).filter(|hex| hex.iter().all(u8::is_ascii_hexdigit));
        let hex = hex.and_then(|hex| std::str::from_utf8(hex).ok());
        match (byte, hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                i += 2;
            }
            (b'+', _) => out.push(b' '),
            (byte, _) => out.push(*byte),
        }
        i += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let uri: Uri = "/x?a=1%2b+%C3%A9&b=&c&d=%zz%2&limit=7&a=2".parse().unwrap();
        let parameter = |name| parameter(&uri, name);
        assert_eq!(parameter("a").unwrap(), "1+ é");
        assert_eq!(parameter("d").unwrap(), "%zz%2");
        assert!(["b", "c", "e"].into_iter().all(|name| parameter(name).is_none()));
        assert_eq!(count(&uri, "limit", 1, 100).unwrap(), Some(7));
        assert!(count(&uri, "limit", 1, 6).is_err() && count(&uri, "d", 0, 9).is_err());
    }
}
