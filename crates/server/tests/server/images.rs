//! Images in requests of all APIs: refusals, and the places that they name.

use std::{
    fs,
    path::Path,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest, runtime::DeviceOptions, vision::ImageOptions,
};
use moeflux_server::{ImageFetcher, ServerOptions};
use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{Reply, get, post},
    wait_until,
};

/// A file, which a model without a vision tower does not look into.
const FILE: &str = "R0lGODlh";

fn data_url(data: &str) -> String {
    format!("data:image/gif;base64,{data}")
}

/// A request with an image, and the place of the image.
struct Place {
    path: &'static str,
    body: Value,
    place: &'static str,
}

/// A chat completion with these parts.
fn parts(parts: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
}

/// A chat completion with an image in the form `value`.
fn chat(value: &Value) -> Value {
    parts(&json!([{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": value}]))
}

/// Messages with an image from `source`.
fn block(source: &Value) -> Value {
    parts(&json!([{"type": "image", "source": source}]))
}

/// Requests with one image of base64 in every place that the APIs have.
fn places(data: &str) -> Vec<Place> {
    let url = data_url(data);
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let image = json!([{"type": "input_image", "image_url": url}]);
    let call = json!({"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "x", "output": image});
    let tool_use = json!({"type": "tool_use", "id": "x", "name": "f", "input": {}});
    let result = json!([{"type": "image", "source": source}]);
    let result = json!({"type": "tool_result", "tool_use_id": "x", "content": result});
    let results = json!([
        {"role": "assistant", "content": [tool_use]}, {"role": "user", "content": [result]},
    ]);
    let message = json!({"role": "user", "content": "Look:", "images": [data]});
    let media = json!({"prompt_string": "<__media__>?", "multimodal_data": [data]});
    let place = |path, place, body| Place { path, body, place };
    let chat_url = "messages[0].content[1].image_url.url";
    vec![
        place("/v1/chat/completions", chat_url, chat(&json!({"url": url}))),
        place("/v1/chat/completions", "messages[0].content[1].image_url", chat(&json!(url))),
        place("/v1/chat/completions/input_tokens", chat_url, chat(&json!({"url": url}))),
        place("/apply-template", chat_url, chat(&json!({"url": url}))),
        place(
            "/v1/responses",
            "input[0].content[0].image_url",
            json!({"input": [{"role": "user", "content": image}]}),
        ),
        place("/v1/responses", "input[1].output[0].image_url", json!({"input": [call, output]})),
        place("/v1/messages", "messages[0].content[0].source.data", block(&source)),
        place("/v1/messages/count_tokens", "messages[0].content[0].source.data", block(&source)),
        place(
            "/v1/messages",
            "messages[0].content[0].source.url",
            block(&json!({"type": "url", "url": url})),
        ),
        place(
            "/v1/messages",
            "messages[1].content[0].content[0].source.data",
            json!({"messages": results, "max_tokens": 1}),
        ),
        place("/api/chat", "messages[0].images[0]", json!({"messages": [message]})),
        place("/api/generate", "images[0]", json!({"images": [data]})),
        place("/completion", "prompt.multimodal_data[0]", json!({"prompt": media})),
        place("/completion", "prompt[1].multimodal_data[0]", json!({"prompt": ["x", media]})),
    ]
}

/// Checks the shape of a refusal with status 400, and returns its message.
fn refused(path: &str, reply: &Reply) -> String {
    let error = reply.json();
    assert_eq!(reply.status, 400, "{path}: {error}");
    let message = match path.starts_with("/api/") {
        true => &error["error"],
        false => &error["error"]["message"],
    };
    assert_eq!(error["type"] == "error", path.starts_with("/v1/messages"), "{path}: {error}");
    message.as_str().unwrap_or_else(|| panic!("{path}: {error}")).to_owned()
}

#[test]
fn a_model_without_a_tower_refuses_images_at_their_place() {
    let server = TestServer::start(1, 4, "");
    for Place { path, body, place } in places(FILE) {
        let message = refused(path, &post(&server, path, &body));
        let words = format!("{place}: this model reads text only: tales has no vision tower");
        assert_eq!(message, words, "{path}");
    }
    for Place { path, body, place } in places("R0lG-DlhAQ==") {
        let message = refused(path, &post(&server, path, &body));
        assert_eq!(message, format!("{place}: expected base64, got '-' at byte 4"), "{path}");
    }
    for Place { path, body, place } in places("") {
        let message = refused(path, &post(&server, path, &body));
        assert!(message.starts_with(&format!("{place}: expected an image of 1 to")), "{message}");
    }
    assert_eq!(get(&server, "/props").json()["modalities"]["vision"], false);
    let models = get(&server, "/v1/models").json();
    let capabilities = models["data"][0]["capabilities"].as_array().unwrap();
    assert!(capabilities[0] == "completion" && !capabilities.contains(&json!("vision")));
}

#[test]
fn other_addresses_and_places_are_refused() {
    let server = TestServer::start(1, 4, "");
    let secret = "//secret.example/x.png";
    let https = json!(format!("https:{secret}"));
    let chat_path = "/v1/chat/completions";
    let image = |url: &str| json!([{"type": "image_url", "image_url": url}]);
    let by_role = |role: &str| {
        let message = json!({"role": role, "content": image(&data_url(FILE))});
        json!({"messages": [message, {"role": "user", "content": "x"}]})
    };
    let part = |part: Value| parts(&json!([part]));
    let input = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    let system = json!([{"type": "image", "source": {"type": "url", "url": data_url(FILE)}}]);
    let mut with_system = parts(&json!("x"));
    with_system["system"] = system;
    let media = |text: &str, data: Value| {
        let prompt = json!({"prompt_string": text, "multimodal_data": data});
        json!({"prompt": prompt})
    };
    let role = "images are read in messages of users and results of tools, got one in a message of";
    for (path, body, words) in [
        (chat_path, chat(&https), "image_url: only data: URLs are read, got https: (send the"),
        (chat_path, chat(&https), "; --image-urls HOST allows https: addresses of HOST)"),
        (chat_path, chat(&json!(format!("http:{secret}"))), "URLs are read, got http: (send"),
        (chat_path, chat(&json!(format!("file:{secret}"))), "URLs are read, got file: (send"),
        (chat_path, chat(&json!("secret.png")), "URLs are read, got another address (send"),
        (chat_path, chat(&json!("data:image/png,x")), "got one without base64"),
        (chat_path, chat(&json!(7)), "messages[0].content[1].image_url must be a string"),
        (chat_path, chat(&json!({})), "messages[0].content[1].image_url.url is missing"),
        (chat_path, chat(&json!({"url": "data:", "detail": "tiny"})), "detail must be low, high"),
        (chat_path, part(json!({"type": "image_url"})), "content[0].image_url is missing"),
        (chat_path, part(json!({"type": "video_url"})), "only texts and images are read here"),
        (chat_path, part(json!({"type": "input_audio"})), "content[0].type is \"input_audio\""),
        (chat_path, by_role("system"), &format!("messages[0].content: {role} the role system")),
        (chat_path, by_role("assistant"), &format!("{role} the role assistant")),
        (
            "/v1/responses",
            input(json!({"type": "input_image", "file_id": "secret"})),
            "input[0].content[0].file_id: files are not stored: send the image as data:",
        ),
        (
            "/v1/responses",
            input(json!({"type": "input_image", "image_url": https})),
            "input[0].content[0].image_url: only data: URLs are read, got https:",
        ),
        ("/v1/responses", input(json!({"type": "input_file"})), "only texts and images are read"),
        (
            "/v1/messages",
            block(&json!({"type": "url", "url": https})),
            "messages[0].content[0].source.url: only data: URLs are read, got https:",
        ),
        (
            "/v1/messages",
            block(&json!({"type": "file", "file_id": "secret"})),
            "messages[0].content[0].source.type is \"file\": it must be base64 or url",
        ),
        ("/v1/messages", block(&json!({})), "messages[0].content[0].source.type is missing"),
        ("/v1/messages", part(json!({"type": "image"})), "messages[0].content[0].source is"),
        ("/v1/messages", part(json!({"type": "video"})), "only texts and images are read here"),
        ("/v1/messages", with_system, "system[0].type is \"image\": only texts are read here"),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "images": [7]}]}),
            "images[0] must be a",
        ),
        (
            "/api/chat",
            json!({"messages": [{"role": "system", "images": [FILE]}]}),
            &format!("messages[0].images: {role}"),
        ),
        ("/api/generate", json!({"images": FILE}), "images must be a list"),
        (
            "/api/generate",
            json!({"prompt": "x", "raw": true, "images": [FILE]}),
            "images: this value is not supported with raw",
        ),
        (
            "/api/generate",
            json!({"prompt": "x", "suffix": "y", "images": [FILE]}),
            "images: this value is not supported with suffix",
        ),
        (
            "/api/generate",
            json!({"prompt": "x", "context": [1], "images": [FILE]}),
            "images: this value is not supported with context",
        ),
        (
            "/completion",
            media("x", json!([FILE])),
            "more images than the text has marks <__media__",
        ),
        ("/completion", media("<__media__>", json!([])), "prompt.multimodal_data has fewer images"),
        ("/completion", json!({"prompt": {}}), "prompt.prompt_string is missing"),
        ("/v1/completions", json!({"prompt": image("x")}), "prompt[0] must be a string"),
        ("/v1/embeddings", json!({"input": image("x")}), "input[0] must be a string"),
        ("/api/embed", json!({"input": image("x")}), "input[0] must be a string"),
    ] {
        let message = refused(path, &post(&server, path, &body));
        assert!(message.contains(words), "{path} {body}: {message}");
        assert!(!message.contains("secret"), "{path}: {message}");
    }
}

#[test]
fn images_have_limits() {
    let server = TestServer::start(1, 4, "");
    let many = |count: usize| {
        let image = json!({"type": "image_url", "image_url": data_url(FILE)});
        parts(&json!(vec![image; count]))
    };
    let path = "/v1/chat/completions";
    let message = refused(path, &post(&server, path, &many(32)));
    assert!(message.contains("this model reads text only"), "{message}");
    let message = refused(path, &post(&server, path, &many(33)));
    let words = "messages[0].content[32].image_url: expected at most 32 images in a request, got";
    assert!(message.starts_with(words), "{message}");
    // A body of images costs less memory than one of text.
    let long = "A".repeat(8 << 20);
    let message = refused(path, &post(&server, path, &chat(&json!(data_url(&long)))));
    assert!(message.contains("this model reads text only"), "{message}");
    let reply = post(&server, path, &parts(&json!([{"type": "text", "text": long}])));
    assert!(reply.status == 413 && reply.body.contains("reading this request"), "{}", reply.body);
}

/// An image that a vision tower reads.
fn picture(name: &str) -> Vec<u8> {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/data/images");
    fs::read(images.join(name)).unwrap()
}

/// A server of a model with a vision tower, with a function that fetches.
fn seeing(fetch: impl Fn(&str) -> Result<Vec<u8>, String> + Send + Sync + 'static) -> TestServer {
    seeing_with(ImageOptions::default(), fetch)
}

fn seeing_with(
    images: ImageOptions,
    fetch: impl Fn(&str) -> Result<Vec<u8>, String> + Send + Sync + 'static,
) -> TestServer {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data");
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "preprocessor_config.json"] {
        fs::copy(data.join("vision/qwen3_vl_moe").join(name), folder.path().join(name)).unwrap();
    }
    let tokenizer = fs::read(data.join("goldens/tokenizer/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&tokenizer).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((258..=262).map(|id| {
        let names = ["single_word", "lstrip", "rstrip", "normalized"];
        let mut token = json!({"id": id, "content": format!("<{id}>"), "special": true});
        names.into_iter().for_each(|name| token[name] = false.into());
        token
    }));
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for message in messages %}{% if message.content is string %}\
        {{ message.content }}{% else %}{% for part in message.content %}\
        {% if part.type == 'image' %}<262>{% else %}{{ part.text }}{% endif %}\
        {% endfor %}{% endif %}{% endfor %}";
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let device = DeviceOptions::default().name("cpu").threads(1).exact(true);
    let memory = MemoryRequest::default().sessions(2).context(256);
    let images = images.device(device.clone());
    let options = EngineOptions::default().memory(memory).device(device).images(images);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
    let mut options = ServerOptions::default();
    options.images = ImageFetcher::new(move |url, bytes| {
        assert_eq!(bytes, 20 << 20);
        fetch(url)
    });
    TestServer::serve(&engine, 4, options)
}

#[test]
fn images_at_allowed_addresses_are_fetched() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let server = seeing(move |url| {
        seen.lock().unwrap().push(url.to_owned());
        match url {
            "https://a.example/x" => Ok(picture("gradient.png")),
            "https://a.example/text" => Ok(b"text".to_vec()),
            "https://a.example/empty" => Ok(Vec::new()),
            _ => Err("the host is not one of --image-urls".to_owned()),
        }
    });
    let asked = || std::mem::take(&mut *asked.lock().unwrap());
    let chat_path = "/v1/chat/completions";
    let url = json!("https://a.example/x");
    let twice = json!([
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url}},
    ]);
    // The same address is fetched once.
    let reply = post(&server, chat_path, &parts(&twice)).json();
    assert_eq!((&reply["usage"]["prompt_tokens"], asked().len()), (&json!(24), 1), "{reply}");
    let reply = post(&server, "/v1/messages", &block(&json!({"type": "url", "url": url})));
    assert_eq!((reply.status, asked().len()), (200, 1), "{}", reply.body);

    // The next response has the image of the one before.
    let image = json!([{"type": "input_image", "image_url": url}]);
    let body = json!({"input": [{"role": "user", "content": image}], "max_output_tokens": 1});
    let first = post(&server, "/v1/responses", &body).json();
    let mut body = body;
    body["previous_response_id"] = first["id"].clone();
    let second = post(&server, "/v1/responses", &body).json();
    let [first, second] = [&first, &second].map(|reply| reply["usage"]["input_tokens"].as_u64());
    assert!(first == Some(12) && second >= Some(24), "{first:?} {second:?}");
    assert_eq!(asked().len(), 1);

    let place = "messages[0].content[1].image_url";
    for (url, problem) in [
        (
            "https://b.example/secret",
            "the image cannot be fetched: the host is not one of --image-urls",
        ),
        ("https://a.example/text", "expected a PNG, JPEG"),
        ("https://a.example/empty", "expected an image of 1 to 20971520 bytes, got 0"),
        ("http://a.example/secret", "only data: URLs are read, got http:"),
        ("file:///secret", "only data: URLs are read, got file:"),
    ] {
        let message = refused(chat_path, &post(&server, chat_path, &chat(&json!(url))));
        assert!(message.starts_with(&format!("{place}: {problem}")), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
    asked();
    let many = parts(&json!(vec![json!({"type": "image_url", "image_url": url}); 33]));
    let message = refused(chat_path, &post(&server, chat_path, &many));
    assert!(message.contains("[32].image_url: expected at most 32 images"), "{message}");
    for path in ["/v1/chat/completions/input_tokens", "/apply-template"] {
        let message = refused(path, &post(&server, path, &chat(&url)));
        assert!(message.starts_with(&format!("{place}: images are not fetched here")), "{message}");
    }
    assert!(asked().is_empty());
}

#[test]
fn the_order_of_images_makes_another_prompt() {
    let server = seeing(|url| Ok(picture(url.rsplit('/').next().unwrap())));
    let logprobs = |names: [&str; 2]| {
        let image =
            |name| json!({"type": "image_url", "image_url": format!("https://a.example/{name}")});
        let mut body = parts(&json!(names.map(image)));
        body["logprobs"] = true.into();
        body["top_logprobs"] = 5.into();
        body["temperature"] = 0.into();
        let reply = post(&server, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["choices"][0]["logprobs"]["content"].clone()
    };
    let (order, swapped) = (["gradient.png", "rgb16.png"], ["rgb16.png", "gradient.png"]);
    let (first, second) = (logprobs(order), logprobs(swapped));
    assert!(first.is_array() && first != second, "{first}");
    assert_eq!((logprobs(order), logprobs(swapped)), (first, second));
}

/// Rows of an image have room until its prompt is computed, not until the answer's end.
#[test]
fn images_wait_for_room_of_their_rows() {
    // Rows of an image of 12 tokens: 64 values and two rows for DeepStack each.
    let room = ImageOptions::default().row_bytes(12 * 3 * 64 * 4);
    let server = seeing_with(room, |url| Ok(picture(url.rsplit('/').next().unwrap())));
    let path = "/v1/chat/completions";
    let image = |name: &str| {
        let url = format!("https://a.example/{name}");
        json!({"type": "image_url", "image_url": url})
    };
    let both = parts(&json!([image("gradient.png"), image("rgb16.png")]));
    let message = refused(path, &post(&server, path, &both));
    assert!(message.starts_with("the images of the prompt take 1 MiB, the memory"), "{message}");
    assert!(message.ends_with("or give --image-memory"), "{message}");
    // The same image twice has its rows once.
    let twice = parts(&json!([image("gradient.png"), image("gradient.png")]));
    thread::scope(|scope| {
        let ask = |body: &Value| {
            let mut body = body.clone();
            body["max_tokens"] = 40.into();
            let server = &server;
            scope.spawn(move || post(server, path, &body))
        };
        let one = |name| parts(&json!([image(name)]));
        let asked = [twice.clone(), one("rgb16.png"), one("gradient.png"), twice.clone()];
        for reply in asked.map(|body| ask(&body)) {
            let reply = reply.join().unwrap();
            assert_eq!(reply.status, 200, "{}", reply.body);
        }
    });
}

/// Number of fetches, which wait for an end.
#[derive(Default)]
struct Fetches {
    running: usize,
    maximum: usize,
    is_over: bool,
}

#[test]
fn fetches_hold_no_other_requests() {
    let fetches = Arc::new((Mutex::new(Fetches::default()), Condvar::new()));
    let fetching = Arc::clone(&fetches);
    let server = seeing(move |_| {
        let (state, over) = &*fetching;
        let mut state = state.lock().unwrap();
        state.running += 1;
        state.maximum = state.maximum.max(state.running);
        state = over.wait_while(state, |state| !state.is_over).unwrap();
        state.running -= 1;
        Err("it is over".to_owned())
    });
    let path = "/v1/chat/completions";
    let image =
        |i: usize| json!({"type": "image_url", "image_url": format!("https://a.example/{i}")});
    let slow = parts(&Value::from_iter((0..32).map(image)));
    let waiting = |count: usize| wait_until(|| fetches.0.lock().unwrap().running == count);
    thread::scope(|scope| {
        let send = || scope.spawn(|| refused(path, &post(&server, path, &slow)));
        let first = send();
        waiting(4);
        let others = [send(), send()];
        waiting(8);
        // A request that is read at once, and one that takes a turn.
        for text in ["x".to_owned(), "x".repeat(100 << 10)] {
            let reply = post(&server, path, &parts(&json!(text)));
            assert!([200, 400].contains(&reply.status), "{}", reply.body);
        }
        let (state, over) = &*fetches;
        state.lock().unwrap().is_over = true;
        over.notify_all();
        for request in [first].into_iter().chain(others) {
            let message = request.join().unwrap();
            assert!(message.ends_with("cannot be fetched: it is over"), "{message}");
        }
        assert_eq!(state.lock().unwrap().maximum, 8);
    });
}
