//! Filters of Jinja2 that the library lacks, answers otherwise, or does not bound.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    formatting::{self, FormatStyle},
    value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args},
};

use super::{
    charge_bytes, fits,
    text::{charge_text, python_str},
    tojson::tojson,
};

/// Filter that turns the items of a loop into a sequence with a length: see `rewrite.rs`.
pub(super) const LOOP_ITEMS: &str = "_loop_items";

/// Filter for the operator `%` of a text: see `rewrite.rs`.
pub(super) const FORMAT_OPERATOR: &str = "_format_operator";

/// Adds the filters to an environment.
pub(in crate::text::chat) fn add_filters(env: &mut Environment<'_>) {
    // Filters that make text of their input. The library charges fuel for the result only.
    for (name, filter) in [
        ("upper", Value::from_function(filters::upper)),
        ("lower", Value::from_function(filters::lower)),
        ("title", Value::from_function(filters::title)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("trim", Value::from_function(filters::trim)),
        ("split", Value::from_function(filters::split)),
        ("lines", Value::from_function(filters::lines)),
        ("format", Value::from_function(filters::format)),
        ("safe", Value::from_function(filters::safe)),
        ("escape", Value::from_function(filters::escape)),
        ("e", Value::from_function(filters::escape)),
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
    env.add_filter("pprint", python_str);
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
    let given = args.get(1).filter(|value| !value.is_kwargs()).cloned();
    let named = args.last().filter(|last| last.is_kwargs());
    let named = named.and_then(|kwargs| kwargs.get_attr("default").ok());
    let default = given.or(named.filter(|value| !value.is_undefined())).unwrap_or(fallback);
    if let Some(first) = args.first_mut()
        && let Some(text) = first.as_str()
    {
        *first = Value::from(text.trim());
    }
    Ok(convert.call(state, &args).unwrap_or(default))
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

/// `text % values`: a tuple has several values, everything else is one.
fn format_operator(state: &State, text: &str, values: Value) -> Result<String, Error> {
    fits(state, text)?;
    charge_text(state, &values)?;
    let several = values.is_tuple() && values.kind() == ValueKind::Seq;
    let values =
        if several { values.try_iter()?.collect::<Vec<_>>() } else { vec![values.clone()] };
    formatting::format(FormatStyle::Printf, text, &values)
}
