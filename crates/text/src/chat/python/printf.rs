//! Python's operator `%` of texts, and the filter `format` of Jinja2, which applies it.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Rest, ValueKind, ValueOrKwargs},
};

use super::{
    filters::{Padding, padded},
    fuel::charge_bytes,
    text::{python_ascii, python_repr, python_str},
};

/// Digits that a fraction of an `f64` has at most. All further ones are zeros.
const MAX_FRACTION: usize = 1100;

/// `text % values`, or `text % options` if some are named.
pub(super) fn format_filter(
    state: &State,
    text: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<String, Error> {
    let mut args = args.into_values();
    let text = python_str(state, text)?;
    match args.pop_if(|last| last.is_kwargs()) {
        Some(_) if !args.is_empty() => {
            Err(failed("expected positional or named values, got both".to_owned()))
        }
        Some(options) => format_values(state, &text, FormatValues::single(options)),
        None => format_values(state, &text, FormatValues::several(args)),
    }
}

/// `text % values`: a tuple has several values, everything else is one.
pub(super) fn format_operator(state: &State, text: &str, values: Value) -> Result<String, Error> {
    let is_tuple = values.is_tuple() && values.kind() == ValueKind::Seq;
    let values = match is_tuple {
        true => FormatValues::several(values.try_iter()?.collect()),
        false => FormatValues::single(values),
    };
    format_values(state, text, values)
}

/// Values of a format.
struct FormatValues {
    values: Vec<Value>,
    used: usize,
    /// Whether the format need not use them: Python takes a container for a mapping.
    may_remain: bool,
}

impl FormatValues {
    fn several(values: Vec<Value>) -> FormatValues {
        FormatValues { values, used: 0, may_remain: false }
    }

    fn single(value: Value) -> FormatValues {
        let may_remain =
            matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable);
        FormatValues { values: vec![value], used: 0, may_remain }
    }

    fn next(&mut self) -> Result<Value, Error> {
        let value = self.values.get(self.used).cloned();
        self.used += 1;
        value.ok_or_else(|| failed("it has too few values".to_owned()))
    }

    /// The value of a key. After it none is left for a specifier without key.
    fn keyed(&mut self, key: &str) -> Result<Value, Error> {
        self.used = self.values.len();
        let mapping = self.values.first().filter(|value| value.kind() == ValueKind::Map);
        let mapping =
            mapping.ok_or_else(|| failed(format!("expected a mapping for the key {key:?}")))?;
        let value = Some(mapping.get_attr(key)?).filter(|value| !value.is_undefined());
        value.ok_or_else(|| failed(format!("the key {key:?} is missing")))
    }
}

/// Conversion specifier, without its type.
#[derive(Default)]
struct FormatField {
    is_left: bool,
    is_alternate: bool,
    zeros: bool,
    /// Sign of numbers that are not negative.
    plus: &'static str,
    width: usize,
    precision: Option<usize>,
}

fn failed(problem: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("format: {problem}"))
}

fn format_values(state: &State, format: &str, mut values: FormatValues) -> Result<String, Error> {
    charge_bytes(state, format.len())?;
    let mut out = String::new();
    let mut rest = format;
    while let Some((literal, specifier)) = rest.split_once('%') {
        out.push_str(literal);
        rest = specifier;
        let mut value = None;
        if let Some(inner) = rest.strip_prefix('(') {
            let end = key_len(inner).ok_or_else(|| failed("a key has no end".to_owned()))?;
            value = Some(values.keyed(&inner[..end])?);
            rest = &inner[end + 1..];
        }
        let (field, after) = parse_field(rest, &mut values)?;
        charge_bytes(state, field.width.saturating_add(field.precision.unwrap_or(0)))?;
        let mut chars = after.chars();
        let conversion = chars.next().ok_or_else(|| failed("it ends in a %".to_owned()))?;
        rest = chars.as_str();
        if conversion == '%' {
            out.push('%');
            continue;
        }
        let value = value.map_or_else(|| values.next(), Ok)?;
        out.push_str(&format_value(state, &value, &field, conversion)?);
    }
    let FormatValues { values, used, may_remain } = values;
    if used < values.len() && !may_remain {
        return Err(failed(format!("expected {used} values, got {}", values.len())));
    }
    Ok(out + rest)
}

/// Length of a key up to the bracket that closes it. It may contain brackets.
fn key_len(inner: &str) -> Option<usize> {
    let mut depth = 0;
    inner.find(|c| {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        depth < 0
    })
}

/// The flags, width and precision at the start of a specifier, and the rest of it.
fn parse_field<'a>(
    specifier: &'a str,
    values: &mut FormatValues,
) -> Result<(FormatField, &'a str), Error> {
    let after_flags = specifier.trim_start_matches(['#', '0', '-', ' ', '+']);
    let flags = &specifier[..specifier.len() - after_flags.len()];
    let mut field = FormatField {
        is_left: flags.contains('-'),
        is_alternate: flags.contains('#'),
        zeros: flags.contains('0'),
        plus: match (flags.contains('+'), flags.contains(' ')) {
            (true, _) => "+",
            (_, true) => " ",
            _ => "",
        },
        ..FormatField::default()
    };
    let mut number = |text: &'a str| -> Result<(i64, &'a str), Error> {
        if let Some(rest) = text.strip_prefix('*') {
            let number =
                values.next()?.as_i64().ok_or_else(|| failed("* wants an int".to_owned()))?;
            return Ok((number, rest));
        }
        let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let digits = &text[..text.len() - rest.len()];
        let too_big = || failed(format!("the width {digits} is too big"));
        let number = if digits.is_empty() { Ok(0) } else { digits.parse() };
        Ok((number.map_err(|_| too_big())?, rest))
    };
    let (width, mut rest) = number(after_flags)?;
    field.is_left |= width < 0;
    field.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
    if let Some(text) = rest.strip_prefix('.') {
        let (precision, after) = number(text)?;
        field.precision = Some(usize::try_from(precision).unwrap_or(0));
        rest = after;
    }
    // Python ignores the length modifier of C.
    Ok((field, rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest)))
}

fn format_value(
    state: &State,
    value: &Value,
    field: &FormatField,
    conversion: char,
) -> Result<String, Error> {
    let wrong = |expected: &str| {
        failed(format!("expected {expected} for %{conversion}, got {}", value.kind()))
    };
    let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let text = match conversion {
        's' | 'r' | 'a' => {
            let text = match conversion {
                's' => python_str(state, value)?,
                'r' => python_repr(state, value)?,
                _ => python_ascii(state, value)?,
            };
            match field.precision {
                Some(precision) => text.chars().take(precision).collect(),
                None => text,
            }
        }
        'c' => {
            let code = value.as_i64().and_then(|code| u32::try_from(code).ok());
            let text = code.and_then(char::from_u32).map(String::from);
            let text = text.or(value.as_str().map(str::to_owned));
            text.filter(|c| c.chars().count() == 1).ok_or_else(|| wrong("a character"))?
        }
        'd' | 'i' | 'u' if is_number => {
            let number = i128::try_from(value.clone()).ok();
            let truncated = || f64::try_from(value.clone()).ok().map(f64::trunc);
            let in_range = |number: &f64| number.abs() < i128::MAX as f64;
            let number = number.or_else(|| truncated().filter(in_range).map(|n| n as i128));
            integer_text(number.ok_or_else(|| wrong("a finite number"))?, field, conversion)
        }
        'o' | 'x' | 'X' if value.is_integer() || value.kind() == ValueKind::Bool => {
            let number = i128::try_from(value.clone()).map_err(|_| wrong("a smaller int"))?;
            integer_text(number, field, conversion)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' if is_number => {
            let number = f64::try_from(value.clone()).map_err(|_| wrong("a float"))?;
            float_text(number, field, conversion)
        }
        'd' | 'i' | 'u' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' => return Err(wrong("a number")),
        'o' | 'x' | 'X' => return Err(wrong("an int")),
        _ => return Err(failed(format!("the conversion %{conversion} is not known"))),
    };
    let pad = field.width.saturating_sub(text.chars().count());
    let (left, right) = if field.is_left { (0, pad) } else { (pad, 0) };
    padded(state, &text, Padding { left, right, fill: ' ' })
}

fn integer_text(number: i128, field: &FormatField, conversion: char) -> String {
    let magnitude = number.unsigned_abs();
    let (prefix, digits) = match conversion {
        'o' => ("0o", format!("{magnitude:o}")),
        'x' => ("0x", format!("{magnitude:x}")),
        'X' => ("0X", format!("{magnitude:X}")),
        _ => ("", magnitude.to_string()),
    };
    let sign = if number < 0 { "-" } else { field.plus };
    let prefix = if field.is_alternate { prefix } else { "" };
    let digits = zeros(field.precision.unwrap_or(0).saturating_sub(digits.len())) + &digits;
    with_zeros(&format!("{sign}{prefix}"), &digits, field)
}

fn float_text(number: f64, field: &FormatField, conversion: char) -> String {
    let sign = if number.is_sign_negative() && !number.is_nan() { "-" } else { field.plus };
    let number = number.abs();
    let precision = field.precision.unwrap_or(6);
    let mut text = match conversion.to_ascii_lowercase() {
        _ if number.is_nan() => "nan".to_owned(),
        _ if number.is_infinite() => "inf".to_owned(),
        'f' => fixed(number, precision, field),
        'e' => exponential(number, precision, field),
        _ => {
            let digits = precision.max(1);
            let rounded = format!("{number:.*e}", (digits - 1).min(MAX_FRACTION));
            let exponent = rounded.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
            let is_fixed = exponent >= -4 && exponent < digits as i64;
            let text = if is_fixed {
                fixed(number, (digits as i64 - 1 - exponent) as usize, field)
            } else {
                exponential(number, digits - 1, field)
            };
            if field.is_alternate { text } else { without_zeros(&text) }
        }
    };
    if conversion.is_ascii_uppercase() {
        text.make_ascii_uppercase();
    }
    with_zeros(sign, &text, field)
}

fn fixed(number: f64, precision: usize, field: &FormatField) -> String {
    let exact = precision.min(MAX_FRACTION);
    let point = if precision == 0 && field.is_alternate { "." } else { "" };
    format!("{number:.exact$}") + point + &zeros(precision - exact)
}

fn exponential(number: f64, precision: usize, field: &FormatField) -> String {
    let exact = precision.min(MAX_FRACTION);
    let text = format!("{number:.exact$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let point = if precision == 0 && field.is_alternate { "." } else { "" };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}{point}{}e{sign}{exponent:0>2}", zeros(precision - exact))
}

/// A number without the zeros at the end of its fraction.
fn without_zeros(text: &str) -> String {
    let (digits, exponent) = text.split_at(text.find('e').unwrap_or(text.len()));
    let digits = match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.'),
        false => digits,
    };
    format!("{digits}{exponent}")
}

/// Digits after their sign, with zeros between up to the width, if the flag asks for them.
fn with_zeros(sign: &str, digits: &str, field: &FormatField) -> String {
    let len = sign.len() + digits.len();
    let fill = field.zeros && !field.is_left;
    let missing = if fill { field.width.saturating_sub(len) } else { 0 };
    format!("{sign}{}{digits}", zeros(missing))
}

fn zeros(count: usize) -> String {
    "0".repeat(count)
}
