//! Arguments that come one parameter at a time, as JSON text.

use super::json_text::{literal, mended, push_escaped, push_string};
use crate::chat::{ParameterType, Tool};

/// Form of a value in the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueForm {
    /// Text as it is. It streams.
    Text,
    /// Text, or `null`.
    NullableText,
    /// A value of a type, or else text.
    Typed(ParameterType),
    /// JSON text.
    Json,
}

impl ValueForm {
    /// Form of a parameter by the schema of its tool.
    pub(super) fn by_schema(tool: Option<&Tool>, key: &str) -> Self {
        let kind = tool.and_then(|tool| tool.parameter_type(key)).unwrap_or(ParameterType::Any);
        match kind {
            ParameterType::String if tool.is_some_and(|tool| tool.allows_null(key)) => {
                Self::NullableText
            }
            ParameterType::String => Self::Text,
            kind => Self::Typed(kind),
        }
    }
}

/// Writer of a JSON object.
#[derive(Clone, Debug, Default)]
pub(super) struct ArgumentWriter {
    keys: Vec<String>,
    form: Option<ValueForm>,
    /// Value so far, while its form is not certain.
    held: String,
}

impl ArgumentWriter {
    /// Whether a parameter came before.
    pub(super) fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|known| known == key)
    }

    /// Begins a parameter.
    pub(super) fn begin(&mut self, key: &str, form: ValueForm, out: &mut String) {
        out.push(if self.keys.is_empty() { '{' } else { ',' });
        push_string(key, out);
        out.push(':');
        self.keys.push(key.to_owned());
        self.held.clear();
        self.form = Some(form);
        if form == ValueForm::Text {
            out.push('"');
        }
    }

    /// Takes a character of the value.
    pub(super) fn push(&mut self, c: char, out: &mut String) {
        if self.form == Some(ValueForm::Text) {
            return push_escaped(c, out);
        }
        self.held.push(c);
        let is_text = match self.form {
            Some(ValueForm::NullableText) => {
                !["null", "None"].iter().any(|word| word.starts_with(&self.held))
            }
            Some(ValueForm::Typed(ParameterType::Any)) => {
                let first = self.held.trim_start().chars().next();
                first.is_some_and(|c| {
                    !matches!(c, '{' | '[' | '-' | '0'..='9' | 't' | 'f' | 'n' | 'T' | 'F' | 'N')
                })
            }
            _ => false,
        };
        if is_text {
            self.form = Some(ValueForm::Text);
            out.push('"');
            self.held.drain(..).for_each(|c| push_escaped(c, out));
        }
    }

    /// Ends the value.
    pub(super) fn end(&mut self, out: &mut String) {
        let text = std::mem::take(&mut self.held);
        match self.form.take() {
            Some(ValueForm::Text) => out.push('"'),
            Some(form) => match value(form, &text) {
                Some(json) => out.push_str(&json),
                None => push_string(&text, out),
            },
            None => {}
        }
    }

    /// Ends the object.
    pub(super) fn finish(&mut self, out: &mut String) {
        if self.keys.is_empty() {
            out.push('{');
        }
        out.push('}');
    }
}

/// JSON text of a value; `None` if it is text.
fn value(form: ValueForm, text: &str) -> Option<String> {
    let text = text.trim();
    let kind = match form {
        ValueForm::Text => return None,
        ValueForm::Json => return mended(text),
        ValueForm::NullableText => ParameterType::Null,
        ValueForm::Typed(kind) => kind,
    };
    if let Some("null") = literal(text) {
        return Some("null".to_owned());
    }
    let json = mended(text)?;
    let fits = match kind {
        ParameterType::String | ParameterType::Null => false,
        ParameterType::Number | ParameterType::Integer => {
            json.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        }
        ParameterType::Boolean => json == "true" || json == "false",
        ParameterType::Object => json.starts_with('{'),
        ParameterType::Array => json.starts_with('['),
        // Text such as `[draft]` stays text.
        ParameterType::Any => !json.starts_with('"') && (literal(text).is_some()),
    };
    fits.then_some(json)
}
