//! The router in memory: without a socket, and on a runtime of the test.

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request},
};
use moeflux::serve::{ServingCore, ServingOptions};
use moeflux_server::{ApiKeys, LoadedModel, Models, ServerOptions, ServerRouter};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

use crate::engine;

/// Largest response of the test in bytes.
const RESPONSE_BYTES: usize = 1 << 20;

/// A router of the built-in model, and the runtime on which it is called.
struct InMemory {
    server: ServerRouter,
    runtime: Runtime,
}

/// A response whose body was read.
struct Received {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Received {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

impl InMemory {
    fn new(options: &ServerOptions) -> Self {
        let engine = engine(&moeflux_tales::FILES, 1);
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        let models = Models::one("tales", LoadedModel::new(core)).unwrap();
        let server = ServerRouter::new(options, models).unwrap();
        // Without sockets and signals.
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        Self { server, runtime }
    }

    fn call(&self, request: Request<Body>) -> Received {
        let router: Router = self.server.router();
        self.runtime.block_on(async {
            let (parts, body) = router.oneshot(request).await.unwrap().into_parts();
            let body = to_bytes(body, RESPONSE_BYTES).await.unwrap();
            let body = String::from_utf8(body.to_vec()).unwrap();
            Received { status: parts.status.as_u16(), headers: parts.headers, body }
        })
    }

    fn get(&self, path: &str) -> Received {
        self.call(Request::get(path).header("host", "localhost").body(Body::empty()).unwrap())
    }

    fn post(&self, path: &str, body: &Value) -> Received {
        let body = Body::from(body.to_string());
        self.call(Request::post(path).header("host", "localhost").body(body).unwrap())
    }
}

#[test]
fn requests_are_answered_without_a_socket() {
    let memory = InMemory::new(&ServerOptions::default());
    for path in ["/health", "/v1/health", "//v1/health/"] {
        let health = memory.get(path);
        assert_eq!((health.status, &*health.body), (200, r#"{"status":"ok"}"#), "{path}");
        assert!(health.headers.contains_key("x-request-id"));
    }
    let models = memory.get("/v1/models");
    assert_eq!((models.status, &models.json()["data"][0]["id"]), (200, &json!("tales")));

    let question = json!({
        "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4,
    });
    let whole = memory.post("/v1/chat/completions", &question);
    assert_eq!(whole.status, 200, "{}", whole.body);
    let answer = &whole.json()["choices"][0]["message"]["content"];
    assert!(answer.as_str().is_some_and(|text| !text.is_empty()), "{}", whole.body);
    let mut stream = question;
    stream["stream"] = true.into();
    let stream = memory.post("/v1/chat/completions", &stream);
    assert!(stream.body.ends_with("data: [DONE]\n\n"), "{}", stream.body);

    let unknown = memory.get("/v1/nowhere");
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("not_found")));
    let metrics = memory.get("/metrics").body;
    for (api, code, count) in
        [("/health", 200, 3), ("/chat/completions", 200, 2), ("other", 404, 1)]
    {
        let line = format!("moeflux_requests_total{{api=\"{api}\",code=\"{code}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }

    memory.server.stop();
    let question = json!({"messages": [{"role": "user", "content": "Hello"}]});
    assert_eq!(memory.post("/v1/chat/completions", &question).status, 503);
    memory.server.end();
}

#[test]
fn a_router_checks_hosts_and_keys() {
    let memory = InMemory::new(&ServerOptions::default());
    let request = Request::get("/v1/models").header("host", "evil.example");
    assert_eq!(memory.call(request.body(Body::empty()).unwrap()).status, 403);

    let mut options = ServerOptions::default();
    options.keys = ApiKeys::from_lines("secret");
    let memory = InMemory::new(&options);
    assert_eq!(memory.get("/health").status, 200);
    assert_eq!(memory.get("/page/app.js").status, 200);
    assert_eq!(memory.get("/v1/models").status, 401);
    let request = Request::get("/v1/models").header("x-api-key", "secret");
    assert_eq!(memory.call(request.body(Body::empty()).unwrap()).status, 200);
}

#[test]
fn a_shared_core_goes_on_after_its_router() {
    for is_shared in [true, false] {
        let engine = engine(&moeflux_tales::FILES, 1);
        let core = ServingCore::start(&engine, ServingOptions::default()).unwrap();
        let loaded = LoadedModel::new(core.clone()).shared(is_shared);
        let models = Models::one("tales", loaded).unwrap();
        let server = ServerRouter::new(&ServerOptions::default(), models).unwrap();
        server.end();
        assert_eq!(core.is_stopping(), !is_shared);
        core.join();
    }
}
