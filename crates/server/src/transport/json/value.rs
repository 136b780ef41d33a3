//! Values in the text of a request. The text is checked once as a whole; of a value only the parts
//! are read that a reader asks for, so that unknown fields cost no memory.

use std::borrow::Cow;

use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::surrogates;

/// Text that is JSON.
#[derive(Clone, Debug)]
pub(crate) struct JsonText(String);

impl JsonText {
    /// Checks a text. Surrogates without their other half become U+FFFD.
    ///
    /// # Errors
    /// It is not UTF-8, or not JSON; the error says where.
    pub(crate) fn new(mut text: Vec<u8>) -> Result<Self, String> {
        surrogates::mend(&mut text);
        let text = String::from_utf8(text)
            .map_err(|e| format!("invalid UTF-8 at byte {}", e.utf8_error().valid_up_to()))?;
        let checked = serde_json::from_str::<IgnoredAny>(&text);
        checked.map(|_| Self(text)).map_err(|e| e.to_string())
    }

    /// The value.
    pub(crate) fn value(&self) -> Json<'_> {
        Json(self.0.trim_matches(|c: char| c.is_ascii_whitespace()))
    }
}

/// Value in a [`JsonText`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Json<'a>(&'a str);

/// List in a [`JsonText`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct List<'a>(&'a str);

/// Numbers of values in a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ValueCounts {
    /// Members of objects, lists and objects.
    pub(crate) members: usize,
    /// Elements and members after the first one of each list and object.
    pub(crate) elements: usize,
}

/// A member of an object.
#[derive(Clone, Debug)]
pub(crate) struct Member<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) value: Json<'a>,
}

impl<'a> Json<'a> {
    /// Text of the value.
    pub(crate) fn raw(self) -> &'a str {
        self.0
    }

    pub(crate) fn is_null(self) -> bool {
        self.0 == "null"
    }

    pub(crate) fn is_list(self) -> bool {
        self.0.starts_with('[')
    }

    pub(crate) fn is_object(self) -> bool {
        self.0.starts_with('{')
    }

    pub(crate) fn is_number(self) -> bool {
        self.0.starts_with(|c: char| c == '-' || c.is_ascii_digit())
    }

    pub(crate) fn as_bool(self) -> Option<bool> {
        self.0.parse().ok()
    }

    /// A number that is finite as f64.
    pub(crate) fn as_f64(self) -> Option<f64> {
        let number = self.is_number().then(|| self.0.parse::<f64>().ok()).flatten()?;
        number.is_finite().then_some(number)
    }

    /// A whole number, also in a form such as `20.0` or `2e1`.
    pub(crate) fn as_integer(self) -> Option<i128> {
        /// From here on not every whole number is one of f64.
        const EXACT: f64 = 9_007_199_254_740_992.0;
        if !self.is_number() {
            return None;
        }
        if let Ok(integer) = self.0.parse() {
            return Some(integer);
        }
        let number = self.as_f64()?;
        (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i128)
    }

    /// A string.
    pub(crate) fn as_str(self) -> Option<Cow<'a, str>> {
        let inner = self.0.strip_prefix('"')?.strip_suffix('"')?;
        match inner.contains('\\') {
            false => Some(Cow::Borrowed(inner)),
            true => serde_json::from_str::<String>(self.0).ok().map(Cow::Owned),
        }
    }

    pub(crate) fn as_list(self) -> Option<List<'a>> {
        self.is_list().then_some(List(self.0))
    }

    /// Members of an object, in their order. A name may occur several times.
    pub(crate) fn members(self) -> Option<impl Iterator<Item = Member<'a>>> {
        let mut rest = self.0.strip_prefix('{')?;
        Some(std::iter::from_fn(move || {
            let name = take_value(&mut rest)?;
            let value = take_value(&mut rest)?;
            Some(Member { name: name.as_str()?, value })
        }))
    }

    /// The value in memory.
    ///
    /// # Errors
    /// It is nested too deeply, or has a number that is out of range; the error says where.
    pub(crate) fn to_value(self) -> Result<Value, String> {
        serde_json::from_str(self.0).map_err(|e| e.to_string())
    }

    /// An object in memory: see [`to_value`](Self::to_value).
    ///
    /// # Errors
    /// As [`to_value`](Self::to_value); it is no object.
    pub(crate) fn to_map(self) -> Result<Map<String, Value>, String> {
        serde_json::from_str(self.0).map_err(|e| e.to_string())
    }

    /// Text of the value without white space and without escapes that are not needed.
    pub(crate) fn compact(self) -> String {
        let (mut compact, mut rest) = (String::new(), self.0);
        while let Some(start) = rest.find(|c: char| !c.is_ascii_whitespace()) {
            rest = &rest[start..];
            let end = match rest.starts_with('"') {
                true => string_end(rest.as_bytes()),
                false => {
                    let is_end = |c: char| c == '"' || c.is_ascii_whitespace();
                    rest.find(is_end).unwrap_or(rest.len())
                }
            };
            let (part, after) = rest.split_at(end);
            // A string always has a JSON form.
            let written = part.contains('\\').then(|| Json(part).as_str()).flatten();
            match written.and_then(|text| serde_json::to_string(&text).ok()) {
                Some(text) => compact += &text,
                None => compact += part,
            }
            rest = after;
        }
        compact
    }

    /// Numbers of the values in it.
    pub(crate) fn counts(self) -> ValueCounts {
        let (mut counts, mut rest) = (ValueCounts::default(), self.0.as_bytes());
        let is_counted = |byte: &u8| matches!(byte, b'"' | b',' | b':' | b'[' | b'{');
        while let Some(next) = rest.iter().position(is_counted) {
            rest = &rest[next..];
            match rest[0] {
                b'"' => {
                    rest = &rest[string_end(rest)..];
                    continue;
                }
                b',' => counts.elements += 1,
                _ => counts.members += 1,
            }
            rest = &rest[1..];
        }
        counts
    }
}

impl<'a> List<'a> {
    /// The elements, in their order.
    pub(crate) fn iter(self) -> impl Iterator<Item = Json<'a>> {
        let mut rest = self.0.get(1..).unwrap_or_default();
        std::iter::from_fn(move || take_value(&mut rest))
    }

    pub(crate) fn is_empty(self) -> bool {
        self.iter().next().is_none()
    }
}

/// Takes the next value from the rest of a list or an object.
fn take_value<'a>(rest: &mut &'a str) -> Option<Json<'a>> {
    let is_between = |c: char| c.is_ascii_whitespace() || c == ',' || c == ':';
    let text = rest.trim_start_matches(is_between);
    let (value, after) = text.split_at(value_end(text.as_bytes()));
    *rest = after;
    (!value.is_empty()).then_some(Json(value))
}

/// End of the value with which a text starts; 0 where a list or an object ends.
fn value_end(text: &[u8]) -> usize {
    let is_end = |byte: &u8| matches!(byte, b',' | b']' | b'}') || byte.is_ascii_whitespace();
    match text.first() {
        None => 0,
        Some(b'"') => string_end(text),
        Some(b'{' | b'[') => {
            let (mut depth, mut i) = (0_usize, 0);
            while let Some(byte) = text.get(i) {
                i += match byte {
                    b'"' => string_end(&text[i..]),
                    _ => 1,
                };
                match byte {
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' => depth -= 1,
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
            }
            i
        }
        Some(_) => text.iter().position(is_end).unwrap_or(text.len()),
    }
}

/// End of the string with which a text starts.
fn string_end(text: &[u8]) -> usize {
    let mut i = 1;
    while let Some(next) = text.get(i..).and_then(|t| t.iter().position(|b| b"\"\\".contains(b))) {
        i += next + 1;
        match text[i - 1] {
            b'"' => return i,
            _ => i += 1,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(text: &str) -> JsonText {
        JsonText::new(text.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn values_are_those_of_serde_json() {
        let source = concat!(
            r#" {"a": [1, -2.5e3, "x\"]\\", [], {}, {"b":{"c":[[true]]}} ,null ] , "":"", "#,
            r#""\u00e9 \ud83d\ude00": {"}": "]{["}, "last":false} "#,
        );
        let (json, expected) = (text(source), serde_json::from_str::<Value>(source).unwrap());
        fn check(json: Json<'_>, expected: &Value) {
            assert_eq!(json.to_value().unwrap(), *expected);
            assert_eq!(serde_json::from_str::<Value>(&json.compact()).unwrap(), *expected);
            assert_eq!(json.compact(), expected.to_string().replace("-2500.0", "-2.5e3"));
            assert_eq!(json.as_bool(), expected.as_bool());
            assert_eq!(json.as_f64(), expected.as_f64());
            assert_eq!(json.as_str().as_deref(), expected.as_str());
            assert_eq!(json.is_null(), expected.is_null());
            assert_eq!(json.is_list(), expected.is_array());
            assert_eq!(json.is_object(), expected.is_object());
            if let Some(list) = json.as_list() {
                let expected = expected.as_array().unwrap();
                assert_eq!(list.is_empty(), expected.is_empty());
                assert_eq!(list.iter().count(), expected.len());
                list.iter().zip(expected).for_each(|(json, expected)| check(json, expected));
            }
            if let Some(members) = json.members() {
                let members: Vec<Member<'_>> = members.collect();
                let expected = expected.as_object().unwrap();
                assert!(members.iter().map(|m| &*m.name).eq(expected.keys()));
                for Member { name, value } in members {
                    check(value, &expected[&*name]);
                }
            }
        }
        check(json.value(), &expected);
        let counts = ValueCounts { members: 16, elements: 9 };
        assert_eq!(json.value().counts(), counts);
    }

    #[test]
    fn whole_numbers_may_have_a_fraction_of_zero() {
        let integer = |source: &str| text(source).value().as_integer();
        for (source, expected) in [
            ("20", 20),
            ("20.0", 20),
            ("2e1", 20),
            ("-0", 0),
            ("-9223372036854775808", i64::MIN.into()),
            ("18446744073709551615", u64::MAX.into()),
        ] {
            assert_eq!(integer(source), Some(expected), "{source}");
        }
        for wrong in ["20.5", "1e300", "1e999", "\"20\"", "true", "null", "[1]"] {
            assert_eq!(integer(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn lone_surrogates_are_replaced_everywhere() {
        let json = text(r#"{"\ud83d": ["\udc00", {"x": "{\"y\": \"\\ud83d\"}"}]}"#);
        let inner = r#"{"y": "\ud83d"}"#;
        let expected = json!({"\u{fffd}": ["\u{fffd}", {"x": inner}]});
        assert_eq!(json.value().to_value().unwrap(), expected);
        // The text in a string is another JSON text.
        assert_eq!(text(inner).value().to_value().unwrap(), json!({"y": "\u{fffd}"}));
    }

    #[test]
    fn text_that_is_not_json_is_refused() {
        for wrong in ["", "{", "{}x", "[1,]", "{'a': 1}", "\"\n\"", "01", "nul", "[1 2]"] {
            assert!(JsonText::new(wrong.into()).is_err(), "{wrong}");
        }
        assert!(JsonText::new(b"\"\xff\"".to_vec()).unwrap_err().contains("UTF-8 at byte 1"));
        // Depth costs no stack until a value is read.
        let deep = "[".repeat(1 << 20) + &"]".repeat(1 << 20);
        assert!(text(&deep).value().to_value().is_err());
    }
}
