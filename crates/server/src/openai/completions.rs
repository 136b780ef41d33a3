//! `POST /v1/completions`: answers to texts without a template.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use moeflux::GenerateRequest;

use super::{chat, completion_encoder::CompletionEncoder};
use crate::{
    app::App,
    ask::{self, Ask, AskPrompt, AskedReports, MAX_CHOICES, RawPrompt},
    error::ApiError,
    fim::FimTokens,
    form::AskedForm,
    json::{Fields, Json, wrong_type},
    models::{ModelLease, ServedModel},
    native,
    respond::{self, Asked},
};

/// Tokens of an answer without `max_tokens`, as in OpenAI's API.
const MAX_TOKENS: usize = 16;

/// Fields that would change the answer and are not supported, with the values that have no effect.
const UNSUPPORTED: [(&str, &[&str]); 1] = [("best_of", &["1"])];

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
    chat::refuse_unsupported(fields, &UNSUPPORTED)?;
    let text = model.text()?;
    let logprobs = ask::top_logprobs(fields, "logprobs")?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    let mut request = GenerateRequest::default()
        .sampling(ask::sampling(fields, model.sampling()?)?)
        .logit_bias(ask::logit_bias(fields, text.tokenizer().vocab_size())?)
        .logprobs(logprobs)
        .prompt_logprobs(echo && logprobs.is_some())
        .max_tokens(fields.count("max_tokens")?.unwrap_or(MAX_TOKENS))
        .stop(ask::stops(fields, "stop")?);
    let (mut prompts, choices) = (prompts(model, fields)?, ask::choices(fields)?);
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
        request.end_tokens = fim.ends;
    }
    if prompts.len() * choices > MAX_CHOICES {
        let count = prompts.len();
        let message = format!("{count} prompts x {choices}: at most {MAX_CHOICES} are answered");
        return Err(ApiError::invalid("prompt", message));
    }
    let include_usage = chat::include_usage::<CompletionEncoder>(fields)?;
    let encoder =
        CompletionEncoder::new(model.head("cmpl-"), prompts.len(), choices, include_usage);
    let prompt = AskPrompt::Raw { prompts, echo, form: AskedForm::openai(fields)? };
    let reports = AskedReports::default();
    Ok(Asked::new(Ask { prompt, request, choices, one_call: false, reports }, encoder))
}

/// Prompts of a request: a text, token ids, or a list of either.
///
/// # Errors
/// The field is absent or has a wrong type.
pub(crate) fn prompts(
    model: &ServedModel,
    fields: &Fields<'_>,
) -> Result<Vec<RawPrompt>, ApiError> {
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
        return Ok(vec![RawPrompt::Tokens(native::token_ids(model, list, "prompt")?)]);
    }
    let prompt = |(i, value): (usize, Json<'_>)| match (value.as_str(), value.as_list()) {
        (Some(text), _) => Ok(RawPrompt::Text(text.into_owned())),
        (None, Some(ids)) => {
            Ok(RawPrompt::Tokens(native::token_ids(model, ids, &format!("prompt[{i}]"))?))
        }
        (None, None) => Err(wrong_type(&format!("prompt[{i}]"), "a string or a list of token ids")),
    };
    list.iter().take(MAX_CHOICES + 1).enumerate().map(prompt).collect()
}
