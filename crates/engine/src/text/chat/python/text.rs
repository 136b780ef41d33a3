//! Python's `str` and `repr` of values, as they are written: bounded by fuel and by nesting.

use minijinja::{Error, ErrorKind, State, Value, value::ValueKind};

use super::FUEL_BYTES;

/// Maximum nesting of a value in text. A namespace may contain itself.
pub(super) const MAX_DEPTH: usize = 100;

/// `str(value)`.
///
/// # Errors
/// The text is longer than the fuel allows, or the value is nested too deeply.
pub(in crate::text::chat) fn python_str(state: &State, value: &Value) -> Result<String, Error> {
    let mut writer = TextWriter { state, out: Some(String::new()), uncharged: 0 };
    writer.value(value, 0)?;
    Ok(writer.out.unwrap_or_default())
}

/// Charges the fuel of `str(value)` without making it, for functions that make it themselves.
///
/// # Errors
/// As [`python_str`].
pub(super) fn charge_text(state: &State, value: &Value) -> Result<(), Error> {
    TextWriter { state, out: None, uncharged: 0 }.value(value, 0)
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

struct TextWriter<'a, 's, 'e> {
    state: &'a State<'s, 'e>,
    /// `None` if the text is only charged.
    out: Option<String>,
    uncharged: usize,
}

impl TextWriter<'_, '_, '_> {
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

    /// `str` of the outermost value, `repr` of those in it.
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let problem = "the value is nested too deeply to become text";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
        match value.kind() {
            ValueKind::Undefined if depth > 0 => self.push("Undefined"),
            ValueKind::Undefined => Ok(()),
            ValueKind::None => self.push("None"),
            ValueKind::Bool => self.push(if value.is_true() { "True" } else { "False" }),
            ValueKind::Number => self.push(&number_text(value)),
            ValueKind::String if depth > 0 => self.push(&format!("{value:?}")),
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
