//! OpenAI's API of responses: `/v1/responses`.

mod encoder;
mod input;
mod items;
mod store;

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Path, Request, State},
    response::Response,
};
use moeflux::{ChatOptions, GenerateRequest, Message};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use crate::{
    app::App,
    ask::{self, Ask, AskPrompt, AskedReports, Conversation},
    error::ApiError,
    form::AskedForm,
    json::{self, Fields},
    models::{ModelLease, ServedModel},
    openai::{chat::refuse_unsupported, tools},
    respond::{self, Asked},
};
use encoder::{ID_PREFIX, ResponseEncoder, ResponseForm};
use input::RequestTools;
use items::ResponseObject;
use store::{RunningResponse, StoringEncoder};

pub(crate) use store::{RESPONSES_BYTES, ResponseStore};

/// Fields that would change the answer and are not supported, with the values that have no effect.
const UNSUPPORTED: [(&str, &[&str]); 3] =
    [("background", &["false"]), ("conversation", &[]), ("prompt", &[])];

/// Time in which a response that is cancelled must end.
const CANCEL_TIME: Duration = Duration::from_secs(5);

/// Values of `include` that have an effect.
const ENCRYPTED: &str = "reasoning.encrypted_content";
const LOGPROBS: &str = "message.output_text.logprobs";

/// Answers `POST /v1/responses`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let store = Arc::clone(&app.responses);
    let read = move |model: &ModelLease, fields: &Fields<'_>| {
        let asked = ResponseAsk::parse(model, &store, fields)?;
        let ResponseAsk { ask, form, messages, request } = asked;
        let head = model.head(ID_PREFIX);
        let response = ResponseObject {
            id: head.id,
            object: "response",
            created_at: head.created,
            model: head.model,
            request,
            ..ResponseObject::default()
        };
        let RunningResponse { end, cancelled } = store.run(&response.id);
        let encoder = ResponseEncoder::new(response, form);
        Ok(Asked::new(ask, StoringEncoder::new(encoder, end, messages)).cancelled_by(cancelled))
    };
    respond::answer(&app, request, read).await
}

/// Answers `GET /v1/responses/ID`.
///
/// # Errors
/// There is no such response.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json::text_response(app.responses.get("response_id", &id)?.text.clone()))
}

/// Answers `DELETE /v1/responses/ID`.
///
/// # Errors
/// There is no such response.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.responses.delete(&id)?;
    Ok(json::response(&json!({"id": id, "object": "response", "deleted": true})))
}

/// Answers `POST /v1/responses/ID/cancel`: ends a response that is being generated. One that has
/// ended stays as it is.
///
/// # Errors
/// There is no such response, or its client does not read it.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let ended = timeout(CANCEL_TIME, app.responses.cancel(&id)?).await;
    let text = ended.ok().and_then(Result::ok);
    let text = text.ok_or_else(|| ApiError::no_response("response_id", &id))?;
    Ok(json::text_response(text))
}

/// A request for a response.
struct ResponseAsk {
    ask: Ask,
    form: ResponseForm,
    /// Messages without the instructions, if the response is to be stored.
    messages: Option<Vec<Message>>,
    /// Fields that the response repeats.
    request: Map<String, Value>,
}

impl ResponseAsk {
    /// Reads a request.
    ///
    /// # Errors
    /// A field has a wrong type or range, or is not supported; the previous response is unknown.
    fn parse(
        model: &ServedModel,
        store: &ResponseStore,
        fields: &Fields<'_>,
    ) -> Result<Self, ApiError> {
        refuse_unsupported(fields, &UNSUPPORTED)?;
        let text = fields.object("text")?;
        let format = text.map(|text| text.object("format")).transpose()?.flatten();
        let form_of_text = format.map(|format| AskedForm::response_format(&format)).transpose()?;
        let previous = fields.text("previous_response_id")?;
        let previous = previous.map(|id| store.get("previous_response_id", &id));
        let previous = previous.transpose()?;
        let before = previous.as_ref().map_or(&[][..], |previous| &previous.messages);
        let RequestTools { set, names } = RequestTools::parse(fields)?;
        let messages = input::messages(fields, &names, before)?;
        let instructions = fields.text("instructions")?.map(Message::system);
        let is_stored = fields.flag("store")?.unwrap_or(true);

        let reasoning = fields.object("reasoning")?;
        let word = |name: &str| {
            let word = reasoning.as_ref().map(|reasoning| reasoning.text(name)).transpose()?;
            Ok::<_, ApiError>(word.flatten())
        };
        let mut options = ask::chat_options(fields)?;
        set_effort(&mut options, word("effort")?.as_deref());
        options.tools = set;
        let all = instructions.into_iter().chain(messages.iter().cloned()).collect();
        let mut conversation = Conversation::new(all, options);
        conversation.calls = tools::allows_calls(fields)?;
        conversation.required = tools::required_calls(fields)?;
        conversation.form = form_of_text.flatten();
        conversation.overflow = ask::overflow(fields)?;

        let include = fields.list("include")?.unwrap_or_default();
        let includes =
            |name: &str| include.iter().any(|value| value.as_str().as_deref() == Some(name));
        let top_logprobs = ask::top_logprobs(fields, "top_logprobs")?;
        let form = ResponseForm {
            summary: word("summary")?.or(word("generate_summary")?).is_some(),
            encrypted: includes(ENCRYPTED),
            names,
        };
        let request = GenerateRequest::default()
            .sampling(ask::sampling(fields, model.sampling()?)?)
            .logprobs(includes(LOGPROBS).then_some(top_logprobs.unwrap_or(0)))
            .max_tokens(fields.count("max_output_tokens")?);
        let ask = Ask {
            prompt: AskPrompt::Conversation(conversation),
            request,
            choices: 1,
            one_call: !fields.flag("parallel_tool_calls")?.unwrap_or(true),
            reports: AskedReports::default(),
        };
        let messages = is_stored.then_some(messages);
        Ok(Self { ask, form, messages, request: repeated(fields)? })
    }
}

/// Sets the effort of thoughts.
fn set_effort(options: &mut ChatOptions, effort: Option<&str>) {
    match effort {
        None => {}
        Some("none") => options.thinking = Some(false),
        Some(effort) => ask::set_effort(options, effort),
    }
}

/// Fields that a response repeats: those of the request, or their defaults.
///
/// # Errors
/// A field cannot be held in memory.
fn repeated(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let defaults = json!({
        "background": false, "instructions": null, "max_output_tokens": null,
        "max_tool_calls": null, "metadata": {}, "parallel_tool_calls": true,
        "previous_response_id": null, "prompt_cache_key": null,
        "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
        "service_tier": "default", "store": true, "temperature": null,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": null, "truncation": "disabled", "user": null,
    });
    let Value::Object(mut repeated) = defaults else { return Ok(Map::new()) };
    for (name, value) in &mut repeated {
        if let Some(given) = fields.value(name)? {
            *value = given;
        }
    }
    Ok(repeated)
}
