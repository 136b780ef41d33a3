//! Filters of Jinja2 that the library lacks, answers otherwise, or does not bound.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args},
};

use super::{
    fuel::charge_bytes,
    functions::is_iterable,
    printf::{format_filter, format_operator},
    text::{charge_text, python_repr, python_str},
    tojson::tojson,
};

/// Filter that turns the items of a loop into a sequence with a length: see `rewrite.rs`.
pub(super) const LOOP_ITEMS: &str = "_loop_items";

/// Filter for the operator `%` of a text: see `rewrite.rs`.
pub(super) const FORMAT_OPERATOR: &str = "_format_operator";

/// Adds the filters to an environment.
pub(in crate::chat) fn add_filters(env: &mut Environment<'_>) {
    // Filters that make text of their input. The library charges fuel for the result only.
    for (name, filter) in [
        ("upper", Value::from_function(filters::upper)),
        ("lower", Value::from_function(filters::lower)),
        ("title", Value::from_function(filters::title)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("trim", Value::from_function(filters::trim)),
        ("split", Value::from_function(filters::split)),
        ("lines", Value::from_function(filters::lines)),
        ("safe", Value::from_function(filters::safe)),
    ] {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            for arg in args.iter() {
                charge_text(state, arg)?;
            }
            filter.call(state, &args)
        });
    }
    env.add_filter("tojson", tojson);
    env.add_filter("string", python_str);
    env.add_filter("pprint", python_repr);
    env.add_filter("escape", escape);
    env.add_filter("e", escape);
    env.add_filter("format", format_filter);
    env.add_filter("urlencode", urlencode);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("abs", |number: Value| filters::abs(without_bool(number)));
    env.add_filter("round", round);
    env.add_filter("replace", replace_filter);
    env.add_filter("indent", indent);
    env.add_filter("join", join);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("truncate", truncate);
    env.add_filter("center", center);
    env.add_filter("wordcount", |text: &str| {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).count()
    });
    env.add_filter(FORMAT_OPERATOR, format_operator);
    // Loops over a text know neither its length nor its last character.
    env.add_filter(LOOP_ITEMS, |state: &State, items: Value| match items.as_str() {
        Some(text) => {
            charge_bytes(state, text.len().saturating_mul(size_of::<Value>()))?;
            Ok::<_, Error>(text.chars().map(Value::from).collect())
        }
        None => Ok(items),
    });
}

/// Indents all lines but the first, unless `first`, and empty ones, unless `blank`.
fn indent(state: &State, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (text, width, first, blank, options): (
        &Value,
        Option<Value>,
        Option<bool>,
        Option<bool>,
        Kwargs,
    ) = from_args(&args)?;
    let width = match width {
        Some(width) => width,
        None => options.get::<Option<Value>>("width")?.unwrap_or(Value::from(4)),
    };
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let text = python_str(state, text)?;
    let lines = text.split('\n').count();
    // A width may be the indentation itself.
    let indentation = match (width.as_str(), width.as_usize()) {
        (Some(indentation), _) => indentation.to_owned(),
        (None, Some(width)) => {
            charge_bytes(state, width)?;
            " ".repeat(width)
        }
        (None, None) => {
            let problem = "indent: the width is neither a number nor a text";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    };
    charge_bytes(state, indentation.len().saturating_mul(lines))?;
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        let is_indented = if i == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if is_indented { &indentation } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

fn replace_filter(state: &State, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (text, old, new, count, options): (&Value, &str, &str, Option<i64>, Kwargs) =
        from_args(&args)?;
    let count = match count {
        Some(count) => Some(count),
        None => options.get("count")?,
    };
    options.assert_all_used()?;
    replace(state, &python_str(state, text)?, old, new, count)
}

/// `text.replace(old, new, count)`.
pub(super) fn replace(
    state: &State,
    text: &str,
    old: &str,
    new: &str,
    count: Option<i64>,
) -> Result<String, Error> {
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    charge_bytes(state, new.len().saturating_mul(found))?;
    Ok(text.replacen(old, new, count))
}

fn join(
    state: &State,
    items: Value,
    separator: Option<&str>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let separator = match separator {
        Some(separator) => Some(separator),
        None => options.get("d")?,
    };
    let attribute = match attribute {
        Some(attribute) => Some(attribute),
        None => options.get("attribute")?,
    };
    options.assert_all_used()?;
    let select = |item: Value| match attribute.as_ref().map(|path| (path.as_str(), path)) {
        None => Ok(item),
        Some((None, index)) => item.get_item(index),
        Some((Some(path), _)) => path.split('.').try_fold(item, |item, name| {
            name.parse::<usize>()
                .map_or_else(|_| item.get_attr(name), |i| item.get_item_by_index(i))
        }),
    };
    join_items(state, separator.unwrap_or_default(), items.try_iter()?.map(select))
}

/// `separator.join(items)`, of any values.
pub(super) fn join_items(
    state: &State,
    separator: &str,
    items: impl Iterator<Item = Result<Value, Error>>,
) -> Result<String, Error> {
    let mut text = String::new();
    for (i, item) in items.enumerate() {
        if i > 0 {
            charge_bytes(state, separator.len())?;
            text.push_str(separator);
        }
        state.consume_fuel(1)?;
        text.push_str(&python_str(state, &item?)?);
    }
    Ok(text)
}

/// An integer, or `default` for everything that is none.
fn int(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    number(state, args.into_values(), Value::from_function(filters::int), Value::from(0))
}

/// A float, or `default` for everything that is none.
fn float(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    number(state, args.into_values(), Value::from_function(filters::float), Value::from(0.0))
}

fn number(
    state: &mut State,
    mut args: Vec<Value>,
    convert: Value,
    fallback: Value,
) -> Result<Value, Error> {
    let default = argument(&args, 1, "default").unwrap_or(fallback);
    if let Some(first) = args.first_mut()
        && let Some(text) = first.as_str()
    {
        *first = Value::from(text.trim());
    }
    Ok(convert.call(state, &args).unwrap_or(default))
}

/// The argument at a position or with a name. It may be none.
fn argument(args: &[Value], index: usize, name: &str) -> Option<Value> {
    let given = args.get(index).filter(|value| !value.is_kwargs()).cloned();
    let options = args.last().filter(|last| last.is_kwargs());
    let named = options.and_then(|options| options.get_attr(name).ok());
    given.or(named.filter(|value| !value.is_undefined()))
}

/// The integer of a bool. Other values are unchanged.
fn without_bool(value: Value) -> Value {
    match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        _ => value,
    }
}

/// `round(value, precision)`, or a float that is rounded up or down.
fn round(state: &mut State, value: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let mut args = args.into_values();
    let method = argument(&args, 1, "method");
    let is_common = method.is_none_or(|method| method.as_str() == Some("common"));
    let value = without_bool(value);
    let float = f64::try_from(value.clone()).ok().filter(|_| !is_common && value.is_integer());
    args.insert(0, float.map_or(value, Value::from));
    Value::from_function(filters::round).call(state, &args)
}

/// `other` if the value is undefined, or false with `boolean`.
fn default(value: Value, args: Rest<ValueOrKwargs>) -> Value {
    let args = args.into_values();
    let is_lax = argument(&args, 1, "boolean").is_some_and(|boolean| boolean.is_true());
    match value.is_undefined() || is_lax && !value.is_true() {
        true => argument(&args, 0, "default_value").unwrap_or(Value::from("")),
        false => value,
    }
}

/// Text with its special characters as entities of HTML, unless that is done.
fn escape(state: &State, value: Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value);
    }
    let mut text = python_str(state, &value)?;
    for (special, entity) in
        [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ("\"", "&#34;")]
    {
        text = replace(state, &text, special, entity, None)?;
    }
    Ok(Value::from_safe_string(text))
}

/// Percent-encoded text, or the query of a mapping or of pairs.
fn urlencode(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    if value.as_str().is_some() || !is_iterable(value) {
        push_percent_encoded(state, &mut out, value, false)?;
        return Ok(out);
    }
    let is_mapping = value.kind() == ValueKind::Map;
    for item in value.try_iter()? {
        let pair: Vec<Value> = match is_mapping {
            true => vec![item.clone(), value.get_item(&item)?],
            false => item.try_iter()?.take(3).collect(),
        };
        let [name, value] = &pair[..] else {
            let problem = "urlencode: expected a text, a mapping or pairs";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        };
        out.push_str(if out.is_empty() { "" } else { "&" });
        push_percent_encoded(state, &mut out, name, true)?;
        out.push('=');
        push_percent_encoded(state, &mut out, value, true)?;
    }
    Ok(out)
}

/// Appends `quote(value)`, or `quote_plus(value)` for a part of a query.
fn push_percent_encoded(
    state: &State,
    out: &mut String,
    value: &Value,
    is_query: bool,
) -> Result<(), Error> {
    let text = python_str(state, value)?;
    charge_bytes(state, text.len().saturating_mul(3))?;
    for byte in text.bytes() {
        match byte {
            b'/' if !is_query => out.push('/'),
            b' ' if is_query => out.push('+'),
            b'_' | b'.' | b'-' | b'~' => out.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    Ok(())
}

/// The first characters of a text, up to a word's end unless `killwords`, and `end`. A text that
/// is longer by `leeway` at most stays whole.
fn truncate(text: &str, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (length, killwords, end, leeway, options): (
        Option<usize>,
        Option<bool>,
        Option<&str>,
        Option<usize>,
        Kwargs,
    ) = from_args(&args)?;
    let length = length.or(options.get("length")?).unwrap_or(255);
    let killwords = killwords.or(options.get("killwords")?).unwrap_or(false);
    let end = end.or(options.get("end")?).unwrap_or("...");
    let leeway = leeway.or(options.get("leeway")?).unwrap_or(5);
    options.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let Some(room) = length.checked_sub(end.chars().count()) else {
        let problem = format!("truncate: expected length >= {}, got {length}", end.len());
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    };
    let kept: String = text.chars().take(room).collect();
    let kept = if killwords { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(a, _)| a) };
    Ok(format!("{kept}{end}"))
}

/// `text.center(width)`.
fn center(state: &State, text: &str, width: Option<usize>) -> Result<String, Error> {
    let width = width.unwrap_or(80);
    let pad = width.saturating_sub(text.chars().count());
    let left = pad / 2 + (pad & width & 1);
    padded(state, text, Padding { left, right: pad - left, fill: ' ' })
}

/// Characters around a text.
pub(super) struct Padding {
    pub(super) left: usize,
    pub(super) right: usize,
    pub(super) fill: char,
}

/// `text` between its padding.
pub(super) fn padded(state: &State, text: &str, padding: Padding) -> Result<String, Error> {
    let Padding { left, right, fill } = padding;
    charge_bytes(state, left.saturating_add(right).saturating_mul(fill.len_utf8()))?;
    let fill = |count| std::iter::repeat_n(fill, count);
    Ok(fill(left).chain(text.chars()).chain(fill(right)).collect())
}
