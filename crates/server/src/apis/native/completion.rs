//! `POST /completion`: answers to texts in the form of llama.cpp's server.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Request, State},
    response::Response,
};
use moeflux::{GenerateRequest, Sampling};
use serde_json::{Map, Value, json};

use super::encoder::NativeEncoder;
use crate::{
    apis::openai::completions::too_many,
    requests::{
        app::App,
        ask::{Ask, AskPrompt, AskedReports, RawPrompt},
        form::AskedForm,
        generation::{self, FieldStyle, MAX_CHOICES},
        line_limits::LineLimits,
        models::{ModelLease, ServedModel},
        respond::{self, Asked},
        token_ids::token_ids,
        unsupported::{self, NATIVE},
    },
    transport::{
        error::ApiError,
        json::{Fields, Json, wrong_type},
    },
};

/// Names of the limit of an answer.
const LIMITS: [&str; 2] = ["n_predict", "max_tokens"];

/// Answers a request.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| {
        let prompts = prompts(model, fields)?;
        asked(model, fields, prompts, Vec::new())
    };
    respond::answer(&app, request, read).await
}

/// A request with these prompts, whose answers also end with `ends`.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn asked(
    model: &ServedModel,
    fields: &Fields<'_>,
    prompts: Vec<RawPrompt>,
    ends: Vec<u32>,
) -> Result<Asked<NativeEncoder>, ApiError> {
    unsupported::refuse(fields, &[&NATIVE])?;
    let probabilities = generation::top_logprobs(fields, "n_probs")?.filter(|count| *count > 0);
    let mut request =
        generation::request(model, fields, FieldStyle::LlamaCpp, &LIMITS)?.logprobs(probabilities);
    request.end_tokens.extend(ends);
    let choices = generation::choices(fields, &["n_cmpl", "n"])?;
    let count = prompts.len() * choices;
    if count > MAX_CHOICES {
        return Err(too_many(prompts.len(), choices));
    }
    let reports = AskedReports {
        tokens: fields.flag("return_tokens")?.unwrap_or(false),
        ..AskedReports::parse(fields)?
    };
    let settings = settings(model.context(), &request);
    let encoder = NativeEncoder::new(&model.name, count, settings)
        .fields(response_fields(fields)?)
        .reports(reports);
    let (form, lines) = (AskedForm::openai(fields)?, line_limits(fields)?);
    let prompt = AskPrompt::Raw { prompts, echo: false, form, lines };
    Ok(Asked::new(Ask { prompt, request, choices, one_call: false, reports }, encoder))
}

/// Prompts of a request: a text, token ids, a mix of both, or a list of these.
fn prompts(model: &ServedModel, fields: &Fields<'_>) -> Result<Vec<RawPrompt>, ApiError> {
    let value = fields.get("prompt").ok_or_else(|| fields.missing("prompt"))?;
    let Some(list) = value.as_list() else { return Ok(vec![prompt(model, value, "prompt")?]) };
    if list.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt is empty"));
    }
    let is_mixed = list.iter().any(Json::is_number) && !list.iter().any(Json::is_list);
    if is_mixed {
        return Ok(vec![prompt(model, value, "prompt")?]);
    }
    let prompt = |(i, value): (usize, Json<'_>)| prompt(model, value, &format!("prompt[{i}]"));
    list.iter().take(MAX_CHOICES + 1).enumerate().map(prompt).collect()
}

/// A text, or a list of token ids and texts. Only a text at the start begins like others.
fn prompt(model: &ServedModel, value: Json<'_>, path: &str) -> Result<RawPrompt, ApiError> {
    let wrong = || wrong_type(path, "a string, or a list of token ids and strings");
    if let Some(text) = value.as_str() {
        return Ok(RawPrompt::Text(text.into_owned()));
    }
    let list = value.as_list().ok_or_else(wrong)?;
    if list.iter().all(Json::is_number) {
        return Ok(RawPrompt::Tokens(token_ids(model, list, path)?));
    }
    let text = model.text()?;
    let vocab = text.tokenizer().vocab_size();
    let mut tokens = Vec::new();
    for (i, part) in list.iter().enumerate() {
        match part.as_str() {
            Some(part) if i == 0 => tokens.extend(text.encode(&part)?),
            Some(part) => tokens.extend(text.encode_continuation(&part)?),
            None => {
                let id = part.as_integer().and_then(|id| u32::try_from(id).ok());
                let id = id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < vocab));
                tokens.push(id.ok_or_else(wrong)?);
            }
        }
    }
    Ok(RawPrompt::Tokens(tokens))
}

/// Limits by lines: the fields `n_indent` and `t_max_predict_ms`, which is none up to 0.
fn line_limits(fields: &Fields<'_>) -> Result<LineLimits, ApiError> {
    let time = fields.integer("t_max_predict_ms")?.and_then(|time| u64::try_from(time).ok());
    let time = time.filter(|time| *time > 0).map(Duration::from_millis);
    Ok(LineLimits { indent: fields.count("n_indent")?.unwrap_or(0), time })
}

/// Paths of the fields of the answer: the field `response_fields`; empty is all.
fn response_fields(fields: &Fields<'_>) -> Result<Option<Vec<String>>, ApiError> {
    let Some(list) = fields.list("response_fields")? else { return Ok(None) };
    let paths = list.iter().map(|path| Some(path.as_str()?.into_owned()));
    let paths: Option<Vec<String>> = paths.collect();
    let paths = paths.ok_or_else(|| wrong_type("response_fields", "a list of strings"))?;
    Ok((!paths.is_empty()).then_some(paths))
}

/// Settings of an answer, in the words of llama.cpp's server.
pub(super) fn settings(context: usize, request: &GenerateRequest) -> Map<String, Value> {
    let Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
        ..
    } = request.sampling;
    let limit = request.max_tokens.map_or(json!(-1), |limit| json!(limit));
    let settings = json!({
        "n_ctx": context, "n_predict": limit, "max_tokens": limit, "seed": seed,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repeat_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "stop": request.stop,
        "n_probs": request.logprobs.unwrap_or(0),
    });
    let Value::Object(settings) = settings else { return Map::new() };
    settings
}
