//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};

use super::{chat_encoder::ChatEncoder, messages, tools};
use crate::{
    requests::{
        app::App,
        ask::{self, Ask, AskPrompt, AskedReports, Conversation},
        form::AskedForm,
        generation::{self, FieldStyle},
        models::{ModelLease, ServedModel},
        prompt,
        respond::{self, Asked, Encoder},
        unsupported::{self, CHAT, SERVERS},
    },
    transport::{error::ApiError, json::Fields},
};

/// Names of the limit of an answer.
const LIMITS: [&str; 3] = ["max_tokens", "max_completion_tokens", "n_predict"];

/// Answers a request for a chat completion.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| read(model, fields);
    respond::answer(&app, request, read).await
}

/// Answers `POST /v1/chat/completions/input_tokens`: tokens of a prompt.
///
/// # Errors
/// The request is wrong.
pub(crate) async fn input_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    prompt::count_tokens(&app, request, None, conversation).await
}

/// Reads a request.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
fn read(model: &ServedModel, fields: &Fields<'_>) -> Result<Asked<ChatEncoder>, ApiError> {
    unsupported::refuse(fields, &[&CHAT, &SERVERS])?;
    let request = generation::request(model, fields, FieldStyle::OpenAi, &LIMITS)?
        .logprobs(generation::logprobs(fields)?);
    let ask = Ask {
        prompt: AskPrompt::Conversation(conversation(fields)?),
        request,
        choices: generation::choices(fields, &["n", "n_cmpl"])?,
        one_call: !fields.flag("parallel_tool_calls")?.unwrap_or(true),
        reports: AskedReports::parse(fields)?,
    };
    let include_usage = include_usage::<ChatEncoder>(fields)?;
    let is_verbose = fields.flag("verbose")?.unwrap_or(false);
    let encoder = ChatEncoder::new(model.head("chatcmpl-"), ask.choices, include_usage)
        .reports(ask.reports, is_verbose);
    Ok(Asked::new(ask, encoder))
}

/// Whether an answer has its usage: a whole one, or a stream that is asked for it.
///
/// # Errors
/// A field has a wrong type.
pub(super) fn include_usage<E: Encoder>(fields: &Fields<'_>) -> Result<bool, ApiError> {
    let options = fields.object("stream_options")?;
    let asked = options.map(|options| options.flag("include_usage")).transpose()?;
    Ok(!respond::is_stream::<E>(fields)? || asked.flatten().unwrap_or(false))
}

/// Messages and template variables of a request.
///
/// # Errors
/// A field has a wrong type, or is not supported.
pub(crate) fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let mut options = ask::chat_options(fields)?;
    options.tools = tools::parse(fields)?;
    let mut conversation = Conversation::new(messages::parse(fields)?, options);
    conversation.calls = tools::allows_calls(fields)?;
    conversation.required = tools::required_calls(fields)?;
    conversation.form = AskedForm::openai(fields)?;
    conversation.overflow = ask::overflow(fields)?;
    conversation.thinking_budget = ask::thinking_budget(fields)?;
    let adds_prompt = fields.flag(ask::ADD_PROMPT)?;
    conversation.continues &= adds_prompt != Some(true);
    if let Some(continues) = fields.flag("continue_final_message")? {
        if continues && adds_prompt == Some(true) {
            let message = "add_generation_prompt and continue_final_message exclude each other";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        conversation.continues = continues;
    }
    // A continued answer needs its start.
    if adds_prompt == Some(false) && !conversation.continues {
        conversation.options.variables.insert(ask::ADD_PROMPT.to_owned(), false.into());
    }
    Ok(conversation)
}

#[cfg(test)]
mod tests {
    use std::{
        future::poll_fn,
        pin::Pin,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::{
        requests::{
            answer::UNREAD,
            image_fetches::{ImageFetcher, ImageFetches},
            models::{AnswerOptions, LoadedModel, Models, start_registry},
        },
        transport::body::{BodyReader, RequestMemory},
    };
    use axum::body::{Body, HttpBody};
    use moeflux::{
        Checkpoint, Engine, EngineOptions, MemoryRequest,
        runtime::DeviceOptions,
        serve::{ServingCore, ServingOptions, ServingStats},
    };
    use serde_json::{Value, json};

    /// Tokens of the answer: more than a client that does not read can have.
    const TOKENS: usize = 2 * UNREAD;

    fn app() -> Arc<App> {
        let memory = MemoryRequest::default().sessions(2).context(4 * UNREAD);
        let device = DeviceOptions::default().name("cpu").threads(1).exact(true);
        let options = EngineOptions::default().memory(memory).device(device);
        let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        let models = Models::one("tales", LoadedModel::new(core)).unwrap();
        let models = start_registry(models, AnswerOptions::default()).unwrap();
        let memory = RequestMemory { bytes: 64 << 20, give_back: || {} };
        Arc::new(App::new(
            models,
            BodyReader::new(memory),
            ImageFetches::new(ImageFetcher::default()),
        ))
    }

    fn stats(app: &App) -> ServingStats {
        app.models.with_current(|model| model.unwrap().core.stats())
    }

    async fn ask(app: &Arc<App>, stream: bool) -> String {
        read(send(app, stream).await).await
    }

    async fn send(app: &Arc<App>, stream: bool) -> Body {
        // Only the limit ends the answer.
        let end = app
            .models
            .with_current(|model| model.unwrap().core.engine().end_tokens().ids().to_vec());
        let body = json!({
            "messages": [{"role": "user", "content": "Hello"}], "temperature": 3, "seed": 2,
            "logit_bias": end.iter().map(|id| json!([id, -100])).collect::<Vec<_>>(),
            "max_tokens": TOKENS, "stream": stream,
        });
        let request = Request::new(Body::from(body.to_string()));
        chat(State(Arc::clone(app)), request).await.unwrap().into_body()
    }

    async fn read(mut body: Body) -> String {
        let mut text = Vec::new();
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            text.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        String::from_utf8(text).unwrap()
    }

    /// Text of a stream.
    fn text(events: &str) -> String {
        let data = events.lines().filter_map(|line| line.strip_prefix("data: {"));
        let chunks = data.map(|rest| serde_json::from_str::<Value>(&format!("{{{rest}")).unwrap());
        let text = chunks
            .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()));
        text.collect()
    }

    #[test]
    fn a_client_that_does_not_read_pauses_its_own_answer() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let app = app();
            let slow = send(&app, true).await;
            // The channel fills with tokens; the first events are the start and the prompt's.
            let since = Instant::now();
            while stats(&app).generated_tokens < UNREAD as u64 - 8 {
                assert!(since.elapsed() < Duration::from_secs(60), "{:?}", stats(&app));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let before = stats(&app).generated_tokens;
            // Another answer is complete meanwhile; its tokens are the only ones.
            let whole: Value = serde_json::from_str(&ask(&app, false).await).unwrap();
            let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
            assert!(tokens > UNREAD as u64 + 32, "the answer is too short: {tokens}");
            let stats = stats(&app);
            assert!(stats.generated_tokens <= before + tokens + 16, "{stats:?}");
            assert!(stats.running > 0, "{stats:?}");
            // The slow one is complete once it reads.
            let whole = whole["choices"][0]["message"]["content"].as_str().unwrap();
            assert_eq!(text(&read(slow).await), whole);
        });
    }

    #[test]
    fn a_silent_stream_has_pings_by_the_clock() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let app = app();
            // Clients that do not read keep all sessions.
            let slow = [send(&app, true).await, send(&app, true).await];
            while stats(&app).running < 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let mut waits = send(&app, true).await;
            let since = Instant::now();
            let frame = poll_fn(|cx| Pin::new(&mut waits).poll_frame(cx)).await;
            assert_eq!(frame.unwrap().unwrap().into_data().unwrap(), ": ping\n\n".as_bytes());
            assert!(since.elapsed() > Duration::from_secs(2));
            drop(slow);
            assert!(read(waits).await.ends_with("data: [DONE]\n\n"));
        });
    }
}
