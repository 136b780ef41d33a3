//! `/v1/messages` and the count of its tokens.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use moeflux::{ChatOptions, text::ToolSet};

use super::encoder::MessageEncoder;
use crate::{
    apis::openai::tools,
    requests::{
        app::App,
        ask::{self, Ask, AskPrompt, AskedReports, Conversation},
        form::{AskedForm, RequiredCalls},
        generation::{self, FieldStyle},
        models::{ModelLease, ServedModel},
        prompt,
        respond::{self, Asked},
        unsupported::{self, MESSAGES, SERVERS},
    },
    transport::{error::ApiError, json::Fields},
};

/// Kind of tools that models call. Others are run by Anthropic's servers.
const CUSTOM: &str = "custom";

/// Answers `POST /v1/messages`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| read(model, fields);
    respond::answer(&app, request, read).await
}

/// Answers `POST /v1/messages/count_tokens`.
///
/// # Errors
/// The request is wrong.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    prompt::count_tokens(&app, request, None, conversation).await
}

/// Reads a request.
fn read(model: &ServedModel, fields: &Fields<'_>) -> Result<Asked<MessageEncoder>, ApiError> {
    unsupported::refuse(fields, &[&MESSAGES, &SERVERS])?;
    let mut request = generation::request(model, fields, FieldStyle::OpenAi, &["max_tokens"])?;
    request.stop.extend(generation::stops(fields, "stop_sequences")?);
    let choice = fields.object("tool_choice")?;
    let one_call = choice.map(|choice| choice.flag("disable_parallel_tool_use")).transpose()?;
    let ask = Ask {
        prompt: AskPrompt::Conversation(conversation(fields)?),
        request,
        choices: 1,
        one_call: one_call.flatten().unwrap_or(false),
        reports: AskedReports::default(),
    };
    let head = model.head("msg_");
    Ok(Asked::new(ask, MessageEncoder::new(head.id, head.model)))
}

/// Messages, tools and template variables of a request.
fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let mut options = options(fields)?;
    options.tools = tool_set(fields)?;
    let mut conversation = Conversation::new(super::messages::parse(fields)?, options);
    (conversation.calls, conversation.required) = calls(fields)?;
    let config = fields.object("output_config")?;
    let of_config = config.map(|config| AskedForm::anthropic(&config, "format")).transpose()?;
    // The name of the field while the feature was a beta.
    let form = of_config.flatten();
    conversation.form =
        form.map_or_else(|| AskedForm::anthropic(fields, "output_format"), |form| Ok(Some(form)))?;
    conversation.overflow = ask::overflow(fields)?;
    conversation.thinking_budget = ask::thinking_budget(fields)?;
    Ok(conversation)
}

/// Template variables. Without `thinking` there are no thoughts, as clients of this API expect the
/// text in the first block.
fn options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let mut options = ask::chat_options(fields)?;
    if fields.get("thinking").is_none() && options.thinking.is_none() {
        options.thinking = Some(false);
    }
    if let Some(config) = fields.object("output_config")?
        && let Some(effort) = config.text("effort")?
    {
        ask::set_effort(&mut options, &effort);
    }
    Ok(options)
}

/// Tools of a request, without the ones that Anthropic's servers run.
fn tool_set(fields: &Fields<'_>) -> Result<ToolSet, ApiError> {
    let mut set = ToolSet::default();
    for (i, value) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
        let entry = Fields::at(value, &format!("tools[{i}]"))?;
        if entry.text("type")?.is_none_or(|kind| kind == CUSTOM) {
            let tool = tools::tool(&entry, "input_schema")?;
            set.tools.push(tool.strict(entry.flag("strict")?.unwrap_or(false)));
        }
    }
    Ok(set)
}

/// Whether the model may call tools, and the calls that it must make, by `tool_choice`.
fn calls(fields: &Fields<'_>) -> Result<(bool, Option<RequiredCalls>), ApiError> {
    let Some(choice) = fields.object("tool_choice")? else { return Ok((true, None)) };
    match &*choice.text("type")?.ok_or_else(|| choice.missing("type"))? {
        "auto" => Ok((true, None)),
        "none" => Ok((false, None)),
        "any" => Ok((true, Some(RequiredCalls::Any))),
        "tool" => {
            let name = choice.text("name")?.ok_or_else(|| choice.missing("name"))?;
            Ok((true, Some(RequiredCalls::Named(vec![name.into_owned()]))))
        }
        other => {
            let message =
                format!("tool_choice.type is {other:?}: it must be auto, any, tool, none");
            Err(ApiError::invalid("tool_choice.type", message))
        }
    }
}
