//! Addresses of schemas: RFC 3986 as far as `$id` and `$ref` need it.

/// The address that `reference` has in a document at `base`.
pub(super) fn join(base: &str, reference: &str) -> String {
    let (scheme, rest) = split_scheme(base);
    if !split_scheme(reference).0.is_empty() {
        return reference.to_owned();
    }
    if let Some(network) = reference.strip_prefix("//") {
        return format!("{scheme}//{network}");
    }
    // An address without slashes, such as a URN, is no folder.
    let (authority, path) = match rest.strip_prefix("//") {
        Some(rest) => {
            let end = rest.find('/').unwrap_or(rest.len());
            (format!("//{}", &rest[..end]), &rest[end..])
        }
        None => (String::new(), rest),
    };
    let path = match reference {
        "" => return base.to_owned(),
        absolute if absolute.starts_with('/') => absolute.to_owned(),
        relative => {
            let folder = path.rfind('/').map_or("", |end| &path[..=end]);
            let folder = if folder.is_empty() && !authority.is_empty() { "/" } else { folder };
            format!("{folder}{relative}")
        }
    };
    format!("{scheme}{authority}{}", without_dots(&path))
}

/// The scheme of an address with its colon, and the rest.
fn split_scheme(uri: &str) -> (&str, &str) {
    let end = uri.find(':').filter(|end| {
        let scheme = &uri[..*end];
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    });
    uri.split_at(end.map_or(0, |end| end + 1))
}

/// A path without `.` and `..`.
fn without_dots(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let count = path.split('/').count();
    for (index, part) in path.split('/').enumerate() {
        let is_last = index + 1 == count;
        match part {
            "." if is_last => parts.push(""),
            "." => {}
            ".." => {
                if parts.len() > 1 || parts.first().is_some_and(|part| !part.is_empty()) {
                    parts.pop();
                }
                if is_last {
                    parts.push("");
                }
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// A fragment without the escapes of addresses.
pub(super) fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (first, byte) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_joined_to_their_base() {
        for (base, reference, expected) in [
            ("http://a.b/x/y.json", "z.json", "http://a.b/x/z.json"),
            ("http://a.b/x/y.json", "/z.json", "http://a.b/z.json"),
            ("http://a.b/x/y.json", "../z.json", "http://a.b/z.json"),
            ("http://a.b/x/y.json", "./z", "http://a.b/x/z"),
            ("http://a.b", "z", "http://a.b/z"),
            ("http://a.b/x/", "y/", "http://a.b/x/y/"),
            ("http://a.b/x", "", "http://a.b/x"),
            ("https://a.b/x", "//c.d/y", "https://c.d/y"),
            ("", "z.json", "z.json"),
            ("urn:uuid:1", "urn:uuid:2", "urn:uuid:2"),
            ("http://a.b/x", "tag:e,2024:y", "tag:e,2024:y"),
        ] {
            assert_eq!(join(base, reference), expected, "{base} {reference}");
        }
        assert_eq!(decoded("/a%25b/%22c%zz"), "/a%b/\"c%zz");
    }
}
