//! Requests of Ollama's API.

use moeflux::{ChatOptions, GenerateRequest, Message, text::ToolCall};
use serde_json::{Map, Value};

use crate::{
    app::App,
    ask::{self, Ask, AskPrompt, AskedReports, Conversation, MessageList, RawPrompt},
    error::ApiError,
    fim::FimTokens,
    form::AskedForm,
    json::{Fields, wrong_type},
    openai::{chat::refuse_unsupported, tools},
};

/// Fields of `/api/generate` that would change the answer and are not supported, with the values
/// that have no effect.
const UNSUPPORTED: [(&str, &[&str]); 2] = [("template", &["\"\""]), ("context", &["[]"])];

/// A request.
pub(super) enum OllamaAsk {
    Answer(Box<Ask>),
    /// Loads or unloads the model, with the reason for the end of its answer.
    Load(&'static str),
}

/// Reads a request of `/api/chat`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn chat(app: &App, fields: &Fields<'_>) -> Result<OllamaAsk, ApiError> {
    let list = fields.list("messages")?.unwrap_or_default();
    if list.is_empty() {
        return Ok(load(fields));
    }
    let mut messages = OllamaMessages::default();
    for (i, value) in list.iter().enumerate() {
        messages.push(&Fields::at(value, &format!("messages[{i}]"))?)?;
    }
    let mut options = options(fields)?;
    options.tools = tools::parse(fields)?;
    let messages = messages.list.into_messages();
    let mut conversation = Conversation::new(messages, options);
    conversation.form = AskedForm::ollama(fields)?;
    let prompt = AskPrompt::Conversation(conversation);
    Ok(OllamaAsk::Answer(Box::new(ask(app, fields, prompt)?)))
}

/// Reads a request of `/api/generate`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn generate(app: &App, fields: &Fields<'_>) -> Result<OllamaAsk, ApiError> {
    refuse_unsupported(fields, &UNSUPPORTED)?;
    refuse_images(fields)?;
    let text = fields.text("prompt")?.unwrap_or_default();
    let form = AskedForm::ollama(fields)?;
    if let Some(suffix) = fields.text("suffix")?.filter(|suffix| !suffix.is_empty()) {
        let model = app.core.engine().text()?;
        let fim = FimTokens::required(model)?;
        let prompts = vec![fim.prompt(model, text, suffix)?];
        let mut ask = ask(app, fields, AskPrompt::Raw { prompts, echo: false, form })?;
        ask.request.end_tokens = fim.ends;
        return Ok(OllamaAsk::Answer(Box::new(ask)));
    }
    if text.is_empty() {
        return Ok(load(fields));
    }
    let prompt = match fields.flag("raw")?.unwrap_or(false) {
        true => {
            let prompts = vec![RawPrompt::Text(text.to_owned())];
            AskPrompt::Raw { prompts, echo: false, form }
        }
        false => {
            let system = fields.text("system")?.filter(|system| !system.is_empty());
            let system = system.map(Message::system).into_iter();
            let messages = system.chain([Message::user(text)]).collect();
            let mut conversation = Conversation::new(messages, options(fields)?);
            conversation.form = form;
            AskPrompt::Conversation(conversation)
        }
    };
    Ok(OllamaAsk::Answer(Box::new(ask(app, fields, prompt)?)))
}

/// A request without a prompt.
fn load(fields: &Fields<'_>) -> OllamaAsk {
    let unloads = match fields.get("keep_alive") {
        Some(Value::String(time)) => time.trim_end_matches(char::is_alphabetic) == "0",
        Some(time) => time.as_f64() == Some(0.0),
        None => false,
    };
    OllamaAsk::Load(if unloads { "unload" } else { "load" })
}

/// A request with `options`, answered in a stream unless it says otherwise.
fn ask(app: &App, fields: &Fields<'_>, prompt: AskPrompt) -> Result<Ask, ApiError> {
    let none = Value::Object(Map::new());
    let options = match fields.object("options")? {
        Some(options) => options,
        None => Fields::of_body(&none)?,
    };
    let recommended = &app.core.engine().text()?.generation()?.sampling;
    // -1 and -2 are no limit but the context.
    let limit = options.integer("num_predict")?.and_then(|limit| usize::try_from(limit).ok());
    let request = GenerateRequest::default()
        .sampling(ask::sampling(&options, recommended)?)
        .max_tokens(limit)
        .stop(ask::stops(&options, "stop")?);
    let stream = fields.flag("stream")?.unwrap_or(true);
    let reports = AskedReports::default();
    Ok(Ask { prompt, request, choices: 1, stream, one_call: false, reports })
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

/// Messages as they are read. Most clients send no ids of calls.
#[derive(Default)]
struct OllamaMessages {
    list: MessageList,
    /// Calls without a result.
    open: Vec<OpenCallName>,
    /// Calls so far.
    calls: usize,
}

/// A call without a result.
struct OpenCallName {
    id: String,
    name: String,
}

impl OllamaMessages {
    fn push(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
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
                message.tool_calls = self.calls(fields)?;
                message
            }
            "tool" => {
                let id = fields.text("tool_call_id")?.filter(|id| !id.is_empty());
                let name = fields.text("tool_name")?.or(fields.text("name")?);
                let mut message = Message::new("tool", content);
                message.tool_call_id = self.result(id, name);
                message
            }
            other => {
                let path = fields.path("role");
                let roles = "system, user, assistant or tool";
                let message = format!("{path} is {other:?}: it must be {roles}");
                return Err(ApiError::invalid(path, message));
            }
        };
        self.list.push(message, &fields.path("tool_call_id"))
    }

    /// Calls of an earlier answer.
    fn calls(&mut self, message: &Fields<'_>) -> Result<Vec<ToolCall>, ApiError> {
        let mut calls = Vec::new();
        let path = message.path("tool_calls");
        for (i, value) in message.list("tool_calls")?.unwrap_or_default().iter().enumerate() {
            let entry = Fields::at(value, &format!("{path}[{i}]"))?;
            let function = entry.object("function")?.ok_or_else(|| entry.missing("function"))?;
            let name = function.text("name")?.ok_or_else(|| function.missing("name"))?;
            let id = entry.text("id")?.filter(|id| !id.is_empty());
            let id = id.map_or_else(|| format!("call_{}", self.calls), str::to_owned);
            self.calls += 1;
            self.open.push(OpenCallName { id: id.clone(), name: name.to_owned() });
            calls.push(tools::call(&id, name, &function)?);
        }
        Ok(calls)
    }

    /// Id of the call to which a result belongs: the given one, or the first open one, of that name
    /// if there is one.
    fn result(&mut self, id: Option<&str>, name: Option<&str>) -> Option<String> {
        let of = |is_it: &dyn Fn(&OpenCallName) -> bool| self.open.iter().position(is_it);
        let index = match id {
            Some(id) => of(&|call| call.id == id),
            None => of(&|call| Some(&*call.name) == name).or_else(|| of(&|_| true)),
        };
        let open = index.map(|index| self.open.remove(index).id);
        id.map(str::to_owned).or(open)
    }
}
