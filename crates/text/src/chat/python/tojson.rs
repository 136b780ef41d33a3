//! The `tojson` filter: Python's `json.dumps`.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args},
};

use super::{
    fuel::charge_bytes,
    text::{MAX_DEPTH, number_text},
};

const MAX_INDENT: usize = 80;

/// Positional arguments of [`tojson`], and the others.
type DumpsArgs = (Option<Value>, Option<usize>, Option<Vec<String>>, Option<bool>, Kwargs);

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as
/// `transformers` provides it to templates. Nothing is escaped for HTML.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<String, Error> {
    let args = args.into_values();
    let (ascii, indent, separators, sort, options): DumpsArgs = from_args(&args)?;
    let ascii = ascii.or(options.get("ensure_ascii")?).is_some_and(|ascii| ascii.is_true());
    let indent = indent.or(options.get("indent")?);
    let separators = separators.or(options.get("separators")?);
    let sort = sort.or(options.get("sort_keys")?).unwrap_or(false);
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(failed("separators must be two strings")),
    };
    let indent = indent.map(|indent| indent.min(MAX_INDENT));
    let mut writer =
        JsonWriter { state, out: String::new(), charged: 0, item, key, indent, ascii, sort };
    writer.value(value, 0)?;
    Ok(writer.out)
}

fn failed(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {problem}"))
}

struct JsonWriter<'a, 's, 'e> {
    state: &'a State<'s, 'e>,
    out: String,
    /// Length of the text that is charged.
    charged: usize,
    /// Separator of items.
    item: &'a str,
    /// Separator of key and value.
    key: &'a str,
    indent: Option<usize>,
    /// Whether to escape characters beyond ASCII.
    ascii: bool,
    /// Whether to sort the keys of maps.
    sort: bool,
}

impl JsonWriter<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(failed("the value is nested too deeply"));
        }
        self.state.consume_fuel(1)?;
        charge_bytes(self.state, self.out.len() - self.charged)?;
        self.charged = self.out.len();
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(['[', ']'], &items, depth, |json, item| {
                    json.value(item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.container(['{', '}'], &keys, depth, |json, key| {
                    json.key(key)?;
                    json.out.push_str(json.key);
                    json.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => return Err(failed(&format!("a value of type {kind} has no JSON form"))),
        }
        Ok(())
    }

    /// As Python writes numbers; JSON has neither NaN nor infinities, but `json.dumps` does.
    fn number(&mut self, value: &Value) {
        let text = number_text(value);
        self.out.push_str(match &*text {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            number => number,
        });
    }

    /// A key. Other values than text are quoted as written.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            return self.string(text);
        }
        if !matches!(key.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) {
            let problem = format!("keys must be str, int, float, bool or None, not {}", key.kind());
            return Err(failed(&problem));
        }
        self.out.push('"');
        self.value(key, 0)?;
        self.out.push('"');
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(self.item);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.push_str(&" ".repeat(indent * depth));
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        let quoted = serde_json::to_string(text).map_err(|e| failed(&e.to_string()))?;
        for c in quoted.chars() {
            if c.is_ascii() || !self.ascii {
                self.out.push(c);
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                self.out.push_str(&format!("\\u{unit:04x}"));
            }
        }
        Ok(())
    }
}
