//! Requests of Ollama's API.

use std::borrow::Cow;

use moeflux::{ChatOptions, Message};

use crate::{
    apis::openai::tools,
    requests::{
        answered_turn::CallIds,
        ask::{self, Ask, AskPrompt, AskedReports, Conversation, MessageList, RawPrompt},
        content::Content,
        fim::FimTokens,
        form::AskedForm,
        generation::{self, FieldStyle},
        images::ImageTable,
        line_limits::LineLimits,
        models::{KeepAlive, ServedModel},
        overflow::Overflow,
        token_ids::token_ids,
        unsupported::{self, OLLAMA, OLLAMA_OPTIONS},
    },
    transport::{
        error::ApiError,
        json::{Fields, wrong_type},
    },
};

/// An ask of Ollama's API.
pub(super) struct OllamaAsk {
    pub(super) ask: Ask,
    /// Whether the answer ends with the tokens of prompt and answer.
    pub(super) has_context: bool,
}

impl From<Ask> for OllamaAsk {
    fn from(ask: Ask) -> Self {
        Self { ask, has_context: false }
    }
}

/// Reads a request of `/api/chat`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn chat(model: &ServedModel, fields: &Fields<'_>) -> Result<OllamaAsk, ApiError> {
    let mut options = options(fields)?;
    options.tools = tools::parse(fields)?;
    let mut conversation = Conversation::new(messages(fields)?, options);
    conversation.call_ids = CallIds::Dropped;
    conversation.form = AskedForm::ollama(fields)?;
    conversation.overflow = overflow(fields)?;
    Ok(ask(model, fields, AskPrompt::Conversation(conversation))?.into())
}

fn messages(fields: &Fields<'_>) -> Result<MessageList, ApiError> {
    let mut list = MessageList::default();
    for (i, value) in fields.list("messages")?.unwrap_or_default().iter().enumerate() {
        push(&mut list, &Fields::at(value, &format!("messages[{i}]"))?)?;
    }
    Ok(list)
}

/// Reads a request of `/api/generate`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn generate(model: &ServedModel, fields: &Fields<'_>) -> Result<OllamaAsk, ApiError> {
    refuse_template(fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let (form, lines) = (AskedForm::ollama(fields)?, LineLimits::default());
    let before = context(model, fields)?;
    let suffix = suffix(fields)?;
    let is_raw = fields.flag("raw")?.unwrap_or(false);
    if !before.is_empty() && (is_raw || suffix.is_some()) {
        let other = if is_raw { "raw" } else { "suffix" };
        let message = format!("context: this value is not supported with {other}");
        return Err(ApiError::invalid("context", message));
    }
    for (name, is_sent) in
        [("raw", is_raw), ("suffix", suffix.is_some()), ("context", !before.is_empty())]
    {
        if is_sent && has_images(fields)? {
            let message = format!("images: this value is not supported with {name}");
            return Err(ApiError::invalid("images", message));
        }
    }
    if let Some(suffix) = suffix {
        let text = model.text()?;
        let fim = FimTokens::required(text)?;
        let prompts = vec![fim.prompt(text, &prompt, &suffix)?];
        let images = ImageTable::default();
        let prompt = AskPrompt::Raw { prompts, images, echo: false, form, lines };
        let mut ask = ask(model, fields, prompt)?;
        ask.request.end_tokens.extend(fim.ends);
        return Ok(ask.into());
    }
    if is_raw {
        let prompts = vec![RawPrompt::Text(prompt.into_owned())];
        let images = ImageTable::default();
        let prompt = AskPrompt::Raw { prompts, images, echo: false, form, lines };
        return Ok(ask(model, fields, prompt)?.into());
    }
    let system = fields.text("system")?.filter(|system| !system.is_empty());
    if let Some(system) = &system {
        check_system(model, &before, system)?;
    }
    let mut list = MessageList::default();
    if let Some(system) = system {
        list.push(Message::system(system), "system")?;
    }
    let content = content(fields, "prompt", &mut list.images)?;
    // Tokens do not tell images.
    let has_context = content.images.is_empty();
    list.push(content.into_message("user", "images")?, "prompt")?;
    let mut conversation = Conversation::new(list, options(fields)?);
    conversation.form = form;
    conversation.before = before;
    conversation.overflow = overflow(fields)?;
    let mut ask = ask(model, fields, AskPrompt::Conversation(conversation))?;
    ask.reports.tokens = has_context;
    Ok(OllamaAsk { ask, has_context })
}

/// Tokens of an earlier prompt and answer: the field `context`.
fn context(model: &ServedModel, fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    match fields.list("context")? {
        Some(list) => token_ids(model, list, "context"),
        None => Ok(Vec::new()),
    }
}

/// Checks that the tokens `before`, if there are any, begin with a system message, as a
/// conversation has it at its start only.
fn check_system(model: &ServedModel, before: &[u32], system: &str) -> Result<(), ApiError> {
    let has_system = || -> Result<bool, ApiError> {
        Ok(model.text()?.tokenizer().decode(before, false)?.contains(system.trim()))
    };
    if before.is_empty() || has_system()? {
        return Ok(());
    }
    let message = "system: the context begins with another system message: leave one of them out";
    Err(ApiError::invalid("system", message))
}

/// Rule for a prompt over the context: the field `truncate`.
fn overflow(fields: &Fields<'_>) -> Result<Option<Overflow>, ApiError> {
    let rule = |truncates| if truncates { Overflow::DropOldestTurns } else { Overflow::Error };
    Ok(fields.flag("truncate")?.map(rule))
}

/// Refuses the field `template`, as templates of Ollama are in another language than the model's.
fn refuse_template(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.text("template")?.is_none_or(|template| template.is_empty()) {
        return Ok(());
    }
    let message = "template: templates of requests are not supported: leave it out for that of \
                   the model, or send a prompt as the model shall read it, with raw";
    Err(ApiError::invalid("template", message))
}

/// Text behind the answer.
fn suffix<'a>(fields: &Fields<'a>) -> Result<Option<Cow<'a, str>>, ApiError> {
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
    refuse_template(fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    Ok(prompt.is_empty() && suffix(fields)?.is_none() && !has_images(fields)?)
}

/// Time that the model stays loaded without requests: the field `keep_alive`, a number of seconds
/// or a text. Below 0 is for ever.
///
/// # Errors
/// It is neither.
pub(super) fn keep_alive(fields: &Fields<'_>) -> Result<Option<KeepAlive>, ApiError> {
    let Some(value) = fields.get("keep_alive") else { return Ok(None) };
    let keep_alive = match value.as_str() {
        Some(text) => text.parse().ok(),
        None => value.as_f64().map(KeepAlive::from_seconds),
    };
    let wrong = || wrong_type("keep_alive", "seconds, or a time such as 5m or 1h30m");
    keep_alive.map(Some).ok_or_else(wrong)
}

/// A request with `options`.
fn ask(model: &ServedModel, fields: &Fields<'_>, prompt: AskPrompt) -> Result<Ask, ApiError> {
    let options = fields.object("options")?.unwrap_or_default();
    unsupported::refuse(fields, &[&OLLAMA])?;
    unsupported::refuse(&options, &[&OLLAMA_OPTIONS])?;
    let request = generation::request(model, &options, FieldStyle::LlamaCpp, &["num_predict"])?
        .logprobs(generation::logprobs(fields)?);
    let reports = AskedReports::default();
    Ok(Ask { prompt, request, choices: 1, one_call: false, reports })
}

/// Template variables: the field `think`, a boolean or an effort.
fn options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let mut options = ask::chat_options(fields)?;
    let Some(think) = fields.get("think") else { return Ok(options) };
    match (think.as_bool(), think.as_str()) {
        (Some(thinks), _) => options.thinking = Some(thinks),
        (None, Some(effort)) => {
            options.thinking = Some(true);
            ask::set_effort(&mut options, &effort);
        }
        (None, None) => return Err(wrong_type("think", "true, false or an effort")),
    }
    Ok(options)
}

/// Whether the field `images` has any.
fn has_images(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(!fields.list("images")?.unwrap_or_default().is_empty())
}

/// Content with the field `images` before the text in the field `name`.
fn content(fields: &Fields<'_>, name: &str, images: &mut ImageTable) -> Result<Content, ApiError> {
    let (mut content, path) = (Content::default(), fields.path("images"));
    for (i, image) in fields.list("images")?.unwrap_or_default().iter().enumerate() {
        content.push_image(images.add_base64(image, &format!("{path}[{i}]"))?);
    }
    content.push_text("", &fields.text(name)?.unwrap_or_default());
    Ok(content)
}

/// Appends a message. Most clients send no ids of calls.
fn push(messages: &mut MessageList, fields: &Fields<'_>) -> Result<(), ApiError> {
    let content = content(fields, "content", &mut messages.images)?;
    let role = fields.text("role")?.ok_or_else(|| fields.missing("role"))?;
    let mut message = content.into_message(&role, &fields.path("images"))?;
    match &*role {
        "system" | "user" => {}
        "assistant" => {
            if let Some(thoughts) = fields.text("thinking")? {
                message = message.reasoning(thoughts);
            }
            message.tool_calls = tools::calls(fields)?;
        }
        "tool" => {
            message.tool_call_id = fields.text("tool_call_id")?.map(Cow::into_owned);
            let name = fields.text("tool_name")?.or(fields.text("name")?);
            message.name = name.map(Cow::into_owned);
        }
        other => {
            let path = fields.path("role");
            let roles = "system, user, assistant or tool";
            let message = format!("{path} is {other:?}: it must be {roles}");
            return Err(ApiError::invalid(path, message));
        }
    }
    messages.push(message, &fields.path("tool_call_id"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::seen_images::{seen_images, with_fields};

    #[test]
    fn images_are_before_the_text_of_their_message() {
        let chat = json!({"messages": [
            {"role": "user", "content": "Look:", "images": ["b25l", "dHdv"]},
            {"role": "user", "images": ["b25l"]},
        ]});
        let list = with_fields(&chat, |fields| messages(fields).unwrap());
        let images = ["0 user 0 one Auto", "0 user 0 two Auto", "1 user 0 one Auto"];
        assert_eq!(seen_images(list), images);
        let generate = json!({"prompt": "Look:", "images": ["dHdv"]});
        let list = with_fields(&generate, |fields| {
            assert!(!is_empty_prompt(fields).unwrap());
            let mut list = MessageList::default();
            let content = content(fields, "prompt", &mut list.images).unwrap();
            list.push(content.into_message("user", "images").unwrap(), "prompt").unwrap();
            list
        });
        assert_eq!(seen_images(list), ["0 user 0 two Auto"]);
    }
}
