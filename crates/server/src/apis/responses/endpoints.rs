//! `/v1/responses`: create, retrieve, cancel and delete.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Path, Request, State},
    response::Response,
};
use moeflux::{ChatOptions, Message};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{
    encoder::{ID_PREFIX, ResponseEncoder, ResponseForm},
    input::{self, RequestTools, ToolNames},
    items::ResponseObject,
    store::{ResponseStore, RunningResponse, StoringEncoder},
};
use crate::{
    apis::openai::tools,
    requests::{
        app::App,
        ask::{self, Ask, AskPrompt, AskedReports, Conversation},
        form::AskedForm,
        generation::{self, FieldStyle},
        models::{ModelLease, ServedModel},
        prompt,
        respond::{self, Asked},
        unsupported::{self, RESPONSES, SERVERS},
    },
    transport::{
        error::ApiError,
        json::{self, Fields},
    },
};

/// Name of the limit of an answer.
const LIMIT: &str = "max_output_tokens";

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
    State(store): State<Arc<ResponseStore>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = move |model: &ModelLease, fields: &Fields<'_>| {
        let asked = ResponseAsk::parse(model, &store, fields)?;
        let ResponseAsk { ask, form, stored, request } = asked;
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
        Ok(Asked::new(ask, StoringEncoder::new(encoder, end, stored)).cancelled_by(cancelled))
    };
    respond::answer(&app, request, read).await
}

/// Answers `POST /v1/responses/input_tokens`: tokens of the prompt of a response.
///
/// # Errors
/// The request is wrong.
pub(crate) async fn input_tokens(
    State(app): State<Arc<App>>,
    State(store): State<Arc<ResponseStore>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = move |fields: &Fields<'_>| Ok(ResponsePrompt::parse(&store, fields)?.conversation);
    prompt::count_tokens(&app, request, Some("response.input_tokens"), read).await
}

/// Answers `GET /v1/responses/ID`.
///
/// # Errors
/// There is no such response.
pub(crate) async fn retrieve(
    State(store): State<Arc<ResponseStore>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json::text_response(store.get("response_id", &id)?.text.clone()))
}

/// Answers `DELETE /v1/responses/ID`.
///
/// # Errors
/// There is no such response.
pub(crate) async fn delete(
    State(store): State<Arc<ResponseStore>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    store.delete(&id)?;
    Ok(json::response(&json!({"id": id, "object": "response", "deleted": true})))
}

/// Answers `POST /v1/responses/ID/cancel`: ends a response that is being generated. One that has
/// ended stays as it is.
///
/// # Errors
/// There is no such response, or its client does not read it.
pub(crate) async fn cancel(
    State(store): State<Arc<ResponseStore>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let ended = timeout(CANCEL_TIME, store.cancel(&id)?).await;
    let text = ended.ok().and_then(Result::ok);
    let text = text.ok_or_else(|| ApiError::no_response("response_id", &id))?;
    Ok(json::text_response(text))
}

/// Conversation of a request for a response.
struct ResponsePrompt {
    conversation: Conversation,
    /// Its messages without the instructions.
    own: Vec<Message>,
    names: ToolNames,
    /// Whether the thoughts are summarised.
    has_summary: bool,
}

impl ResponsePrompt {
    /// Reads the conversation of a request.
    ///
    /// # Errors
    /// A field has a wrong type, or is not supported; the previous response is unknown.
    fn parse(store: &ResponseStore, fields: &Fields<'_>) -> Result<Self, ApiError> {
        unsupported::refuse(fields, &[&RESPONSES, &SERVERS])?;
        let text = fields.object("text")?.unwrap_or_default();
        let format = text.object("format")?;
        let form_of_text = format.map(|format| AskedForm::response_format(&format)).transpose()?;
        let previous = fields.text("previous_response_id")?;
        let previous = previous.map(|id| store.get("previous_response_id", &id));
        let previous = previous.transpose()?;
        let before = previous.as_ref().map(|previous| &previous.conversation);
        let RequestTools { set, names } = RequestTools::parse(fields)?;
        let messages = input::messages(fields, &names, before)?;
        let instructions = fields.text("instructions")?.map(Message::system);

        let reasoning = fields.object("reasoning")?.unwrap_or_default();
        let mut options = ask::chat_options(fields)?;
        ask::set_verbosity(&mut options, &text)?;
        set_effort(&mut options, reasoning.text("effort")?.as_deref());
        options.tools = set;
        let mut conversation = Conversation::new(messages, options);
        let own = conversation.messages.clone();
        conversation.messages.splice(0..0, instructions);
        conversation.calls = tools::allows_calls(fields)?;
        conversation.required = tools::required_calls(fields)?;
        conversation.form = form_of_text.flatten();
        conversation.overflow = ask::overflow(fields)?;
        let summary = reasoning.text("summary")?.or(reasoning.text("generate_summary")?);
        Ok(Self { conversation, own, names, has_summary: summary.is_some() })
    }
}

/// A request for a response.
struct ResponseAsk {
    ask: Ask,
    form: ResponseForm,
    /// Messages without the instructions, if the response is to be stored.
    stored: Option<Vec<Message>>,
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
        let ResponsePrompt { conversation, own, names, has_summary } =
            ResponsePrompt::parse(store, fields)?;
        let is_stored = fields.flag("store")?.unwrap_or(true);
        let include = fields.list("include")?.unwrap_or_default();
        let includes =
            |name: &str| include.iter().any(|value| value.as_str().as_deref() == Some(name));
        let top_logprobs = generation::top_logprobs(fields, "top_logprobs")?;
        let form = ResponseForm { summary: has_summary, encrypted: includes(ENCRYPTED), names };
        let request = generation::request(model, fields, FieldStyle::OpenAi, &[LIMIT])?
            .logprobs(includes(LOGPROBS).then_some(top_logprobs.unwrap_or(0)));
        let ask = Ask {
            prompt: AskPrompt::Conversation(conversation),
            request,
            choices: 1,
            one_call: !fields.flag("parallel_tool_calls")?.unwrap_or(true),
            reports: AskedReports::default(),
        };
        let stored = is_stored.then_some(own);
        Ok(Self { ask, form, stored, request: repeated(fields)? })
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
