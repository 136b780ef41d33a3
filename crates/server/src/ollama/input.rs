//! Requests of Ollama's API.

use moeflux::{ChatOptions, GenerateRequest, Message};
use serde_json::{Map, Value};

use crate::{
    ask::{self, Ask, AskPrompt, AskedReports, Conversation, MessageList, RawPrompt},
    error::ApiError,
    fim::FimTokens,
    form::AskedForm,
    json::{Fields, wrong_type},
    models::{KeepAlive, ServedModel},
    openai::{chat::refuse_unsupported, tools},
    turns::CallIds,
};

/// Fields of `/api/generate` that would change the answer and are not supported, with the values
/// that have no effect.
const UNSUPPORTED: [(&str, &[&str]); 2] = [("template", &["\"\""]), ("context", &["[]"])];

/// Reads a request of `/api/chat`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn chat(model: &ServedModel, fields: &Fields<'_>) -> Result<Ask, ApiError> {
    let mut list = MessageList::default();
    for (i, value) in fields.list("messages")?.unwrap_or_default().iter().enumerate() {
        push(&mut list, &Fields::at(value, &format!("messages[{i}]"))?)?;
    }
    let mut options = options(fields)?;
    options.tools = tools::parse(fields)?;
    let mut conversation = Conversation::new(list.into_messages(), options);
    conversation.call_ids = CallIds::Dropped;
    conversation.form = AskedForm::ollama(fields)?;
    ask(model, fields, AskPrompt::Conversation(conversation))
}

/// Reads a request of `/api/generate`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn generate(model: &ServedModel, fields: &Fields<'_>) -> Result<Ask, ApiError> {
    refuse_unsupported(fields, &UNSUPPORTED)?;
    refuse_images(fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let form = AskedForm::ollama(fields)?;
    if let Some(suffix) = suffix(fields)? {
        let text = model.text()?;
        let fim = FimTokens::required(text)?;
        let prompts = vec![fim.prompt(text, prompt, suffix)?];
        let mut ask = ask(model, fields, AskPrompt::Raw { prompts, echo: false, form })?;
        ask.request.end_tokens = fim.ends;
        return Ok(ask);
    }
    let prompt = match fields.flag("raw")?.unwrap_or(false) {
        true => {
            let prompts = vec![RawPrompt::Text(prompt.to_owned())];
            AskPrompt::Raw { prompts, echo: false, form }
        }
        false => {
            let system = fields.text("system")?.filter(|system| !system.is_empty());
            let system = system.map(Message::system).into_iter();
            let messages = system.chain([Message::user(prompt)]).collect();
            let mut conversation = Conversation::new(messages, options(fields)?);
            conversation.form = form;
            AskPrompt::Conversation(conversation)
        }
    };
    ask(model, fields, prompt)
}

/// Text behind the answer.
fn suffix<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    Ok(fields.text("suffix")?.filter(|suffix| !suffix.is_empty()))
}

/// Whether a request of `/api/chat` has no prompt. Then it loads or unloads the model only.
///
/// # Errors
/// A field has a wrong type.
pub(super) fn is_empty_chat(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(fields.list("messages")?.unwrap_or_default().is_empty())
}

/// The same of a request of `/api/generate`.
///
/// # Errors
/// A field has a wrong type, or is not supported.
pub(super) fn is_empty_prompt(fields: &Fields<'_>) -> Result<bool, ApiError> {
    refuse_unsupported(fields, &UNSUPPORTED)?;
    refuse_images(fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    Ok(prompt.is_empty() && suffix(fields)?.is_none())
}

/// Time that the model stays loaded without requests: the field `keep_alive`, a number of seconds
/// or a text. Below 0 is for ever.
///
/// # Errors
/// It is neither.
pub(super) fn keep_alive(fields: &Fields<'_>) -> Result<Option<KeepAlive>, ApiError> {
    let keep_alive = match fields.get("keep_alive") {
        None => return Ok(None),
        Some(Value::String(text)) => text.parse().ok(),
        Some(value) => value.as_f64().map(KeepAlive::from_seconds),
    };
    let wrong = || wrong_type("keep_alive", "seconds, or a time such as 5m or 1h30m");
    keep_alive.map(Some).ok_or_else(wrong)
}

/// A request with `options`.
fn ask(model: &ServedModel, fields: &Fields<'_>, prompt: AskPrompt) -> Result<Ask, ApiError> {
    let none = Value::Object(Map::new());
    let options = match fields.object("options")? {
        Some(options) => options,
        None => Fields::of_body(&none)?,
    };
    // -1 and -2 are no limit but the context.
    let limit = options.integer("num_predict")?.and_then(|limit| usize::try_from(limit).ok());
    let request = GenerateRequest::default()
        .sampling(ask::sampling(&options, model.sampling()?)?)
        .max_tokens(limit)
        .stop(ask::stops(&options, "stop")?);
    let reports = AskedReports::default();
    Ok(Ask { prompt, request, choices: 1, one_call: false, reports })
}

/// Template variables: the field `think`, a boolean or an effort.
fn options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let mut options = ask::chat_options(fields)?;
    match fields.get("think") {
        None => {}
        Some(Value::Bool(thinks)) => options.thinking = Some(*thinks),
        Some(Value::String(effort)) => {
            options.thinking = Some(true);
            ask::set_effort(&mut options, effort);
        }
        Some(_) => return Err(wrong_type("think", "true, false or an effort")),
    }
    Ok(options)
}

/// Refuses the field `images`.
fn refuse_images(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.list("images")?.is_some_and(|images| !images.is_empty()) {
        true => {
            let path = fields.path("images");
            let message = format!("{path}: this model reads text only");
            Err(ApiError::invalid(path, message))
        }
        false => Ok(()),
    }
}

/// Appends a message. Most clients send no ids of calls.
fn push(messages: &mut MessageList, fields: &Fields<'_>) -> Result<(), ApiError> {
    refuse_images(fields)?;
    let content = fields.text("content")?.unwrap_or_default();
    let message = match fields.text("role")?.ok_or_else(|| fields.missing("role"))? {
        "system" => Message::system(content),
        "user" => Message::user(content),
        "assistant" => {
            let mut message = Message::assistant(content);
            if let Some(thoughts) = fields.text("thinking")? {
                message = message.reasoning(thoughts);
            }
            message.tool_calls = tools::calls(fields)?;
            message
        }
        "tool" => {
            let mut message = Message::new("tool", content);
            message.tool_call_id = fields.text("tool_call_id")?.map(str::to_owned);
            let name = fields.text("tool_name")?.or(fields.text("name")?);
            message.name = name.map(str::to_owned);
            message
        }
        other => {
            let path = fields.path("role");
            let roles = "system, user, assistant or tool";
            let message = format!("{path} is {other:?}: it must be {roles}");
            return Err(ApiError::invalid(path, message));
        }
    };
    messages.push(message, &fields.path("tool_call_id"))
}
