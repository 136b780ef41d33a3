//! JSON text as it comes: passed on where it is valid, mended where models often slip.
//!
//! The output is always the start of a valid JSON text. Commas, keys and spaces are held back
//! until their value begins, so that [`JsonStream::close`] can end the text anywhere. Control
//! characters in strings are escaped, unknown escapes are backslashes, trailing commas are dropped,
//! and Python's `True`, `False` and `None` are translated.

use std::fmt::Write as _;

use serde::de::IgnoredAny;

/// Maximum depth of objects and arrays. Readers of JSON have limits of 128 and more.
pub(super) const MAX_DEPTH: usize = 100;

/// Escape for a character that is no character: half of a surrogate pair.
const REPLACEMENT: &str = "\\ufffd";

/// Result of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dialect) enum JsonStep {
    Going,
    /// The value ended with this character.
    Done,
    /// The value, a number or a literal, ended before this character.
    Ended,
    /// This character is no JSON here.
    Broken,
}

/// Place in a JSON text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum JsonPlace {
    #[default]
    Value,
    Key,
    KeyText,
    Colon,
    Text,
    Word,
    /// Behind a value.
    Next,
    Done,
}

/// State of one JSON value.
#[derive(Clone, Debug, Default)]
pub(in crate::dialect) struct JsonStream {
    place: JsonPlace,
    /// Brackets that are open.
    open: Vec<char>,
    /// Comma, key and spaces before a value.
    held: String,
    /// A number or literal so far.
    word: String,
    string: StringText,
}

/// State inside a string.
#[derive(Clone, Debug, Default)]
struct StringText {
    /// An escape so far.
    escape: String,
    /// First half of a surrogate pair.
    half: Option<u32>,
}

impl JsonStream {
    /// Takes a character and appends to `out` the text that is certain.
    pub(in crate::dialect) fn push(&mut self, c: char, out: &mut String) -> JsonStep {
        let is_space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match (self.place, c) {
            (JsonPlace::Value | JsonPlace::Key | JsonPlace::Colon | JsonPlace::Next, _)
                if is_space =>
            {
                self.held.push(c);
            }
            (JsonPlace::Value, '{' | '[') if self.open.len() < MAX_DEPTH => {
                self.begin(out);
                out.push(c);
                self.open.push(c);
                self.place = if c == '{' { JsonPlace::Key } else { JsonPlace::Value };
            }
            (JsonPlace::Value, '"') => {
                self.begin(out);
                out.push(c);
                self.place = JsonPlace::Text;
            }
            (JsonPlace::Value, _) if is_word(c) => {
                self.begin(out);
                self.word.push(c);
                self.place = JsonPlace::Word;
            }
            (JsonPlace::Key, '"') => {
                self.held.push(c);
                self.place = JsonPlace::KeyText;
            }
            (JsonPlace::KeyText, _) => {
                if self.string.push(c, &mut self.held) {
                    self.place = JsonPlace::Colon;
                }
            }
            (JsonPlace::Colon, ':') => {
                self.held.push(c);
                self.place = JsonPlace::Value;
            }
            (JsonPlace::Text, _) => {
                if self.string.push(c, out) {
                    return self.end_value();
                }
            }
            (JsonPlace::Word, _) if is_word(c) => self.word.push(c),
            (JsonPlace::Word, _) => {
                self.end_word(out);
                return match self.end_value() {
                    JsonStep::Done => JsonStep::Ended,
                    _ => self.push(c, out),
                };
            }
            (JsonPlace::Next, ',') => {
                self.held.push(c);
                let is_object = self.open.last() == Some(&'{');
                self.place = if is_object { JsonPlace::Key } else { JsonPlace::Value };
            }
            (JsonPlace::Key | JsonPlace::Next, '}') if self.open.last() == Some(&'{') => {
                return self.end_container(c, out);
            }
            (JsonPlace::Value | JsonPlace::Next, ']') if self.open.last() == Some(&'[') => {
                return self.end_container(c, out);
            }
            (JsonPlace::Done, _) => return JsonStep::Ended,
            _ => return JsonStep::Broken,
        }
        JsonStep::Going
    }

    /// Ends the text where it is, with all that is open.
    pub(in crate::dialect) fn close(&mut self, out: &mut String) {
        match self.place {
            JsonPlace::Text => {
                self.string.end(out);
                out.push('"');
            }
            JsonPlace::Word => self.end_word(out),
            _ => {}
        }
        out.extend(self.open.drain(..).rev().map(|open| if open == '{' { '}' } else { ']' }));
        self.held.clear();
        self.place = JsonPlace::Done;
    }

    /// A value begins: its key and comma are certain.
    fn begin(&mut self, out: &mut String) {
        if !self.open.is_empty() {
            out.push_str(&self.held);
        }
        self.held.clear();
    }

    fn end_value(&mut self) -> JsonStep {
        if self.open.is_empty() {
            self.place = JsonPlace::Done;
            return JsonStep::Done;
        }
        self.place = JsonPlace::Next;
        JsonStep::Going
    }

    fn end_container(&mut self, close: char, out: &mut String) -> JsonStep {
        if self.held.trim().is_empty() {
            out.push_str(&self.held);
        }
        self.held.clear();
        out.push(close);
        self.open.pop();
        self.end_value()
    }

    fn end_word(&mut self, out: &mut String) {
        let word = std::mem::take(&mut self.word);
        match literal(&word) {
            Some(literal) => out.push_str(literal),
            None => push_string(&word, out),
        }
    }
}

impl StringText {
    /// Takes a character. Returns whether it ends the string.
    fn push(&mut self, c: char, out: &mut String) -> bool {
        if self.escape.is_empty() {
            match c {
                '\\' => self.escape.push(c),
                '"' => {
                    self.end_half(out);
                    out.push(c);
                    return true;
                }
                _ => {
                    self.end_half(out);
                    push_raw(c, out);
                }
            }
            return false;
        }
        let is_unicode = self.escape.starts_with("\\u");
        if is_unicode && !c.is_ascii_hexdigit() {
            // No escape after all: its text, with the backslash as a character.
            self.end_half(out);
            out.push('\\');
            out.push_str(&self.escape);
            self.escape.clear();
            return self.push(c, out);
        }
        self.escape.push(c);
        if is_unicode {
            if self.escape.len() == "\\u0000".len() {
                self.end_unicode(out);
            }
        } else if c != 'u' {
            self.end_half(out);
            match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => out.push_str(&self.escape),
                _ => {
                    out.push_str("\\\\");
                    push_raw(c, out);
                }
            }
            self.escape.clear();
        }
        false
    }

    fn end_unicode(&mut self, out: &mut String) {
        let code = u32::from_str_radix(&self.escape[2..], 16).unwrap_or(0xFFFD);
        match code {
            0xDC00..=0xDFFF => match self.half.take() {
                Some(half) => {
                    let _ = write!(out, "\\u{half:04x}\\u{code:04x}");
                }
                None => out.push_str(REPLACEMENT),
            },
            _ => {
                self.end_half(out);
                match code {
                    0xD800..=0xDBFF => self.half = Some(code),
                    _ => out.push_str(&self.escape),
                }
            }
        }
        self.escape.clear();
    }

    fn end_half(&mut self, out: &mut String) {
        if self.half.take().is_some() {
            out.push_str(REPLACEMENT);
        }
    }

    /// Ends the string. An escape that is not complete is dropped.
    fn end(&mut self, out: &mut String) {
        self.end_half(out);
        self.escape.clear();
    }
}

/// Whether a number or a literal can have this character.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.' | '_')
}

/// JSON text of a number or a literal, in JSON or Python.
pub(super) fn literal(word: &str) -> Option<&str> {
    match word {
        "True" => Some("true"),
        "False" => Some("false"),
        "None" => Some("null"),
        _ => serde_json::from_str::<IgnoredAny>(word).is_ok().then_some(word),
    }
}

/// Appends a character of a string.
pub(super) fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' | '\\' => out.extend(['\\', c]),
        _ => push_raw(c, out),
    }
}

/// Appends a character that is no quote and no backslash.
fn push_raw(c: char, out: &mut String) {
    match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..='\u{1F}' => {
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        }
        _ => out.push(c),
    }
}

/// Appends a whole string with its quotes.
pub(super) fn push_string(text: &str, out: &mut String) {
    out.push('"');
    text.chars().for_each(|c| push_escaped(c, out));
    out.push('"');
}

/// `text` as one valid JSON value, mended if need be; `None` if it is none.
pub(super) fn mended(text: &str) -> Option<String> {
    let mut stream = JsonStream::default();
    let mut out = String::new();
    let mut is_done = false;
    for c in text.trim().chars() {
        match stream.push(c, &mut out) {
            JsonStep::Going if !is_done => {}
            JsonStep::Done => is_done = true,
            _ => return None,
        }
    }
    if !is_done {
        let word = literal(text.trim())?;
        return Some(word.to_owned());
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn valid_json_passes_unchanged() {
        for json in [
            r#"{"a": [1, -2.5e3, true, null, {}], "b": {"c": "\"\\\u00e9\ud83e\udd8a\n/\/"}}"#,
            "{ }",
            "{\n  \"a\": 1\n}",
        ] {
            assert_eq!(mended(json).as_deref(), Some(json));
        }
    }

    #[test]
    fn slips_are_mended() {
        for (text, json) in [
            ("{\"a\": True, \"b\": [None,],}", "{\"a\": true, \"b\": [null]}"),
            ("{\"a\": \"x\ny\"}", r#"{"a": "x\ny"}"#),
            (r#"{"a": "\d\u12x\ud800 \udc00"}"#, r#"{"a": "\\d\\u12x\ufffd \ufffd"}"#),
            (r#"{"a": "\ud800\u12x"}"#, r#"{"a": "\ufffd\\u12x"}"#),
            ("{\"a\": 007}", "{\"a\": \"007\"}"),
        ] {
            assert_eq!(mended(text).as_deref(), Some(json), "{text}");
        }
        for text in ["", "{", "{a: 1}", "1 2", "{} {}", "'a'"] {
            assert_eq!(mended(text), None, "{text}");
        }
    }

    #[test]
    fn random_text_ends_as_json_at_every_character() {
        let pieces = [
            "{", "}", "[", "]", "\"", "\"", ",", ":", "\\", "\\u", "d83e", "dd8a", "1", "-", "tru",
            "e", "\"a\":", " ", "\n", "é", "<",
        ];
        let mut state = 3usize;
        for _ in 0..2000 {
            let mut stream = JsonStream::default();
            let mut out = String::new();
            assert_eq!(stream.push('{', &mut out), JsonStep::Going);
            'text: for _ in 0..24 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                for c in pieces[(state >> 33) % pieces.len()].chars() {
                    let step = stream.push(c, &mut out);
                    let (mut ended, mut json) = (stream.clone(), out.clone());
                    ended.close(&mut json);
                    let value: Value = serde_json::from_str(&json).unwrap();
                    assert!(value.is_object(), "{json}");
                    if step != JsonStep::Going {
                        break 'text;
                    }
                }
            }
        }
    }
}
