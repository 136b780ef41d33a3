//! From a request to the tokens of its prompts.

use std::{mem, sync::Arc};

use axum::{extract::Request, response::Response};
use moeflux::{
    ChatOptions, Error, Message,
    runtime::PromptImages,
    text::{MaskSource, PlacedImage, Text},
};
use serde_json::{Map, Value};

use super::{
    answer::Echo,
    answer_grammar::{self, AskedGrammar},
    app::App,
    ask::{Ask, AskPrompt, Conversation, ConversationParts as Parts, RawPrompt},
    content::Content,
    images::{PromptFile, ResolvedImages},
    models::ServedModel,
    overflow::{self, Overflow},
    turns::{Recalled, TurnStart},
    with_model::with_model,
};
use crate::transport::{
    error::ApiError,
    json::{self, Fields},
};

/// Maximum bytes of messages that are too long whose tokens are counted for the error.
const COUNTED_BYTES: usize = 1 << 20;

/// Bytes that a template writes around a message, for the same.
const MESSAGE_BYTES: usize = 64;

/// Tokens of a prompt, and the lengths of prefixes that other prompts are likely to share.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    /// Images among them.
    pub(crate) placed: Vec<PlacedImage>,
    /// The same with their files, until their rows are computed.
    pub(crate) files: Vec<PromptFile>,
    /// The same with their rows.
    pub(crate) images: PromptImages,
    pub(crate) ends: Vec<usize>,
    /// The prompt before its answer.
    pub(crate) echo: Option<Echo>,
    /// Start of the turn, if its answer is to be remembered.
    pub(crate) turn: Option<TurnStart>,
    /// Messages that are not in it, as they did not fit the context.
    pub(crate) dropped_messages: usize,
    /// Budget of the answer's thoughts, and its grammar.
    pub(crate) masks: Vec<Arc<dyn MaskSource>>,
    /// Keywords that the grammar does not enforce.
    pub(crate) notes: Vec<String>,
}

impl Prompt {
    fn new(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            placed: Vec::new(),
            files: Vec::new(),
            images: PromptImages::default(),
            ends: Vec::new(),
            echo: None,
            turn: None,
            dropped_messages: 0,
            masks: Vec::new(),
            notes: Vec::new(),
        }
    }
}

/// Prompts of a request.
///
/// # Errors
/// The template rejects the messages; a prompt is empty or longer than the context; the form of the
/// answer cannot be enforced.
pub(crate) fn prompts(model: &ServedModel, ask: &mut Ask) -> Result<Vec<Prompt>, ApiError> {
    let text = model.text()?;
    match &mut ask.prompt {
        AskPrompt::Conversation(conversation) => {
            let images = resolve_images(model, conversation)?;
            let rules = model.options.forms;
            let AskedGrammar { grammar, notes } =
                answer_grammar::of_conversation(text, conversation, ask.one_call, rules)?;
            let fitting = fitting(model, conversation);
            let mut prompt = fitting.map_err(|error| counted(model, conversation, error))?;
            if let Some(budget) = conversation.thinking_budget {
                prompt.masks.extend(text.thinking_budget(&prompt.tokens, budget)?);
            }
            prompt.masks.extend(answer_grammar::mask(grammar.as_ref(), text, &prompt.tokens)?);
            prompt.files = images.files(&prompt.placed);
            prompt.notes = [images.notes, notes].concat();
            Ok(vec![prompt])
        }
        AskPrompt::Raw { prompts, images, echo, form, .. } => {
            let contents = prompts.iter_mut().filter_map(|prompt| match prompt {
                RawPrompt::Media(content) => Some(&mut content.images),
                RawPrompt::Text(_) | RawPrompt::Tokens(_) => None,
            });
            let images = model.resolve_images(mem::take(images), contents.flatten())?;
            let AskedGrammar { grammar, notes } =
                answer_grammar::of_text(text, form.as_ref(), model.options.forms)?;
            let logprobs = ask.request.prompt_logprobs;
            let raw = |prompt| {
                let mut raw = raw(model, prompt, *echo)?;
                raw.masks.extend(answer_grammar::mask(grammar.as_ref(), text, &raw.tokens)?);
                raw.files = images.files(&raw.placed);
                raw.notes = [&images.notes[..], &notes].concat();
                if let Some(echo) = &mut raw.echo {
                    echo.logprobs = logprobs.then(|| raw.tokens.clone());
                }
                Ok(raw)
            };
            prompts.iter().map(raw).collect()
        }
    }
}

/// Gives the images of messages their tokens.
///
/// # Errors
/// The model reads no images, or not these.
fn resolve_images(
    model: &ServedModel,
    conversation: &mut Conversation,
) -> Result<ResolvedImages, ApiError> {
    let messages = conversation.messages.iter_mut().map(|message| &mut message.images);
    model.resolve_images(mem::take(&mut conversation.images), messages.flatten())
}

/// Text of a conversation, up to the start of the answer or the end of the message that it
/// continues.
///
/// # Errors
/// The template rejects the messages, or there is none.
pub(crate) fn render(
    model: &ServedModel,
    mut conversation: Conversation,
) -> Result<String, ApiError> {
    resolve_images(model, &mut conversation)?;
    let text = model.text()?;
    let Parts { messages, options, start, .. } = conversation.parts();
    Ok(text.render(messages, &options).map_err(refused)? + start)
}

/// Tokens of a conversation, which loses its oldest turns if it does not fit the context and may
/// lose them.
///
/// # Errors
/// The template rejects the messages; the prompt is empty or too long.
fn fitting(model: &ServedModel, conversation: &Conversation) -> Result<Prompt, ApiError> {
    let parts = conversation.parts();
    let context = model.context();
    let recalled = model.turns.recall(parts.messages, conversation.call_ids);
    if conversation.overflow.unwrap_or(model.options.overflow) == Overflow::Error {
        return chat(model, &parts, &recalled, context);
    }
    // As few as possible. Each try renders the messages that are left.
    let droppable = overflow::droppable(&recalled.messages);
    let tokenizer = model.text()?.tokenizer();
    let count = |text: &str, limit: usize| -> Result<Option<usize>, ApiError> {
        Ok(tokenizer.encode_within(text, false, limit)?.map(|tokens| tokens.len()))
    };
    let guess = overflow::about_dropped(&recalled.messages, &droppable, context, count)?;
    let found = overflow::smallest(droppable.len(), guess, |count| {
        let rest = recalled.with(|messages| overflow::without(messages, &droppable[..count]));
        let limit = if count == 0 { context } else { overflow::room(context) };
        match chat(model, &parts, &rest, limit) {
            Err(error) if error.is_overflow() => Ok(None),
            tried => tried.map(|mut prompt| {
                prompt.dropped_messages = parts.messages.len() - rest.messages.len();
                Some(prompt)
            }),
        }
    })?;
    // The error is about the whole.
    found.map_or_else(|| chat(model, &parts, &recalled, context), Ok)
}

/// The error with the true number of tokens, if it says a bound of it and the messages are short
/// enough to count them.
fn counted(model: &ServedModel, conversation: &Conversation, error: ApiError) -> ApiError {
    let messages = conversation.messages.iter();
    let bytes: usize = messages.map(|message| message.content.len() + MESSAGE_BYTES).sum();
    if !error.is_uncounted() || bytes > COUNTED_BYTES {
        return error;
    }
    count(model, conversation).map_or(error, |tokens| ApiError::context(tokens, model.context()))
}

/// Number of tokens of a conversation, also beyond the context.
fn count(model: &ServedModel, conversation: &Conversation) -> Result<usize, ApiError> {
    let Parts { messages, options, start, call_ids, before } = conversation.parts();
    let text = model.text()?;
    let start = text.tokenizer().encode(start, false)?.len();
    if !before.is_empty() {
        return Ok(follow_up(text, messages, &options, before)?.len() + start);
    }
    let recalled = model.turns.recall(messages, call_ids);
    let tokens = text.count_after(&recalled.messages, &options, recalled.turns());
    Ok(tokens.map_err(refused)? + start)
}

/// Tokens of a conversation of which `before` are known, and its last message.
fn follow_up(
    text: &Text,
    messages: &[Message],
    options: &ChatOptions,
    before: &[u32],
) -> Result<Vec<u32>, ApiError> {
    let question = messages.last().map_or("", |message| &message.content);
    let more = text.chat_follow_up(question, options).map_err(refused)?;
    Ok([before, &more].concat())
}

/// Tokens of a conversation with its `recalled` messages: see [`render`]. Earlier answers have the
/// tokens and thoughts that they were generated with, as far as the template renders them.
///
/// # Errors
/// The template rejects the messages; the prompt is empty, or longer than `limit`.
fn chat(
    model: &ServedModel,
    parts: &Parts<'_>,
    recalled: &Recalled,
    limit: usize,
) -> Result<Prompt, ApiError> {
    let text = model.text()?;
    let Parts { messages, options, start, call_ids, before } = parts;
    if !before.is_empty() {
        let tokens = follow_up(text, messages, options, before)?;
        if tokens.len() > limit {
            return Err(ApiError::context(tokens.len(), limit));
        }
        return Ok(Prompt { ends: vec![tokens.len()], ..Prompt::new(tokens) });
    }
    let prompt = text.prompt_after(&recalled.messages, options, recalled.turns());
    let prompt = prompt.map_err(refused)?;
    let (mut tokens, ends) = (prompt.tokens.clone(), prompt.ends.clone());
    let placed = prompt.images.clone();
    tokens.extend(text.encode_continuation(start)?);
    if tokens.len() > limit {
        return Err(ApiError::context(tokens.len(), limit));
    }
    if tokens.is_empty() {
        return Err(ApiError::invalid("messages", "the messages make an empty prompt"));
    }
    // The start of an answer is not part of its message.
    let turn = start.is_empty().then(|| model.turns.start(prompt, messages, *call_ids));
    Ok(Prompt { placed, ends, turn, ..Prompt::new(tokens) })
}

/// Error of the prompt of messages: see [`refused_at`].
fn refused(error: Error) -> ApiError {
    refused_at("messages", error)
}

/// Error of a prompt in this field: errors of the template are the client's, without the path of
/// its file.
fn refused_at(field: &str, error: Error) -> ApiError {
    match error {
        Error::Text { problem, .. } => ApiError::invalid(field, problem),
        other => other.into(),
    }
}

/// Answers a request for the number of tokens of the conversation that `read` finds in its fields,
/// also beyond the context. `object` is the kind of the answer, if it has one.
///
/// # Errors
/// As for the prompt of an answer.
pub(crate) async fn count_tokens(
    app: &Arc<App>,
    request: Request,
    object: Option<&'static str>,
    read: impl FnOnce(&Fields<'_>) -> Result<Conversation, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let count = with_model(app, request, move |model, fields| {
        let mut conversation = read(fields)?;
        resolve_images(model, &mut conversation)?;
        count(model, &conversation)
    });
    let mut answer = Map::new();
    answer.extend(object.map(|object| ("object".to_owned(), Value::from(object))));
    answer.insert("input_tokens".to_owned(), count.await?.value.into());
    Ok(json::response(&answer))
}

fn raw(model: &ServedModel, prompt: &RawPrompt, echo: bool) -> Result<Prompt, ApiError> {
    let context = model.context();
    let mut placed = Vec::new();
    let tokens = match prompt {
        RawPrompt::Text(text) => model.text()?.encode(text).or_else(|error| {
            let error = ApiError::from(error);
            match error.is_uncounted() && text.len() <= COUNTED_BYTES {
                true => Err(ApiError::context(model.text()?.count(text)?, context)),
                false => Err(error),
            }
        })?,
        RawPrompt::Tokens(tokens) => tokens.clone(),
        RawPrompt::Media(Content { text, images, .. }) => {
            let expanded = model.text()?.encode_with_images(text, images);
            let expanded = expanded.map_err(|error| refused_at("prompt", error))?;
            placed = expanded.images;
            expanded.tokens
        }
    };
    if tokens.len() > context {
        return Err(ApiError::context(tokens.len(), context));
    }
    if tokens.is_empty() {
        return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
    }
    let echo = match (prompt, echo) {
        (_, false) => None,
        (RawPrompt::Text(text) | RawPrompt::Media(Content { text, .. }), true) => {
            Some(text.clone())
        }
        (RawPrompt::Tokens(tokens), true) => Some(model.text()?.tokenizer().decode(tokens, false)?),
    };
    let echo = echo.map(|text| Echo { text, logprobs: None });
    Ok(Prompt { placed, echo, ..Prompt::new(tokens) })
}
