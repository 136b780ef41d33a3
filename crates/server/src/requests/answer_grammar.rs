//! Grammars of answers: the forms that a request asks for, and the calls of its tools.

use std::sync::Arc;

use moeflux::{
    Error,
    base::GrammarError,
    text::{CallConstraint, Constraint, Grammar, MaskSource, Text, ToolSet},
};

use super::{
    ask::Conversation,
    form::{AskedForm, FormRules, RequiredCalls},
};
use crate::transport::error::ApiError;

/// Grammar of an answer, and what it does not enforce.
#[derive(Default)]
pub(crate) struct AskedGrammar {
    pub(crate) grammar: Option<Grammar>,
    pub(crate) notes: Vec<String>,
}

/// Constraint of a request, and the fields that ask for it.
struct AskedConstraint<'a> {
    form: Option<&'a AskedForm>,
    calls: Option<CallConstraint>,
    raw: bool,
    rules: FormRules,
}

impl AskedConstraint<'_> {
    fn grammar(&self, text: &Text) -> Result<AskedGrammar, ApiError> {
        let lenient = self.rules.lenient || self.form.is_some_and(|asked| asked.lenient);
        let calls = self.calls.clone().map(|calls| calls.lenient(self.rules.lenient));
        let constraint = Constraint::default()
            .form(self.form.map(|asked| asked.form.clone()))
            .calls(calls)
            .raw(self.raw)
            .lenient(lenient)
            .open_objects(self.rules.open_objects);
        let grammar = text.grammar(&constraint).map_err(|error| self.error(error))?;
        let notes = grammar.as_ref().map_or(&[][..], Grammar::notes).iter();
        let notes = notes.map(|note| format!("{} {}", self.path(&note.path), note.text)).collect();
        Ok(AskedGrammar { grammar, notes })
    }

    /// Path of a keyword, with its field.
    fn path(&self, inner: &str) -> String {
        let is_tool = self.calls.as_ref().is_some_and(|calls| {
            let mut tools = calls.tools.iter();
            tools.any(|tool| inner == tool.name || inner.starts_with(&format!("{}.", tool.name)))
        });
        let field = match (self.form, is_tool) {
            (_, true) => "tools",
            (Some(asked), false) => &asked.path,
            (None, false) => "tool_choice",
        };
        if inner.is_empty() { field.to_owned() } else { format!("{field}.{inner}") }
    }

    /// An error with the path of its field.
    fn error(&self, error: Error) -> ApiError {
        let Error::Grammar(
            grammar @ (GrammarError::Invalid { .. }
            | GrammarError::NoRoom
            | GrammarError::TooSlow { .. }),
        ) = &error
        else {
            return error.into();
        };
        let inner = match grammar {
            GrammarError::Invalid { path, .. } => path.as_str(),
            _ => "",
        };
        let path = self.path(inner);
        let problem = match grammar {
            GrammarError::Invalid { problem, .. } => problem.clone(),
            other => other.to_string(),
        };
        ApiError::invalid(path.clone(), format!("{path}: {problem}"))
    }
}

/// Grammar of the answer to a conversation; `None` if nothing constrains it. `single` allows one
/// call at most.
///
/// # Errors
/// A schema cannot be enforced, a tool is unknown, or the answer continues a message.
pub(crate) fn of_conversation(
    text: &Text,
    conversation: &Conversation,
    single: bool,
    rules: FormRules,
) -> Result<AskedGrammar, ApiError> {
    let mut tools = conversation.callable().clone();
    let required = conversation.required.as_ref();
    if let Some(RequiredCalls::Named(names)) = required {
        if let Some(name) = names.iter().find(|name| tools.get(name).is_none()) {
            let message = format!("tool_choice names {name:?}, which is none of the tools");
            return Err(ApiError::invalid("tool_choice", message));
        }
        tools = ToolSet {
            tools: tools.tools.into_iter().filter(|tool| names.contains(&tool.name)).collect(),
        };
    }
    if required.is_some() && tools.is_empty() {
        let message = "tool_choice requires a call, but there are no tools";
        return Err(ApiError::invalid("tool_choice", message));
    }
    let has_calls = !tools.is_empty() && (required.is_some() || text.call_syntax().is_some());
    let calls =
        has_calls.then(|| CallConstraint::new(tools).required(required.is_some()).single(single));
    // A required call leaves no place for the form.
    let form = conversation.form.as_ref().filter(|_| required.is_none());
    let asked = AskedConstraint { form, calls, raw: false, rules };
    let grammar = asked.grammar(text)?;
    if grammar.grammar.is_some() && conversation.continues && (form.is_some() || required.is_some())
    {
        let message = "an answer that continues a message cannot be constrained";
        return Err(ApiError::invalid("messages", message));
    }
    Ok(grammar)
}

/// Grammar of answers to texts without a template.
///
/// # Errors
/// The form cannot be enforced.
pub(crate) fn of_text(
    text: &Text,
    form: Option<&AskedForm>,
    rules: FormRules,
) -> Result<AskedGrammar, ApiError> {
    AskedConstraint { form, calls: None, raw: true, rules }.grammar(text)
}

/// Mask of the answer to a prompt.
///
/// # Errors
/// The tokenizer's decoder fails.
pub(crate) fn mask(
    grammar: Option<&Grammar>,
    text: &Text,
    prompt: &[u32],
) -> Result<Option<Arc<dyn MaskSource>>, ApiError> {
    Ok(grammar.map(|grammar| grammar.mask(text, prompt)).transpose()?)
}
