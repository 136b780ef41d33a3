//! Python's `str` and `repr` of values, as they are written: bounded by fuel and by nesting.

use minijinja::{Error, ErrorKind, State, Value, value::ValueKind};

use super::{fuel::FUEL_BYTES, range::PythonRange};

/// Maximum nesting of a value in text. A namespace may contain itself.
pub(super) const MAX_DEPTH: usize = 100;

/// `str(value)`.
///
/// # Errors
/// The text is longer than the fuel allows, or the value is nested too deeply.
pub(in crate::chat) fn python_str(state: &State, value: &Value) -> Result<String, Error> {
    TextWriter::new(state).text(value, 0)
}

/// `repr(value)`.
///
/// # Errors
/// As [`python_str`].
pub(super) fn python_repr(state: &State, value: &Value) -> Result<String, Error> {
    TextWriter::new(state).text(value, 1)
}

/// `ascii(value)`.
///
/// # Errors
/// As [`python_str`].
pub(super) fn python_ascii(state: &State, value: &Value) -> Result<String, Error> {
    TextWriter { ascii: true, ..TextWriter::new(state) }.text(value, 1)
}

/// Charges the fuel of `str(value)` without making it, for functions that make it themselves.
///
/// # Errors
/// As [`python_str`].
pub(super) fn charge_text(state: &State, value: &Value) -> Result<(), Error> {
    TextWriter { out: None, ..TextWriter::new(state) }.value(value, 0)
}

/// `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float_repr(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() { "nan" } else { ["inf", "-inf"][usize::from(number < 0.0)] }
            .to_owned();
    }
    let shortest = format!("{number:e}");
    match shortest.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
        Some((digits, Ok(exponent))) if !(-4..16).contains(&exponent) && number != 0.0 => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => {
            let plain = number.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
    }
}

/// Text of a number.
pub(super) fn number_text(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => float_repr(number),
        _ => value.to_string(),
    }
}

/// Whether `repr` shows a character beyond ASCII as it is. The library of Rust has the same rule,
/// but for combining marks at the start of a text.
fn is_printable(c: char) -> bool {
    String::from_iter(['a', c]).escape_debug().nth(1) == Some(c)
}

struct TextWriter<'a, 's, 'e> {
    state: &'a State<'s, 'e>,
    /// `None` if the text is only charged.
    out: Option<String>,
    uncharged: usize,
    /// Whether to escape characters beyond ASCII in quoted texts.
    ascii: bool,
}

impl<'a, 's, 'e> TextWriter<'a, 's, 'e> {
    fn new(state: &'a State<'s, 'e>) -> TextWriter<'a, 's, 'e> {
        TextWriter { state, out: Some(String::new()), uncharged: 0, ascii: false }
    }

    fn text(mut self, value: &Value, depth: usize) -> Result<String, Error> {
        self.value(value, depth)?;
        Ok(self.out.unwrap_or_default())
    }

    fn push(&mut self, text: &str) -> Result<(), Error> {
        self.uncharged += text.len();
        if self.uncharged >= FUEL_BYTES {
            self.state.consume_fuel((self.uncharged / FUEL_BYTES) as u64)?;
            self.uncharged %= FUEL_BYTES;
        }
        if let Some(out) = &mut self.out {
            out.push_str(text);
        }
        Ok(())
    }

    /// `repr` of a text.
    fn quoted(&mut self, text: &str) -> Result<(), Error> {
        let quote = if text.contains('\'') && !text.contains('"') { "\"" } else { "'" };
        self.push(quote)?;
        let mut copied = 0;
        for (at, c) in text.char_indices() {
            let escape = match c {
                '\n' => "\\n".to_owned(),
                '\r' => "\\r".to_owned(),
                '\t' => "\\t".to_owned(),
                _ if c == '\\' || quote.starts_with(c) => format!("\\{c}"),
                ' '..='~' => continue,
                _ if !self.ascii && (c.is_alphanumeric() || is_printable(c)) => continue,
                _ => match u32::from(c) {
                    code @ ..0x100 => format!("\\x{code:02x}"),
                    code @ ..0x1_0000 => format!("\\u{code:04x}"),
                    code => format!("\\U{code:08x}"),
                },
            };
            self.push(&text[copied..at])?;
            self.push(&escape)?;
            copied = at + c.len_utf8();
        }
        self.push(&text[copied..])?;
        self.push(quote)
    }

    /// `str` of the outermost value, `repr` of those in it.
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let problem = "the value is nested too deeply to become text";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
        if let Some(range) = value.downcast_object_ref::<PythonRange>() {
            return self.push(&range.to_string());
        }
        match value.kind() {
            ValueKind::Undefined if depth > 0 => self.push("Undefined"),
            ValueKind::Undefined => Ok(()),
            ValueKind::None => self.push("None"),
            ValueKind::Bool => self.push(if value.is_true() { "True" } else { "False" }),
            ValueKind::Number => self.push(&number_text(value)),
            ValueKind::String if depth > 0 => self.quoted(value.as_str().unwrap_or_default()),
            ValueKind::String => self.push(value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                self.push("{")?;
                for (i, key) in value.try_iter()?.enumerate() {
                    self.push(if i > 0 { ", " } else { "" })?;
                    self.value(&key, depth + 1)?;
                    self.push(": ")?;
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
                self.push("}")
            }
            ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
                let brackets = if value.is_tuple() { ["(", ")"] } else { ["[", "]"] };
                self.push(brackets[0])?;
                for (i, item) in value.try_iter()?.enumerate() {
                    self.push(if i > 0 { ", " } else { "" })?;
                    self.value(&item, depth + 1)?;
                }
                // A tuple of one item has a comma.
                let is_one = value.is_tuple() && value.len() == Some(1);
                self.push(if is_one { "," } else { "" })?;
                self.push(brackets[1])
            }
            _ => self.push(&value.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::float_repr;

    /// Expected texts are Python's.
    #[test]
    fn floats_are_written_as_in_python() {
        for (number, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5e-5, "-2.5e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.5e300, "-1.5e+300"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(number), expected);
        }
        assert_eq!(float_repr(f64::NAN), "nan");
    }
}
