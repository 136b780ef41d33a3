//! Methods of Python's values.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{ValueKind, from_args},
};
use minijinja_contrib::pycompat;

use super::{
    filters::{Padding, join_items, padded, replace},
    fits,
    text::charge_text,
};

/// Calls a Python method of a value. Falls back to `minijinja-contrib` for the methods it has.
pub(in crate::text::chat) fn call_method(
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
    let parts = |parts: [&str; 3]| Ok(parts.into_iter().collect());
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
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            let (Some(separator), Some(Ok(most))) = (separator, most.map(usize::try_from)) else {
                let args = &args[..args.len().min(1)];
                return pycompat::unknown_method_callback(state, &text.into(), "split", args);
            };
            let mut parts: Vec<&str> = text.rsplitn(most.saturating_add(1), separator).collect();
            parts.reverse();
            Ok(parts.into_iter().collect())
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let found = if name == "index" { text.find(part) } else { text.rfind(part) };
            let start = found.ok_or_else(|| missing("substring not found"))?;
            Ok(text[..start].chars().count().into())
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
