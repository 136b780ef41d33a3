//! Several models: switches by name, time to live, failures, turns of requests, the end.

use std::{
    io::Read,
    net::TcpStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use moeflux::serve::{ServingCore, ServingOptions};
use moeflux_server::{
    KeepAlive, LoadError, LoadedModel, ModelLoader, Models, ModelsError, OfferedModel,
    ServerOptions, StartModel,
};
use serde_json::{Value, json};

use crate::{
    RunningServer,
    client::{Reply, chat, get, post, receive, send, send_chat},
    engine, wait_until,
};

/// Loads the built-in model under each name. `absent` has wrong files, `broken` wrong weights, and
/// `slow` is loaded once the gate opens; `doomed` fails then.
#[derive(Clone, Default)]
struct TestLoader {
    /// Names in the order of loads.
    loads: Arc<Mutex<Vec<String>>>,
    gate: Arc<AtomicBool>,
}

impl ModelLoader for TestLoader {
    fn open(&mut self, model: &OfferedModel) -> Result<StartModel, LoadError> {
        let (name, loader) = (model.name.clone(), self.clone());
        if name == "absent" {
            return Err("its files are missing".into());
        }
        Ok(Box::new(move || {
            loader.loads.lock().unwrap().push(name.clone());
            while ["slow", "doomed"].contains(&&*name) && !loader.gate.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(2));
            }
            if ["broken", "doomed"].contains(&&*name) {
                return Err("its weights are damaged".into());
            }
            let engine = engine(&moeflux_tales::FILES, 1);
            Ok(LoadedModel::new(ServingCore::start(&engine, ServingOptions::default())?))
        }))
    }
}

impl TestLoader {
    fn serve(&self, names: &[&str]) -> RunningServer {
        let offered = names.iter().map(|name| {
            let model = OfferedModel::new(*name, "");
            model.aliases(vec![format!("{name}-alias")])
        });
        let models = Models::several(offered.collect(), self.clone()).unwrap();
        RunningServer::start(ServerOptions::default(), models)
    }

    fn loads(&self) -> Vec<String> {
        self.loads.lock().unwrap().clone()
    }

    fn open_gate(&self) {
        self.gate.store(true, Ordering::SeqCst);
    }
}

fn question(model: &str, more: Value) -> Value {
    let mut body = json!({
        "model": model, "temperature": 0, "max_tokens": 4,
        "messages": [{"role": "user", "content": "Hello"}],
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// State of each model in the list.
fn states(server: &RunningServer) -> Vec<String> {
    let list = get(server, "/v1/models").json();
    let state = |model: &Value| model["status"]["value"].as_str().unwrap().to_owned();
    list["data"].as_array().unwrap().iter().map(state).collect()
}

#[test]
fn a_request_names_its_model() {
    let loader = TestLoader::default();
    let server = loader.serve(&["a", "b"]);
    assert_eq!(states(&server), ["unloaded", "unloaded"]);
    assert_eq!(get(&server, "/api/ps").json()["models"], json!([]));
    assert_eq!(get(&server, "/moeflux/plan").json()["model"], json!(null));
    assert!(get(&server, "/metrics").body.contains("moeflux_requests_running 0"));
    assert_eq!(chat(&server, &question("", json!({}))).status, 404);
    for (asked, model) in [("a", "a"), ("a-alias", "a"), ("b:latest", "b"), ("a", "a")] {
        let reply = chat(&server, &question(asked, json!({})));
        assert_eq!((reply.status, &reply.json()["model"]), (200, &json!(model)), "{}", reply.body);
    }
    assert_eq!(loader.loads(), ["a", "b", "a"]);
    assert_eq!(states(&server), ["loaded", "unloaded"]);
    let mut unnamed = question("", json!({}));
    unnamed.as_object_mut().unwrap().remove("model");
    assert_eq!(chat(&server, &unnamed).json()["model"], "a");
    let embedding = post(&server, "/v1/embeddings", &json!({"model": "b", "input": "fox"}));
    assert_eq!(embedding.json()["model"], "b");
    let list = get(&server, "/v1/models").json();
    assert_eq!(list["data"][1]["context_length"], crate::CONTEXT);
    assert!(list["data"][0].get("context_length").is_none());
    let tags = get(&server, "/api/tags").json();
    assert_eq!(
        (&tags["models"][0]["name"], &tags["models"][1]["name"]),
        (&json!("a"), &json!("b"))
    );
    assert_eq!(get(&server, "/api/ps").json()["models"][0]["name"], "b");
    let shown = |name: &str| post(&server, "/api/show", &json!({"model": name})).json();
    assert!(shown("b")["template"].as_str().unwrap().contains("messages"));
    assert_eq!(shown("a")["capabilities"], json!(["completion"]));
    assert_eq!(get(&server, "/moeflux/plan").json()["model"], "b");
    assert!(get(&server, "/metrics").body.contains("moeflux_model_loads_total 4"));
    assert_eq!(get(&server, "/v1/models/a-alias").status, 200);
    assert_eq!(loader.loads(), ["a", "b", "a", "b"], "lists load nothing");
}

#[test]
fn an_unknown_model_is_an_error_in_the_shape_of_each_api() {
    let loader = TestLoader::default();
    let server = loader.serve(&["a", "b"]);
    let openai = chat(&server, &question("c", json!({"stream": true})));
    let error = &openai.json()["error"];
    assert_eq!((openai.status, &error["code"]), (404, &json!("model_not_found")));
    assert!(error["message"].as_str().unwrap().contains("the models are a, b"), "{error}");
    let anthropic = post(&server, "/v1/messages", &question("c", json!({})));
    let error = &anthropic.json()["error"];
    assert_eq!((anthropic.status, &error["type"]), (404, &json!("not_found_error")));
    let ollama = post(&server, "/api/chat", &question("c", json!({})));
    assert_eq!(ollama.status, 404);
    assert!(ollama.json()["error"].as_str().unwrap().contains("'c'"), "{}", ollama.body);
    assert_eq!(get(&server, "/v1/models/c").status, 404);
    assert!(loader.loads().is_empty());
    let same = |alias: &str| {
        let models = ["a", "b"].map(|name| OfferedModel::new(name, "").aliases(vec![alias.into()]));
        Models::several(models.into(), TestLoader::default())
    };
    assert!(matches!(same("a"), Err(ModelsError::Ambiguous { name }) if name == "a"));
    assert!(matches!(same("x"), Err(ModelsError::Ambiguous { name }) if name == "x"));
    let none = Models::several(Vec::new(), TestLoader::default());
    assert!(matches!(none, Err(ModelsError::Empty)));
}

#[test]
fn a_model_without_requests_is_unloaded_in_time() {
    let loader = TestLoader::default();
    let ttl = "50ms".parse::<KeepAlive>().unwrap().time();
    let offered = ["a", "b"].map(|name| OfferedModel::new(name, "").ttl(ttl));
    let models = Models::several(offered.into(), loader.clone()).unwrap();
    let server = RunningServer::start(ServerOptions::default(), models);
    assert_eq!(chat(&server, &question("a", json!({}))).status, 200);
    wait_until(|| states(&server) == ["unloaded", "unloaded"]);
    // Ollama's requests say how long the model stays.
    let ollama = |more: Value| post(&server, "/api/chat", &question("a", more));
    assert_eq!(ollama(json!({"keep_alive": -1, "stream": false})).status, 200);
    thread::sleep(Duration::from_millis(150));
    assert_eq!(states(&server), ["loaded", "unloaded"]);
    let expires = get(&server, "/api/ps").json()["models"][0]["expires_at"].clone();
    assert!(expires.as_str().unwrap().starts_with("9999"), "{expires}");
    assert_eq!(ollama(json!({"keep_alive": "soon"})).status, 400);
    let unload = ollama(json!({"messages": [], "keep_alive": 0})).json();
    assert_eq!((&unload["model"], &unload["done_reason"]), (&json!("a"), &json!("unload")));
    wait_until(|| states(&server) == ["unloaded", "unloaded"]);
    let load = ollama(json!({"messages": [], "keep_alive": "1h"})).json();
    assert_eq!(load["done_reason"], "load");
    assert_eq!(states(&server), ["loaded", "unloaded"]);
    // llama.cpp's router.
    let of_router = |path: &str, model: &str| post(&server, path, &json!({"model": model}));
    assert_eq!(of_router("/models/unload", "b").json(), json!({"success": true}));
    assert_eq!(of_router("/models/unload", "a").status, 200);
    wait_until(|| states(&server) == ["unloaded", "unloaded"]);
    assert_eq!(of_router("/models/load", "b").json(), json!({"success": true}));
    wait_until(|| loader.loads().ends_with(&["b".to_owned()]));
    assert_eq!(of_router("/models/load", "c").status, 404);
    assert_eq!(loader.loads(), ["a", "a", "a", "b"]);
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_the_others() {
    let loader = TestLoader::default();
    let server = loader.serve(&["a", "absent", "broken"]);
    let ask = |model: &str| chat(&server, &question(model, json!({"stream": true})));
    assert_eq!(ask("a").status, 200);
    let absent = ask("absent");
    let message = "the model absent cannot be loaded: its files are missing";
    assert_eq!((absent.status, &absent.json()["error"]["message"]), (500, &json!(message)));
    assert_eq!(states(&server)[0], "loaded");
    assert_eq!(ask("a").status, 200);
    assert_eq!(loader.loads(), ["a"], "it stayed loaded");
    let broken = ask("broken");
    assert_eq!((broken.status, broken.body.contains("its weights are damaged")), (500, true));
    let list = get(&server, "/v1/models").json();
    assert_eq!(list["data"][2]["status"], json!({"value": "unloaded", "failed": true}));
    assert_eq!(ask("a").text(), ask("a").text());
    assert_eq!(loader.loads(), ["a", "broken", "a"]);
}

#[test]
fn requests_for_two_models_take_turns() {
    let loader = TestLoader::default();
    let server = loader.serve(&["a", "b"]);
    // A long answer, which its client does not read to the end.
    let long = json!({"max_tokens": 1500, "stream": true, "ignore": 1, "temperature": 3});
    let long = send_chat(&server, &question("a", long));
    wait_until(|| states(&server)[0] == "loaded");
    let in_line = |model: &str, count: usize| {
        let stream = send_chat(&server, &question(model, json!({})));
        wait_until(|| {
            get(&server, "/metrics").body.contains(&format!("moeflux_requests_queued {count}"))
                || loader.loads().len() > 1
        });
        stream
    };
    let streams: Vec<TcpStream> =
        ["b", "a", "b", "a"].iter().zip(1..).map(|(model, count)| in_line(model, count)).collect();
    drop(long);
    let replies: Vec<Reply> = streams.into_iter().map(receive).collect();
    for (reply, model) in replies.iter().zip(["b", "a", "b", "a"]) {
        assert_eq!((reply.status, &reply.json()["model"]), (200, &json!(model)), "{}", reply.body);
    }
    // All requests in the line for a model are answered before the next switch.
    assert_eq!(loader.loads(), ["a", "b", "a"]);
    let texts = |i: usize| replies[i].json()["choices"][0]["message"]["content"].clone();
    assert_eq!(texts(0), texts(1));
    // Clients that come all the time for both.
    thread::scope(|scope| {
        for model in ["a", "b", "a", "b"] {
            let server = &server;
            scope.spawn(move || {
                for _ in 0..5 {
                    let reply = chat(server, &question(model, json!({})));
                    assert_eq!((reply.status, &reply.json()["model"]), (200, &json!(model)));
                }
            });
        }
    });
}

#[test]
fn streams_that_wait_for_a_model_have_pings() {
    let loader = TestLoader::default();
    let server = loader.serve(&["a", "slow", "doomed"]);
    let post = |path: &str, model: &str, more: Value| {
        let body = question(model, more).to_string();
        send(&server, &format!("POST {path}"), &[], body.as_bytes())
    };
    let streamed = || json!({"stream": true});
    let paths = ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"];
    let more = |path: &str| match path {
        "/v1/responses" => json!({"stream": true, "input": "Hello"}),
        _ => streamed(),
    };
    let waiting = paths.map(|path| post(path, "slow", more(path)));
    let whole = post(paths[0], "slow", json!({}));
    // The scheduler is to see the model that waits at the gate first.
    wait_until(|| states(&server)[1] == "loading");
    let doomed = post(paths[0], "doomed", streamed());
    let gone = post(paths[0], "a", streamed());
    thread::sleep(Duration::from_millis(4600));
    drop(gone);
    // Headers and pings are there before the model.
    let replies = waiting.map(|mut stream| {
        let mut start = [0; 512];
        let count = stream.read(&mut start).unwrap();
        let start = String::from_utf8_lossy(&start[..count]).into_owned();
        assert!(start.starts_with("HTTP/1.1 200 "), "{start}");
        (start, stream)
    });
    assert!(states(&server).contains(&"loading".to_owned()));
    loader.open_gate();
    for ((start, mut stream), path) in replies.into_iter().zip(paths) {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        let end = match path {
            "/v1/messages" => "message_stop",
            "/api/chat" => "\"done\":true",
            "/v1/responses" => "response.completed",
            _ => "[DONE]",
        };
        assert!(rest.contains(end), "{path}: {start}{rest}");
        let ping = if path == "/api/chat" { "\r\n1\r\n \r\n" } else { ": ping\n\n" };
        assert!((start + &rest).contains(ping), "{path}: {rest}");
    }
    assert_eq!(receive(whole).json()["model"], "slow");
    let doomed = receive(doomed);
    assert_eq!(doomed.status, 200, "its headers were sent");
    let error: Value = serde_json::from_str(doomed.events()[0]).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("its weights are damaged"), "{message}");
    assert_eq!(loader.loads(), ["slow", "doomed"], "no client waits for the other one");
}

#[test]
fn the_end_of_a_server_does_not_wait_for_a_load() {
    let loader = TestLoader::default();
    let mut server = loader.serve(&["a", "slow"]);
    let waiting = [json!({}), json!({"stream": true})]
        .map(|more| send_chat(&server, &question("slow", more)));
    wait_until(|| get(&server, "/metrics").body.contains("moeflux_requests_queued 2\n"));
    let since = Instant::now();
    server.end();
    assert!(since.elapsed() < Duration::from_secs(20));
    for stream in waiting {
        let reply = receive(stream);
        assert_eq!((reply.status, reply.body.contains("shutting down")), (503, true));
    }
    loader.open_gate();
}
