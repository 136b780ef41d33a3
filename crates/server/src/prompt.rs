//! From messages to the tokens of a prompt.

use moeflux::{ChatOptions, Engine, Error, Message, text::Text};

use crate::error::ApiError;

/// Tokens of a prompt, and the lengths of prefixes that other prompts are likely to share.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) ends: Vec<usize>,
}

/// Text of a conversation, up to the start of the answer.
///
/// # Errors
/// The template rejects the messages, or there is none.
pub(crate) fn render(text: &Text, messages: &[Message]) -> Result<String, ApiError> {
    let template = text.template().map_err(|e| ApiError::internal(e.to_string()))?;
    template.render(messages, true, &ChatOptions::default()).map_err(|error| match error {
        // Without the path of the file.
        Error::Text { problem, .. } => ApiError::invalid("messages", problem),
        other => ApiError::internal(other.to_string()),
    })
}

/// Tokens of a conversation, up to the start of the answer.
///
/// # Errors
/// The template rejects the messages; the prompt is empty or longer than the context.
pub(crate) fn chat(engine: &Engine, messages: &[Message]) -> Result<ChatPrompt, ApiError> {
    let text = engine.text()?;
    let tokens = text.tokenizer().encode(&render(text, messages)?, false)?;
    let context = engine.plan().context;
    if tokens.len() > context {
        return Err(ApiError::context(tokens.len(), context));
    }
    if tokens.is_empty() {
        return Err(ApiError::invalid("messages", "the messages make an empty prompt"));
    }
    let ends = ends(text, messages, &tokens);
    Ok(ChatPrompt { tokens, ends })
}

/// Positions where later prompts are likely to diverge: another last message after the same start,
/// and the next turn, as templates render past answers differently. Models whose state cannot be
/// truncated continue from there.
fn ends(text: &Text, messages: &[Message], tokens: &[u32]) -> Vec<usize> {
    let Some((_, before)) = messages.split_last() else { return Vec::new() };
    let (other, past) = (Message::user("~"), Message::assistant("~"));
    let another = [before, std::slice::from_ref(&other)].concat();
    let next = [messages, &[past, other]].concat();
    // A template that rejects these messages gives no position.
    let rendered = [another, next].map(|messages| text.chat(&messages, &ChatOptions::default()));
    let shared = |theirs: Vec<u32>| tokens.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
    let mut ends: Vec<usize> = rendered.into_iter().flatten().map(shared).collect();
    ends.sort_unstable();
    ends
}
