//! Forms of an answer and constraints on it.

use std::fmt;

use moeflux_base::GrammarError;
use serde_json::{Value, json};

use crate::chat::ToolSet;

/// Form of an answer's text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum AnswerForm {
    /// JSON that this schema accepts. Every keyword is enforced, or refused, unless
    /// [`Constraint::lenient`] says otherwise. An object that lists properties has no others, if
    /// the schema says nothing of them and [`Constraint::open_objects`] is not set.
    Json(Value),
    /// Text that this regular expression matches as a whole, in the syntax of Rust's `regex`.
    Regex(String),
    /// Text of this grammar, in llguidance's variant of Lark.
    Lark(String),
    /// Text of this grammar, in GBNF, the notation of llama.cpp. Where a rule is recursive, each
    /// run of its parts without recursion takes the longest match.
    Gbnf(String),
}

impl AnswerForm {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    /// One of some texts.
    pub fn choice<S: AsRef<str>>(texts: impl IntoIterator<Item = S>) -> Self {
        let texts: Vec<_> = texts.into_iter().map(|text| escaped(text.as_ref())).collect();
        Self::Regex(texts.join("|"))
    }

    pub(super) fn schema(&self) -> Option<&Value> {
        match self {
            Self::Json(schema) => Some(schema),
            _ => None,
        }
    }
}

/// A regular expression that matches a text only.
fn escaped(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        // An escape of these is the boundary of a word.
        if c.is_ascii_punctuation() && !matches!(c, '<' | '>') {
            regex.push('\\');
        }
        regex.push(c);
    }
    regex
}

/// Calls of tools that an answer makes.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CallConstraint {
    /// The tools.
    pub tools: ToolSet,
    /// Whether the answer is at least one call, each with arguments by its tool's schema. If not,
    /// only the arguments of strict tools follow their schemas, wherever calls begin.
    pub required: bool,
    /// Whether there is at most one call.
    pub single: bool,
    /// Whether keywords of strict tools that cannot be enforced are left out, with a note.
    pub lenient: bool,
}

impl CallConstraint {
    /// Calls of `tools`, which may be none.
    pub fn new(tools: ToolSet) -> Self {
        Self { tools, ..Self::default() }
    }
}

/// Constraint of an answer behind its thoughts.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Constraint {
    /// Form of the text. An answer of calls has none.
    pub form: Option<AnswerForm>,
    /// Calls. With a form, the answer has that form, or is calls.
    pub calls: Option<CallConstraint>,
    /// Whether the answer is text as it is, without the thoughts and marks of the model's dialect.
    pub raw: bool,
    /// Whether keywords of the form's schema that cannot be enforced are left out, with a note.
    pub lenient: bool,
    /// Whether an object may have properties that its schema does not list, if it says nothing of
    /// them, as the specification has it.
    pub open_objects: bool,
}

/// A keyword of a schema that is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrammarNote {
    /// Path of the keyword in the schema; for a tool it begins with the tool's name.
    pub path: String,
    /// The consequence, such as `is not enforced`.
    pub text: String,
}

impl GrammarNote {
    /// Most notes of each kind for a schema.
    pub(crate) const MOST: usize = 8;
}

impl fmt::Display for GrammarNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, text } = self;
        if path.is_empty() { f.write_str(text) } else { write!(f, "{path} {text}") }
    }
}

/// A problem of a constraint at a path of its schema.
pub(super) fn invalid(path: impl Into<String>, problem: impl Into<String>) -> GrammarError {
    GrammarError::Invalid { path: path.into(), problem: problem.into() }
}
