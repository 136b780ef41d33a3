//! From a request to the tokens of its prompts.

use moeflux::{
    Engine, Error,
    text::{ChatPrompt, Text},
};

use crate::{
    answer::Echo,
    ask::{Ask, AskPrompt, Conversation, ConversationParts as Parts, RawPrompt},
    error::ApiError,
};

/// Tokens of a prompt, and the lengths of prefixes that other prompts are likely to share.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) ends: Vec<usize>,
    /// The prompt before its answer.
    pub(crate) echo: Option<Echo>,
}

/// Prompts of a request.
///
/// # Errors
/// The template rejects the messages; a prompt is empty or longer than the context.
pub(crate) fn prompts(engine: &Engine, ask: &Ask) -> Result<Vec<Prompt>, ApiError> {
    match &ask.prompt {
        AskPrompt::Conversation(conversation) => Ok(vec![chat(engine, conversation)?]),
        AskPrompt::Raw { prompts, echo } => {
            let logprobs = ask.request.prompt_logprobs;
            let raw = |prompt| {
                let mut raw = raw(engine, prompt, *echo)?;
                if let Some(echo) = &mut raw.echo {
                    echo.logprobs = logprobs.then(|| raw.tokens.clone());
                }
                Ok(raw)
            };
            prompts.iter().map(raw).collect()
        }
    }
}

/// Text of a conversation, up to the start of the answer or the end of the message that it
/// continues.
///
/// # Errors
/// The template rejects the messages, or there is none.
pub(crate) fn render(text: &Text, conversation: &Conversation) -> Result<String, ApiError> {
    let Parts { messages, options, start } = conversation.parts();
    Ok(text.render(messages, &options).map_err(refused)? + start)
}

/// Tokens of a conversation: see [`render`].
///
/// # Errors
/// The template rejects the messages; the prompt is empty or longer than the context.
fn chat(engine: &Engine, conversation: &Conversation) -> Result<Prompt, ApiError> {
    let text = engine.text()?;
    let Parts { messages, options, start } = conversation.parts();
    let ChatPrompt { mut tokens, ends, .. } = text.prompt(messages, &options).map_err(refused)?;
    tokens.extend(text.encode_continuation(start)?);
    let context = engine.plan().context;
    if tokens.len() > context {
        return Err(ApiError::context(tokens.len(), context));
    }
    if tokens.is_empty() {
        return Err(ApiError::invalid("messages", "the messages make an empty prompt"));
    }
    Ok(Prompt { tokens, ends, echo: None })
}

/// Error of a prompt: those of the template are the client's, without the path of its file.
fn refused(error: Error) -> ApiError {
    match error {
        Error::Text { problem, .. } => ApiError::invalid("messages", problem),
        other => other.into(),
    }
}

/// Number of tokens of a conversation.
///
/// # Errors
/// As for the prompt of an answer.
pub(crate) fn count(engine: &Engine, conversation: &Conversation) -> Result<usize, ApiError> {
    Ok(chat(engine, conversation)?.tokens.len())
}

fn raw(engine: &Engine, prompt: &RawPrompt, echo: bool) -> Result<Prompt, ApiError> {
    let tokens = match prompt {
        RawPrompt::Text(text) => engine.text()?.encode(text)?,
        RawPrompt::Tokens(tokens) => tokens.clone(),
    };
    let context = engine.plan().context;
    if tokens.len() > context {
        return Err(ApiError::context(tokens.len(), context));
    }
    if tokens.is_empty() {
        return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
    }
    let echo = match (prompt, echo) {
        (_, false) => None,
        (RawPrompt::Text(text), true) => Some(text.clone()),
        (RawPrompt::Tokens(tokens), true) => {
            Some(engine.text()?.tokenizer().decode(tokens, false)?)
        }
    };
    let echo = echo.map(|text| Echo { text, logprobs: None });
    Ok(Prompt { tokens, ends: Vec::new(), echo })
}
