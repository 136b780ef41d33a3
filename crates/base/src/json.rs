//! JSON as Python writes it, with numbers that JSON lacks.

use serde::de::DeserializeOwned;

/// Numbers that Python writes and JSON lacks.
const NON_NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Parses JSON. `NaN`, `Infinity` and `-Infinity` become strings, so that they are errors only
/// where a number is read. A byte order mark is skipped.
///
/// # Errors
/// The bytes are not JSON, or not of type `T`.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    match serde_json::from_slice(bytes) {
        Err(e) if e.is_syntax() => match with_strings(bytes) {
            Some(quoted) => serde_json::from_slice(&quoted),
            None => Err(e),
        },
        parsed => parsed,
    }
}

/// Description of an error of [`parse`]. Advises a download only for a file that ends early.
pub fn problem(error: &serde_json::Error) -> String {
    if error.is_eof() {
        format!("this JSON ends early: {error}; the file is short, download it again")
    } else {
        format!("this is not the JSON that is expected: {error}")
    }
}

/// The JSON with each of [`NON_NUMBERS`] as a string; `None` if it has none.
fn with_strings(json: &[u8]) -> Option<Vec<u8>> {
    let mut quoted = Vec::with_capacity(json.len() + 64);
    let (mut in_string, mut rest) = (false, json);
    while let [byte, tail @ ..] = rest {
        let word = NON_NUMBERS.iter().find(|word| !in_string && rest.starts_with(word.as_bytes()));
        if let Some(word) = word {
            quoted.push(b'"');
            quoted.extend(word.as_bytes());
            quoted.push(b'"');
            rest = &rest[word.len()..];
            continue;
        }
        quoted.push(*byte);
        rest = tail;
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => {
                if let [escaped, tail @ ..] = rest {
                    quoted.push(*escaped);
                    rest = tail;
                }
            }
            _ => {}
        }
    }
    (quoted.len() > json.len()).then_some(quoted)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn numbers_of_python_are_strings() {
        let text = r#"{"a": NaN, "b": [-Infinity, Infinity, 1], "NaN \" Infinity": "NaN"}"#;
        let expected = json!({
            "a": "NaN", "b": ["-Infinity", "Infinity", 1], "NaN \" Infinity": "NaN"
        });
        assert_eq!(parse::<Value>(text.as_bytes()).unwrap(), expected);
        assert_eq!(parse::<Value>(b"\xef\xbb\xbf{}").unwrap(), json!({}));
        assert!(parse::<f64>(b"NaN").is_err());
        for (broken, short) in [("{", true), ("{\"a\": [1,", true), ("{a}", false), ("{} x", false)]
        {
            let problem = problem(&parse::<Value>(broken.as_bytes()).unwrap_err());
            assert_eq!(problem.contains("download"), short, "{problem}");
        }
    }
}
