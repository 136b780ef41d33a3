//! Paths of the server and their handlers.

use std::{
    fmt::Write,
    future::poll_fn,
    hash::{BuildHasher, Hasher, RandomState},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    body::{Body, HttpBody},
    extract::{Request, State},
    http::{HeaderValue, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use moeflux::{
    GenerateRequest,
    serve::{RequestEvent, RequestHandle, ServingCore},
    text::{AnswerText, ToolSet},
};
use serde_json::{Value, json};
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, Receiver},
    },
    task::spawn_blocking,
    time::timeout,
};

use crate::{
    answer::{AnswerDeltas, ChannelSink, UNREAD, is_last},
    ask::ChatAsk,
    chat::{AnswerHead, ChatCompletion, ChatEncoder},
    error::ApiError,
    guard::Guard,
    json::{self, Fields, wrong_type},
    messages,
    prompt::{self, ChatPrompt},
    stream,
};

/// Largest body in bytes.
const BODY_BYTES: usize = 32 << 20;

/// Most bytes of bodies that are being received and parsed at once.
const BODIES_BYTES: usize = 256 << 20;

/// Time in which a body must arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// State of the server.
pub(crate) struct App {
    core: ServingCore,
    guard: Guard,
    /// Name of the model in answers.
    model: String,
    /// Start of the server, in seconds since 1970.
    created: u64,
    /// Start of the ids of answers: random, as clients may keep ids of several servers.
    id_prefix: u64,
    answers: AtomicU64,
    /// Bytes that bodies may still take.
    body_room: Arc<Semaphore>,
}

/// A body. Its bytes are free again once it is dropped.
struct ReceivedBody {
    bytes: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

/// A request that the serving core accepted. Dropping it cancels the request.
pub(crate) struct Accepted {
    pub(crate) events: Receiver<RequestEvent>,
    pub(crate) deltas: AnswerDeltas,
    _handle: RequestHandle,
}

impl App {
    pub(crate) fn new(core: ServingCore, guard: Guard, model: String) -> Self {
        let id_prefix = RandomState::new().build_hasher().finish();
        let body_room = Arc::new(Semaphore::new(BODIES_BYTES));
        let answers = AtomicU64::new(0);
        Self { core, guard, model, created: now(), id_prefix, answers, body_room }
    }

    /// Submits a prompt.
    ///
    /// # Errors
    /// The waiting line is full, or the server stops.
    fn submit(&self, prompt: ChatPrompt, request: GenerateRequest) -> Result<Accepted, ApiError> {
        let text = self.core.engine().text()?;
        let parser = text.parser(&prompt.tokens, &ToolSet::default())?;
        let answer_text = AnswerText::new(parser, request.stop.clone())?;
        let deltas = AnswerDeltas::new(answer_text, text.end().clone(), prompt.tokens.len());
        let (sink, events) = mpsc::channel(UNREAD);
        let request = request.ends(prompt.ends);
        let handle = self.core.submit(prompt.tokens, request, Box::new(ChannelSink(sink)))?;
        Ok(Accepted { events, deltas, _handle: handle })
    }

    fn head(&self) -> AnswerHead {
        let number = self.answers.fetch_add(1, Ordering::Relaxed);
        let id = format!("chatcmpl-{:016x}{number:08x}", self.id_prefix);
        AnswerHead { id, created: now(), model: self.model.clone() }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// All paths. Those of OpenAI's API work with and without `/v1`, as base URLs differ.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/apply-template", post(apply_template))
        .fallback(|| async { ApiError::no_route() })
        .method_not_allowed_fallback(|| async { ApiError::no_method() })
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guarded))
        .with_state(app)
}

async fn guarded(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.guard.check(request.method(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Receives a body, within the limits of size and time.
async fn receive(app: &App, mut body: Body) -> Result<ReceivedBody, ApiError> {
    let receive = async {
        let (mut bytes, mut room) = (Vec::new(), None::<OwnedSemaphorePermit>);
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let frame = frame.map_err(|e| ApiError::body(format!("the body ends early: {e}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > BODY_BYTES {
                return Err(ApiError::too_large(BODY_BYTES));
            }
            let more = u32::try_from(data.len()).unwrap_or(u32::MAX);
            let more = Arc::clone(&app.body_room).try_acquire_many_owned(more);
            let more = more.map_err(|_| ApiError::overloaded())?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            bytes.extend_from_slice(&data);
        }
        Ok(ReceivedBody { bytes, _room: room })
    };
    timeout(BODY_TIME, receive).await.unwrap_or_else(|_| Err(ApiError::too_slow()))
}

/// Reads a body and computes with it, off the threads that wait for clients.
async fn with_body<T: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    compute: impl FnOnce(&App, &Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let body = receive(app, request.into_body()).await?;
    let app = Arc::clone(app);
    let computed = spawn_blocking(move || compute(&app, &json::parse(&body.bytes)?)).await;
    computed.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let parse = |app: &App, body: &Value| {
        let engine = app.core.engine();
        let ask = ChatAsk::parse(body, &engine.text()?.generation()?.sampling)?;
        let prompt = prompt::chat(engine, &ask.messages)?;
        Ok((ask, prompt))
    };
    let (ask, prompt) = with_body(&app, request, parse).await?;
    let answer = app.submit(prompt, ask.request)?;
    // A whole answer always has its usage.
    let encoder = ChatEncoder::new(app.head(), ask.include_usage || !ask.stream);
    match ask.stream {
        true => Ok(stream::response(answer, encoder)),
        false => Ok(json::response(&whole(answer, &encoder).await?)),
    }
}

/// The whole answer. Dropped with the connection, which cancels the request.
async fn whole(mut answer: Accepted, encoder: &ChatEncoder) -> Result<ChatCompletion, ApiError> {
    let mut completion = ChatCompletion::new(encoder.start());
    loop {
        let event = answer.events.recv().await;
        let is_last = is_last(event.as_ref());
        for delta in answer.deltas.on(event)? {
            encoder.on(delta).into_iter().for_each(|chunk| completion.add(chunk));
        }
        if is_last {
            return Ok(completion);
        }
    }
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let model = json!({
        "id": app.model, "object": "model", "created": app.created, "owned_by": "moeflux",
    });
    json::response(&json!({"object": "list", "data": [model]}))
}

async fn health() -> Response {
    json::response(&json!({"status": "ok"}))
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let tokens = with_body(&app, request, |app, body| {
        let fields = Fields::of_body(body)?;
        let content = fields.text("content")?.ok_or_else(|| fields.missing("content"))?;
        let add_special = fields.flag("add_special")?.unwrap_or(false);
        Ok(app.core.engine().text()?.tokenizer().encode(content, add_special)?)
    });
    Ok(json::response(&json!({"tokens": tokens.await?})))
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let content = with_body(&app, request, |app, body| {
        let fields = Fields::of_body(body)?;
        let list = fields.list("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
        let tokenizer = app.core.engine().text()?.tokenizer();
        let id = |value: &Value| {
            let id = u32::try_from(value.as_u64()?).ok()?;
            (usize::try_from(id).ok()? < tokenizer.vocab_size()).then_some(id)
        };
        let tokens: Option<Vec<u32>> = list.iter().map(id).collect();
        let expected = format!("a list of token ids below {}", tokenizer.vocab_size());
        let tokens = tokens.ok_or_else(|| wrong_type("tokens", &expected))?;
        Ok(tokenizer.decode(&tokens, false)?)
    });
    Ok(json::response(&json!({"content": content.await?})))
}

async fn apply_template(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let prompt = with_body(&app, request, |app, body| {
        let messages = messages::parse(&Fields::of_body(body)?)?;
        prompt::render(app.core.engine().text()?, &messages)
    });
    Ok(json::response(&json!({"prompt": prompt.await?})))
}

/// Statistics in the text format of Prometheus.
async fn metrics(State(app): State<Arc<App>>) -> Response {
    let stats = app.core.stats();
    let steps = &stats.steps;
    let gauges = [("requests_running", stats.running), ("requests_queued", stats.waiting)];
    let counters = [
        ("requests_ended_total", stats.ended),
        ("prompt_tokens_total", stats.prompt_tokens),
        ("cached_tokens_total", stats.reused_tokens),
        ("generated_tokens_total", stats.generated_tokens),
        ("experts_needed_total", steps.experts_needed),
        ("experts_hit_total", steps.experts_hit),
        ("expert_bytes_read_total", steps.bytes_read),
    ];
    let gauges = gauges.map(|(name, value)| (name, "gauge", value as f64));
    let counters = counters.map(|(name, value)| (name, "counter", value as f64));
    let stalled = ("stalled_seconds_total", "counter", steps.stalled_ns as f64 / 1e9);
    let mut text = String::new();
    for (name, kind, value) in gauges.into_iter().chain(counters).chain([stalled]) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# TYPE moeflux_{name} {kind}\nmoeflux_{name} {value}");
    }
    let mut response = Response::new(Body::from(text));
    let prometheus = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, prometheus);
    response
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Instant};

    use moeflux::{
        Checkpoint, Engine, EngineOptions, MemoryRequest, runtime::DeviceOptions,
        serve::ServingOptions,
    };

    use super::*;
    use crate::guard::ApiKeys;

    /// Tokens of the answer: more than a client that does not read can have.
    const TOKENS: usize = 2 * UNREAD;

    fn app() -> Arc<App> {
        let memory = MemoryRequest::default().sessions(2).context(4 * UNREAD);
        let device = DeviceOptions::default().name("cpu").threads(1).exact(true);
        let options = EngineOptions::default().memory(memory).device(device);
        let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        let host = Ipv4Addr::LOCALHOST.into();
        let guard = Guard::new(host, ApiKeys::default(), false, &[]).unwrap();
        Arc::new(App::new(core, guard, "tales".to_owned()))
    }

    async fn ask(app: &Arc<App>, stream: bool) -> String {
        read(send(app, stream).await).await
    }

    async fn send(app: &Arc<App>, stream: bool) -> Body {
        let body = json!({
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 3, "seed": 2, "max_tokens": TOKENS, "stream": stream,
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
            while app.core.stats().generated_tokens < UNREAD as u64 - 8 {
                assert!(since.elapsed() < Duration::from_secs(60), "{:?}", app.core.stats());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let before = app.core.stats().generated_tokens;
            // Another answer is complete meanwhile; its tokens are the only ones.
            let whole: Value = serde_json::from_str(&ask(&app, false).await).unwrap();
            let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
            assert!(tokens > UNREAD as u64 + 32, "the answer is too short: {tokens}");
            let stats = app.core.stats();
            assert!(stats.generated_tokens <= before + tokens + 16, "{stats:?}");
            assert!(stats.running > 0, "{stats:?}");
            // The slow one is complete once it reads.
            let whole = whole["choices"][0]["message"]["content"].as_str().unwrap();
            assert_eq!(text(&read(slow).await), whole);
        });
    }
}
