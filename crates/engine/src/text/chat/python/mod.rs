//! Python functions, methods and tests that chat templates use.

mod strftime;
mod tojson;

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{ValueKind, from_args},
};
use minijinja_contrib::pycompat;

pub(super) use tojson::tojson;

/// Replaces `{% generation %}` tags by no-ops. In `transformers` they mark the assistant's part for
/// training and have no effect on rendering.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (text, tag) = rest.split_at(start);
        let Some((tag, after)) = tag.split_once("%}") else { break };
        let word = tag
            .trim_start_matches("{%")
            .trim_matches(|c: char| c.is_whitespace() || "-+".contains(c));
        out.push_str(text);
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = after;
    }
    out + rest
}

/// As in Python: strings are iterable, `none` is not.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
}

/// As in Python: values with a length and items.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
    )
}

/// Calls a Python method of a value. Falls back to `minijinja-contrib` for the methods it has.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
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
                return pycompat::unknown_method_callback(
                    state,
                    value,
                    "split",
                    &args[..args.len().min(1)],
                );
            };
            let mut parts: Vec<&str> = text.rsplitn(most.saturating_add(1), separator).collect();
            parts.reverse();
            Ok(parts.into_iter().collect())
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Lets a template reject its messages.
pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// Current date and time in UTC.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    strftime::strftime(format, seconds)
        .map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
}
