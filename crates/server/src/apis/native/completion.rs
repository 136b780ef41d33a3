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
        content::Content,
        form::AskedForm,
        generation::{self, FieldStyle, MAX_CHOICES},
        images::ImageTable,
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

/// Place of an image in a text.
const MEDIA_MARK: &str = "<__media__>";

/// Answers a request.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| {
        let mut images = ImageTable::default();
        let prompts = prompts(model, fields, &mut images)?;
        asked(model, fields, NativePrompts { prompts, images, ends: Vec::new() })
    };
    respond::answer(&app, request, read).await
}

/// Prompts of a request.
pub(super) struct NativePrompts {
    pub(super) prompts: Vec<RawPrompt>,
    pub(super) images: ImageTable,
    /// Tokens that end the answers, besides the model's own.
    pub(super) ends: Vec<u32>,
}

/// A request with these prompts.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(super) fn asked(
    model: &ServedModel,
    fields: &Fields<'_>,
    prompts: NativePrompts,
) -> Result<Asked<NativeEncoder>, ApiError> {
    unsupported::refuse(fields, &[&NATIVE])?;
    let probabilities = generation::top_logprobs(fields, "n_probs")?.filter(|count| *count > 0);
    let mut request =
        generation::request(model, fields, FieldStyle::LlamaCpp, &LIMITS)?.logprobs(probabilities);
    let NativePrompts { prompts, images, ends } = prompts;
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
    let prompt = AskPrompt::Raw { prompts, images, echo: false, form, lines };
    Ok(Asked::new(Ask { prompt, request, choices, one_call: false, reports }, encoder))
}

/// Prompts of a request: a text, a text with images, token ids, a mix of texts and ids, or a list
/// of these.
fn prompts(
    model: &ServedModel,
    fields: &Fields<'_>,
    images: &mut ImageTable,
) -> Result<Vec<RawPrompt>, ApiError> {
    let value = fields.get("prompt").ok_or_else(|| fields.missing("prompt"))?;
    let mut prompt = |value: Json<'_>, path: &str| match value.is_object() {
        true => media(&Fields::at(value, path)?, images),
        false => prompt(model, value, path),
    };
    let Some(list) = value.as_list() else { return Ok(vec![prompt(value, "prompt")?]) };
    if list.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt is empty"));
    }
    let is_mixed = list.iter().any(Json::is_number) && !list.iter().any(Json::is_list);
    if is_mixed {
        return Ok(vec![prompt(value, "prompt")?]);
    }
    let prompt = |(i, value): (usize, Json<'_>)| prompt(value, &format!("prompt[{i}]"));
    list.iter().take(MAX_CHOICES + 1).enumerate().map(prompt).collect()
}

/// A text with images in place of its marks.
fn media(fields: &Fields<'_>, images: &mut ImageTable) -> Result<RawPrompt, ApiError> {
    let text = fields.text("prompt_string")?.ok_or_else(|| fields.missing("prompt_string"))?;
    let path = fields.path("multimodal_data");
    let mut data = fields.list("multimodal_data")?.unwrap_or_default().iter();
    let mut content = Content::default();
    for (i, part) in text.split(MEDIA_MARK).enumerate() {
        if i > 0 {
            let wrong = || format!("{path} has fewer images than the text has marks {MEDIA_MARK}");
            let image = data.next().ok_or_else(|| ApiError::invalid(&path, wrong()))?;
            content.push_image(images.add_base64(image, &format!("{path}[{}]", i - 1))?);
        }
        content.push_text("", part);
    }
    if data.next().is_some() {
        let message = format!("{path} has more images than the text has marks {MEDIA_MARK}");
        return Err(ApiError::invalid(path, message));
    }
    Ok(RawPrompt::Media(content))
}

/// A text, or a list of token ids and texts. Only a text at the start begins like others.
fn prompt(model: &ServedModel, value: Json<'_>, path: &str) -> Result<RawPrompt, ApiError> {
    let wrong = || wrong_type(path, "a string, a list of token ids and strings, or an object");
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::{
        ask::MessageList,
        seen_images::{seen_images, with_fields},
    };

    #[test]
    fn images_are_in_place_of_marks() {
        let text = "é<__media__><__media__>b<__media__>";
        let prompt = json!({"prompt_string": text, "multimodal_data": ["b25l", "dHdv", "b25l"]});
        let list = with_fields(&prompt, |fields| {
            let mut list = MessageList::default();
            let RawPrompt::Media(content) = media(fields, &mut list.images).unwrap() else {
                panic!("no text with images")
            };
            assert_eq!(content.text, "éb");
            list.push(content.into_message("user", "").unwrap(), "").unwrap();
            list
        });
        assert_eq!(
            seen_images(list),
            ["0 user 2 one Auto", "0 user 2 two Auto", "0 user 3 one Auto"]
        );
    }
}
