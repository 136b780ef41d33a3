//! Methods of Python's values.

use minijinja::{
    Error, ErrorKind, State, Value, filters,
    value::{Kwargs, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat;

use super::{
    filters::{Padding, join_items, padded, replace},
    fuel::fits,
    text::charge_text,
};

/// Calls a Python method of a value. Falls back to `minijinja-contrib` for the methods it has.
pub(in crate::chat) fn call_method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => call_text_method(state, text, name, args),
        (ValueKind::Seq, _) if name == "index" => {
            let (item,): (&Value,) = from_args(args)?;
            let index = value.try_iter()?.position(|other| other == *item);
            index.map(Value::from).ok_or_else(|| missing("the item is not in the list"))
        }
        // No template can change a value.
        (ValueKind::Seq | ValueKind::Map, _) if name == "copy" => Ok(value.clone()),
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn missing(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.to_owned())
}

fn call_text_method(
    state: &mut State,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let parts = |parts: [&str; 3]| Ok(Value::from(Tuple::from(parts.map(Value::from))));
    match name {
        "removeprefix" => {
            let (prefix,) = from_args(args)?;
            Ok(text.strip_prefix::<&str>(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,) = from_args(args)?;
            Ok(text.strip_suffix::<&str>(suffix).unwrap_or(text).into())
        }
        "partition" => {
            let (separator,) = from_args(args)?;
            parts(
                text.split_once(separator)
                    .map_or([text, "", ""], |(head, tail)| [head, separator, tail]),
            )
        }
        "rpartition" => {
            let (separator,) = from_args(args)?;
            parts(
                text.rsplit_once(separator)
                    .map_or(["", "", text], |(head, tail)| [head, separator, tail]),
            )
        }
        "split" | "rsplit" => split(text, name == "rsplit", args),
        "splitlines" => {
            let (keepends, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keepends = keepends.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            Ok(lines(text, keepends).into_iter().collect())
        }
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => {
            search(state, text, name, args)
        }
        "title" => {
            let () = from_args(args)?;
            Ok(title(text).into())
        }
        "ljust" | "rjust" | "center" | "zfill" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let fill = fill.unwrap_or(' ');
            let pad = width.saturating_sub(text.chars().count());
            let padding = match name {
                "ljust" => Padding { left: 0, right: pad, fill },
                "center" => {
                    let left = pad / 2 + (pad & width & 1);
                    Padding { left, right: pad - left, fill }
                }
                "zfill" => {
                    let sign = text.len() - text.trim_start_matches(['+', '-']).len();
                    let (sign, digits) = text.split_at(sign.min(1));
                    let zeros = Padding { left: pad, right: 0, fill: '0' };
                    return Ok(format!("{sign}{}", padded(state, digits, zeros)?).into());
                }
                _ => Padding { left: pad, right: 0, fill },
            };
            padded(state, text, padding).map(Value::from)
        }
        "swapcase" => {
            let swap = |c: char| -> String {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            };
            Ok(text.chars().map(swap).collect::<String>().into())
        }
        "casefold" => Ok(text.to_lowercase().into()),
        "isspace" => Ok((!text.is_empty() && text.chars().all(char::is_whitespace)).into()),
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            join_items(state, text, items.try_iter()?.map(Ok)).map(Value::from)
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(state, text, old, new, count).map(Value::from)
        }
        _ => {
            if name == "format" {
                fits(state, text)?;
            }
            for arg in args {
                charge_text(state, arg)?;
            }
            pycompat::unknown_method_callback(state, &text.into(), name, args)
        }
    }
}

/// `text.split(sep, maxsplit)`, or from its end.
fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, options): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => options.get("sep")?,
    };
    let most = most.or(options.get("maxsplit")?);
    options.assert_all_used()?;
    if separator == Some("") {
        return Err(missing("the separator is empty"));
    }
    let Some(most) = most.and_then(|most| usize::try_from(most).ok()).filter(|_| from_end) else {
        // The library's result has no length.
        let parts = filters::split(&text.into(), separator.map(Into::into), most)?;
        return Ok(parts.try_iter()?.collect());
    };
    let mut parts: Vec<&str> = match separator {
        Some(separator) => text.rsplitn(most.saturating_add(1), separator).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while !rest.is_empty() && parts.len() < most {
                let (head, tail) = rest.rsplit_once(char::is_whitespace).unwrap_or(("", rest));
                parts.push(tail);
                rest = head.trim_end();
            }
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().collect())
}

/// Lines of a text, with their ends if `keepends`.
fn lines(text: &str, keepends: bool) -> Vec<&str> {
    const ENDS: [char; 10] =
        ['\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}'];
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let len = rest.find(ENDS).unwrap_or(rest.len());
        let end = match rest[len..].chars().next() {
            Some('\r') if rest[len..].starts_with("\r\n") => 2,
            end => end.map_or(0, char::len_utf8),
        };
        lines.push(&rest[..if keepends { len + end } else { len }]);
        rest = &rest[len + end..];
    }
    lines
}

/// Methods that look for a text between two indices.
fn search(state: &mut State, text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (sought, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let part = TextSlice::new(text, start, end);
    let sought = match (name, sought.as_str()) {
        ("find" | "rfind" | "index" | "rindex", Some(sought)) => sought,
        ("startswith" | "endswith", _) if part.is_none() => return Ok(false.into()),
        _ => {
            let text = part.map_or("", |part| part.text);
            return pycompat::unknown_method_callback(state, &text.into(), name, &args[..1]);
        }
    };
    let found = part.and_then(|TextSlice { text, start }| {
        let found = if name.starts_with('r') { text.rfind(sought) } else { text.find(sought) };
        found.map(|found| start + text[..found].chars().count())
    });
    match found {
        Some(found) => Ok(found.into()),
        None if name.ends_with("find") => Ok((-1).into()),
        None => Err(missing("substring not found")),
    }
}

/// Part of a text, and the index of its first character.
struct TextSlice<'a> {
    text: &'a str,
    start: usize,
}

impl<'a> TextSlice<'a> {
    /// `text[start:end]`. `None` if it starts after its end or after the text.
    fn new(text: &'a str, start: Option<i64>, end: Option<i64>) -> Option<TextSlice<'a>> {
        if start.is_none() && end.is_none() {
            return Some(TextSlice { text, start: 0 });
        }
        let len = text.chars().count();
        let index = |index: i64| match usize::try_from(index) {
            Ok(index) => index,
            Err(_) => len.saturating_sub(usize::try_from(index.unsigned_abs()).unwrap_or(len)),
        };
        let (start, end) = (start.map_or(0, index), end.map_or(len, index).min(len));
        let offset =
            |index: usize| text.char_indices().nth(index).map_or(text.len(), |(offset, _)| offset);
        (start <= end).then(|| TextSlice { text: &text[offset(start)..offset(end)], start })
    }
}

/// `text.title()`: a letter after anything but a letter is upper case. A letter that becomes two
/// keeps the second one small.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_letter = false;
    for c in text.chars() {
        if after_letter {
            out.extend(c.to_lowercase());
        } else {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
        after_letter = c.is_lowercase() || c.is_uppercase();
    }
    out
}
