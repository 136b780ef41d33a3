//! `POST /v1/completions`: answers to texts without a template.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};

use super::{chat, completion_encoder::CompletionEncoder};
use crate::{
    requests::{
        app::App,
        ask::{Ask, AskPrompt, AskedReports, RawPrompt},
        fim::FimTokens,
        form::AskedForm,
        generation::{self, FieldStyle, MAX_CHOICES},
        images::ImageTable,
        line_limits::LineLimits,
        models::{ModelLease, ServedModel},
        respond::{self, Asked},
        token_ids::token_ids,
        unsupported::{self, COMPLETIONS, SERVERS},
    },
    transport::{
        error::ApiError,
        json::{Fields, Json, wrong_type},
    },
};

/// Names of the limit of an answer.
const LIMITS: [&str; 2] = ["max_tokens", "n_predict"];

/// Answers a request for completions.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| read(model, fields);
    respond::answer(&app, request, read).await
}

/// Reads a request.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
fn read(model: &ServedModel, fields: &Fields<'_>) -> Result<Asked<CompletionEncoder>, ApiError> {
    unsupported::refuse(fields, &[&COMPLETIONS, &SERVERS])?;
    let text = model.text()?;
    let native = generation::top_logprobs(fields, "n_probs")?.filter(|count| *count > 0);
    let logprobs = generation::top_logprobs(fields, "logprobs")?.or(native);
    let echo = fields.flag("echo")?.unwrap_or(false);
    let mut request = generation::request(model, fields, FieldStyle::OpenAi, &LIMITS)?
        .logprobs(logprobs)
        .prompt_logprobs(echo && logprobs.is_some());
    let mut prompts = prompts(model, fields)?;
    let choices = generation::choices(fields, &["n", "n_cmpl"])?;
    if let Some(suffix) = fields.text("suffix")?.filter(|suffix| !suffix.is_empty()) {
        let fim = FimTokens::required(text)?;
        if echo {
            return Err(ApiError::invalid("echo", "echo and suffix exclude each other"));
        }
        for prompt in &mut prompts {
            let RawPrompt::Text(prefix) = prompt else {
                return Err(wrong_type("prompt", "a string or strings, as there is a suffix"));
            };
            *prompt = fim.prompt(text, prefix, &suffix)?;
        }
        request.end_tokens.extend(fim.ends);
    }
    if prompts.len() * choices > MAX_CHOICES {
        return Err(too_many(prompts.len(), choices));
    }
    let include_usage = chat::include_usage::<CompletionEncoder>(fields)?;
    let encoder =
        CompletionEncoder::new(model.head("cmpl-"), prompts.len(), choices, include_usage);
    let (form, lines) = (AskedForm::openai(fields)?, LineLimits::default());
    let prompt = AskPrompt::Raw { prompts, images: ImageTable::default(), echo, form, lines };
    let reports = AskedReports::default();
    Ok(Asked::new(Ask { prompt, request, choices, one_call: false, reports }, encoder))
}

/// Error of a request for too many answers.
pub(crate) fn too_many(prompts: usize, choices: usize) -> ApiError {
    let message = format!("{prompts} prompts x {choices}: at most {MAX_CHOICES} are answered");
    ApiError::invalid("prompt", message)
}

/// Prompts of a request: a text, token ids, or a list of either.
///
/// # Errors
/// The field is absent or has a wrong type.
fn prompts(model: &ServedModel, fields: &Fields<'_>) -> Result<Vec<RawPrompt>, ApiError> {
    let prompt = fields.get("prompt").ok_or_else(|| fields.missing("prompt"))?;
    if let Some(text) = prompt.as_str() {
        return Ok(vec![RawPrompt::Text(text.into_owned())]);
    }
    let wrong = || wrong_type("prompt", "a string, token ids, or a list of either");
    let list = prompt.as_list().ok_or_else(wrong)?;
    if list.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt is empty"));
    }
    if list.iter().all(Json::is_number) {
        return Ok(vec![RawPrompt::Tokens(token_ids(model, list, "prompt")?)]);
    }
    let prompt = |(i, value): (usize, Json<'_>)| match (value.as_str(), value.as_list()) {
        (Some(text), _) => Ok(RawPrompt::Text(text.into_owned())),
        (None, Some(ids)) => Ok(RawPrompt::Tokens(token_ids(model, ids, &format!("prompt[{i}]"))?)),
        (None, None) => Err(wrong_type(&format!("prompt[{i}]"), "a string or a list of token ids")),
    };
    list.iter().take(MAX_CHOICES + 1).enumerate().map(prompt).collect()
}
