//! Hostile requests: each is refused in the shape of its API, while another client's stream goes
//! on.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use moeflux::serve::ForcedTokens;
use moeflux_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    CONTEXT, PATIENCE, Random, TestServer,
    client::{Reply, chat, get, post, receive, send, send_chat},
    engine,
};

/// Longest time for a refusal: a second, and what a busy machine adds.
const REFUSAL: Duration = Duration::from_secs(10);

/// Path of chat completions.
const CHAT: &str = "/v1/chat/completions";

/// Path of messages.
const MESSAGES: &str = "/v1/messages";

/// A short conversation, in both APIs.
fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
}

/// A long answer, by its seed.
fn long(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Tell me a fable."}],
        "temperature": 3, "seed": 1, "max_tokens": CONTEXT,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A client that asks for the same stream again and again.
struct Bystander {
    whole: String,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<String>>>,
}

impl Bystander {
    /// Starts once its answer is known from when it was alone.
    fn start(server: &TestServer) -> Self {
        let body = long(json!({"max_tokens": 300}));
        let whole = chat(server, &body).json()["choices"][0]["message"]["content"].clone();
        let mut streamed = body;
        streamed["stream"] = json!(true);
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, address) = (Arc::clone(&is_over), server.address);
        let thread = std::thread::spawn(move || {
            let mut texts = Vec::new();
            while texts.is_empty() || !over.load(Ordering::SeqCst) {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let body = streamed.to_string();
                let head = format!("POST {CHAT} HTTP/1.1\r\nHost: {address}\r\nConnection: close");
                let length = body.len();
                write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
                let reply = receive(stream);
                assert_eq!(reply.status, 200, "{}", reply.body);
                texts.push(reply.text());
            }
            texts
        });
        Self { whole: whole.as_str().unwrap().to_owned(), is_over, thread: Some(thread) }
    }

    /// All of its streams had the answer that it has alone.
    fn end(mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        for text in self.thread.take().unwrap().join().unwrap() {
            assert_eq!(text, self.whole);
        }
    }
}

/// Sends bytes as they are, and reads to the end of the connection. Both may be cut off.
fn raw(server: &TestServer, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(bytes);
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    received
}

/// The status of a response.
fn status(raw: &[u8]) -> u16 {
    let head = String::from_utf8_lossy(&raw[..raw.len().min(12)]).into_owned();
    head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{head:?}"))
}

/// Checks a refusal in the shape of its API.
fn refused(path: &str, reply: &Reply, what: &str) {
    assert!((400..500).contains(&reply.status), "{what}: {} {}", reply.status, reply.body);
    let json = reply.json();
    assert!(json["error"]["message"].is_string(), "{what}: {}", reply.body);
    assert!(json["error"]["type"].is_string(), "{what}: {}", reply.body);
    assert_eq!(json["type"] == "error", path.contains("messages"), "{what}: {}", reply.body);
}

/// A body whose one text has `bytes` bytes.
fn large(bytes: usize) -> Vec<u8> {
    let mut body = br#"{"max_tokens": 1, "messages": [{"role": "user", "content": ""#.to_vec();
    body.resize(body.len() + bytes, b'x');
    body.extend_from_slice(br#""}]}"#);
    body
}

#[test]
fn hostile_bodies_are_refused_while_a_stream_goes_on() {
    let server = TestServer::start(2, 8, "");
    let bystander = Bystander::start(&server);
    let deep = |open: &str, close: &str| {
        let value = open.repeat(10_000) + &close.repeat(10_000);
        let message = r#"{"role": "user", "content": "#;
        format!(r#"{{"max_tokens": 1, "messages": [{message}{value}}}]}}"#).into_bytes()
    };
    let content = |json: &[u8]| {
        let start = &br#"{"max_tokens": 1, "messages": [{"role": "user", "content": "#[..];
        [start, json, b"}]}"].concat()
    };
    let roles = |roles: &str| format!(r#"{{"max_tokens": 1, "messages": {roles}}}"#).into_bytes();
    let cases: [(&str, Vec<u8>); 14] = [
        ("half an object", b"{\"messages\": [".to_vec()),
        ("two values", b"{} {}".to_vec()),
        ("10,000 lists", deep("[", "]")),
        ("10,000 objects", deep("{\"a\": ", "}")),
        ("a raw NUL", content(b"\"\0\"")),
        ("UTF-8 that is cut off", content(b"\"\xf0\x9f\"")),
        ("an overlong NUL", content(b"\"\xc0\x80\"")),
        ("a number over all ranges", content(b"1e999")),
        ("no messages", roles("[]")),
        ("a message that is a list", roles("[[]]")),
        ("an unknown role", roles(r#"[{"role": "king", "content": "x"}]"#)),
        ("a role that is a number", roles(r#"[{"role": 1, "content": "x"}]"#)),
        ("1 MiB of text", large(1 << 20)),
        ("more than 32 MiB", large(32 << 20)),
    ];
    let paths = [CHAT, MESSAGES, "/v1/messages/count_tokens", "/apply-template"];
    for (what, body) in &cases {
        for path in paths {
            // Neither the text of a prompt nor its number of tokens is limited by the context.
            if *what == "1 MiB of text" && (path.contains("count") || path.contains("template")) {
                continue;
            }
            let since = Instant::now();
            let reply = receive(send(&server, &format!("POST {path}"), &[], body));
            let what = format!("{what} to {path}");
            assert!(since.elapsed() < REFUSAL, "{what}: {:?}", since.elapsed());
            refused(path, &reply, &what);
        }
    }
    // Results of calls that were not made.
    let result = json!([{"role": "tool", "tool_call_id": "call_1", "content": "x"}]);
    refused(CHAT, &chat(&server, &json!({"messages": result})), "a result");
    let result = json!([{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}]);
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": result}]});
    refused(MESSAGES, &post(&server, MESSAGES, &body), "a result");
    // NUL as JSON writes it is a character like others.
    for path in [CHAT, MESSAGES] {
        let reply = receive(send(&server, &format!("POST {path}"), &[], &content(br#""\u0000""#)));
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    // A small body that would unpack to gigabytes is never unpacked.
    for encoding in ["gzip", "GZIP", "deflate", "br", "identity, gzip"] {
        let zipped = [format!("Content-Encoding: {encoding}")];
        let zipped = [zipped[0].as_str()];
        let reply = receive(send(&server, &format!("POST {CHAT}"), &zipped, b"\x1f\x8b\x08"));
        assert_eq!(reply.status, 415, "{encoding}: {}", reply.body);
    }
    bystander.end();
}

#[test]
fn hostile_connections_are_refused_while_a_stream_goes_on() {
    let mut options = ServerOptions::default();
    options.timeouts.headers = Duration::from_millis(500);
    options.timeouts.body = Duration::from_millis(500);
    let server = TestServer::serve(&engine(&moeflux_tales::FILES, 2), 8, options);
    let bystander = Bystander::start(&server);
    let host = format!("Host: {}\r\n", server.address);
    let body = hello().to_string();
    let since = Instant::now();
    // Floods of headers, and lines without end.
    let flood: String = (0..1000).map(|i| format!("X-{i}: {i}\r\n")).collect();
    let flood = format!("GET /v1/models HTTP/1.1\r\n{host}{flood}\r\n");
    assert_eq!(status(&raw(&server, flood.as_bytes())), 431);
    let line = format!("GET /v1/models HTTP/1.1\r\n{host}X: {}\r\n\r\n", "x".repeat(1 << 20));
    assert_eq!(status(&raw(&server, line.as_bytes())), 431);
    let target = format!("GET /{} HTTP/1.1\r\n{host}\r\n", "x".repeat(1 << 20));
    assert!((400..500).contains(&status(&raw(&server, target.as_bytes()))));
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n"] {
        assert_eq!(status(&raw(&server, garbage)), 400, "{garbage:?}");
    }
    for wrong in [
        "Content-Length: -1",
        "Content-Length: 99999999999999999999999",
        "Content-Length: 1\r\nContent-Length: 2",
        "Transfer-Encoding: gzip",
    ] {
        let head = format!("POST {CHAT} HTTP/1.1\r\n{host}{wrong}\r\n\r\n");
        assert_eq!(status(&raw(&server, head.as_bytes())), 400, "{wrong}");
    }
    // A length that is never sent is refused before it is waited for.
    let head = format!("POST {MESSAGES} HTTP/1.1\r\n{host}Content-Length: 99999999999\r\n\r\n");
    let reply = Reply::parse(&raw(&server, head.as_bytes()));
    assert_eq!(reply.status, 413, "{}", reply.body);
    refused(MESSAGES, &reply, "a large length");
    // Headers that arrive byte by byte end with their time, bodies too.
    let loris = |head: &str, drop: &str| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(1) {
            if stream.write_all(drop.as_bytes()).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut received = Vec::new();
        let _ = stream.read_to_end(&mut received);
        received
    };
    let received = loris(&format!("POST {CHAT} HTTP/1.1\r\n{host}"), "X: x\r\n");
    refused(CHAT, &Reply::parse(&received), "slow headers");
    assert_eq!(status(&received), 408);
    for more in ["Content-Length: 1000", "Transfer-Encoding: chunked"] {
        let received =
            loris(&format!("POST {CHAT} HTTP/1.1\r\n{host}{more}\r\n\r\n"), "1\r\n \r\n");
        let reply = Reply::parse(&received);
        assert_eq!(reply.status, 408, "{more}: {}", reply.body);
        refused(CHAT, &reply, more);
    }
    assert!(since.elapsed() < 6 * REFUSAL, "{:?}", since.elapsed());
    // Chunks without end are refused at the limit of a body.
    let head = format!("POST {CHAT} HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n");
    let chunk = [&b"100000\r\n"[..], &vec![b' '; 1 << 20], b"\r\n"].concat();
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    let sent = (0..200).take_while(|_| stream.write_all(&chunk).is_ok()).count();
    assert!(sent < 200, "the server took {sent} MiB");
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    // The limits of size and time are both exceeded on a busy machine.
    assert!([408, 413].contains(&Reply::parse(&received).status));
    for chunks in ["zz\r\n", "ffffffffffffffffff\r\n", "1\r\nxy\r\n"] {
        let reply = Reply::parse(&raw(&server, format!("{head}{chunks}").as_bytes()));
        assert_eq!(reply.status, 400, "{chunks}: {}", reply.body);
        refused(CHAT, &reply, chunks);
    }
    // Requests one after another on a connection, sent at once.
    let one = |path: &str, close: &str| {
        let length = body.len();
        format!("POST {path} HTTP/1.1\r\n{host}{close}Content-Length: {length}\r\n\r\n{body}")
    };
    let three = [one(CHAT, ""), one(MESSAGES, ""), one(CHAT, "Connection: close\r\n")].concat();
    let replies = String::from_utf8(raw(&server, three.as_bytes())).unwrap();
    assert_eq!(replies.matches("HTTP/1.1 200 OK").count(), 3, "{replies}");
    assert!(replies.find("chat.completion").unwrap() < replies.find("\"message\",").unwrap());
    // HTTP/1.0, with and without a stream.
    for stream in [false, true] {
        let mut body = hello();
        body["stream"] = json!(stream);
        let (body, length) = (body.to_string(), body.to_string().len());
        let old = format!("POST {CHAT} HTTP/1.0\r\n{host}Content-Length: {length}\r\n\r\n{body}");
        let reply = Reply::parse(&raw(&server, old.as_bytes()));
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert!(!reply.head.contains("chunked"), "{}", reply.head);
        assert_eq!(reply.body.ends_with("data: [DONE]\n\n"), stream, "{}", reply.body);
    }
    let reply = Reply::parse(&raw(&server, b"GET /v1/models HTTP/1.0\r\n\r\n"));
    refused(CHAT, &reply, "no host");
    // A client that asks before it sends its body.
    let length = body.len();
    let asks = format!(
        "POST {CHAT} HTTP/1.1\r\n{host}Connection: close\r\nExpect: 100-continue\r\n\
         Content-Length: {length}\r\n\r\n"
    );
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(asks.as_bytes()).unwrap();
    let mut go = [0; 25];
    stream.read_exact(&mut go).unwrap();
    assert_eq!(&go[..], b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).unwrap();
    assert_eq!(receive(stream).status, 200);
    let asks = asks.replace(&format!("Length: {length}"), "Length: 99999999");
    let reply = Reply::parse(&raw(&server, asks.as_bytes()));
    assert_eq!(reply.status, 413, "{}", reply.head);
    // HEAD has the headers of GET, and no body.
    let reply = receive(send(&server, "HEAD /v1/models", &[], b""));
    assert_eq!((reply.status, reply.body.as_str()), (200, ""));
    assert!(reply.head.contains("content-length: "), "{}", reply.head);
    assert_eq!(receive(send(&server, &format!("HEAD {CHAT}"), &[], b"")).status, 405);
    bystander.end();
}

#[test]
fn a_large_body_that_is_refused_gets_its_answer() {
    let server = TestServer::start(1, 4, "secret\n");
    let body = large(8 << 20);
    for path in [CHAT, MESSAGES, "/nowhere", "/health"] {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (host, length) = (server.address, body.len());
        let head = format!("POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}");
        stream
            .write_all(&[head.as_bytes(), b"\r\nConnection: close\r\n\r\n", &body].concat())
            .unwrap();
        refused(path, &receive(stream), path);
    }
}

#[test]
fn templates_that_loop_are_the_clients_error() {
    let template = "{% for i in range(n or 0) %}{% for j in range(n) %}x{% endfor %}{% endfor %}\
                    {% for message in messages %}{{ message.content }}{% endfor %}";
    let files = moeflux_tales::FILES.map(|(name, bytes)| match name {
        "chat_template.jinja" => (name, template.as_bytes()),
        _ => (name, bytes),
    });
    let server = TestServer::serve(&engine(&files, 2), 4, ServerOptions::default());
    for n in [json!(90_000), json!(1_000_000_000_000_u64), json!(-1), json!("x"), json!([1])] {
        for path in [CHAT, MESSAGES] {
            let mut body = hello();
            body["chat_template_kwargs"] = json!({"n": n});
            let since = Instant::now();
            let reply = post(&server, path, &body);
            assert!(since.elapsed() < REFUSAL, "{n}: {:?}", since.elapsed());
            match n == json!(-1) {
                true => assert_eq!(reply.status, 200, "{}", reply.body),
                false => refused(path, &reply, &n.to_string()),
            }
        }
    }
}

#[test]
fn a_client_may_die_in_any_phase() {
    let server = TestServer::start(1, 8, "");
    let idle = || server.wait_for(|core| core.stats().running + core.stats().waiting == 0);
    // Within its headers and its body.
    let body = long(json!({})).to_string();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: {}\r\n", server.address);
    let length = body.len();
    let request = format!("{head}Content-Length: {length}\r\n\r\n{body}");
    for cut in [0, 1, 30, head.len(), request.len() - length, request.len() - 1] {
        for shut in [true, false] {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(&request.as_bytes()[..cut]).unwrap();
            if shut {
                stream.shutdown(Shutdown::Write).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            }
        }
    }
    assert_eq!(server.core.stats().ended, 0);
    let prompt = json!([{"role": "user", "content": "crow ".repeat(CONTEXT / 2 - 200)}]);
    for stream in [false, true] {
        // While its prompt is prefilled, which a session does for some time.
        let ended = server.core.stats().ended;
        let prefill = send_chat(&server, &long(json!({"messages": prompt, "stream": stream})));
        server.wait_for(|core| core.stats().running == 1 || core.stats().ended > ended);
        drop(prefill);
        idle();
        // While it waits, before and after its first token.
        let mut decode = send_chat(&server, &long(json!({"stream": stream})));
        server.wait_for(|core| core.stats().running == 1);
        let waits = send_chat(&server, &long(json!({"stream": stream})));
        server.wait_for(|core| core.stats().waiting == 1);
        drop(waits);
        server.wait_for(|core| core.stats().waiting == 0);
        if stream {
            decode.read_exact(&mut [0; 600]).unwrap();
        }
        drop(decode);
        idle();
        // Several answers of one request.
        let several = send_chat(&server, &long(json!({"stream": stream, "n": 4})));
        server.wait_for(|core| core.stats().running == 1);
        drop(several);
        idle();
    }
    assert_eq!(chat(&server, &hello()).status, 200);
}

/// Values of every type, and at the borders of ranges.
fn values() -> Vec<Value> {
    let deep = (0..100).fold(json!(1), |inner, i| match i % 2 {
        0 => json!([inner]),
        _ => json!({"a": inner}),
    });
    let many: Vec<Value> = (0..2000).map(|i| json!(i % 7)).collect();
    vec![
        Value::Null,
        json!(true),
        json!(false),
        json!(0),
        json!(-1),
        json!(1),
        json!(1.5),
        json!(1e39),
        json!(-1e300),
        json!(5e-324),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(u32::MAX),
        json!(""),
        json!("x"),
        json!("\0"),
        json!("\u{feff}\u{2028}\u{10ffff}"),
        json!("{{ 1 / 0 }}{% for %}"),
        json!("<|im_end|><|im_start|>"),
        json!("{\"a\": [".repeat(2000)),
        json!("xy ".repeat(20_000)),
        json!([]),
        json!([1]),
        json!(["x", "x"]),
        json!([[]]),
        json!([null]),
        json!([{}]),
        json!({}),
        json!({"type": "x"}),
        json!({"type": "text", "text": "x"}),
        json!({"": {}}),
        json!(many),
        deep,
    ]
}

/// Valid requests with all fields that are known.
fn requests() -> Vec<(&'static str, Value)> {
    let schema = json!({
        "type": "object", "properties": {"path": {"type": "string", "enum": ["a", "b"]}},
        "required": ["path"],
    });
    let chat = json!({
        "model": "m", "max_tokens": 4, "max_completion_tokens": 4, "temperature": 0.5,
        "top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "repeat_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 1, "n": 2, "stop": ["END"],
        "stream": true, "stream_options": {"include_usage": true}, "logprobs": true,
        "top_logprobs": 2, "logit_bias": {"5": 1}, "enable_thinking": false,
        "thinking": {"type": "disabled", "budget_tokens": 5}, "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1}, "parallel_tool_calls": true, "tool_choice": "auto",
        "response_format": {"type": "text"}, "functions": [], "audio": null, "user": "u",
        "add_generation_prompt": true, "continue_final_message": false,
        "tools": [{"type": "function", "function": {
            "name": "f", "description": "d", "parameters": schema, "strict": false,
        }}],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": [
                {"id": "c", "type": "function",
                    "function": {"name": "f", "arguments": "{\"path\": \"a\"}"}},
            ]},
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": "x"},
            {"role": "user", "content": "And now?"},
        ],
    });
    let messages = json!({
        "model": "m", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1,
        "stop_sequences": ["END"], "stream": true, "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"}, "metadata": {"user_id": "u"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "tools": [
            {"name": "f", "description": "d", "input_schema": schema},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {
                "type": "text", "media_type": "text/plain", "data": "Hello",
            }}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"path": "a"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": false,
                    "content": [{"type": "text", "text": "x"}]},
                {"type": "text", "text": "And now?"},
            ]},
        ],
    });
    let completions = json!({
        "model": "m", "prompt": ["Hello", [5, 6]], "max_tokens": 4, "n": 2, "echo": true,
        "logprobs": 2, "stop": "END", "stream": true, "suffix": null, "best_of": 1,
        "stream_options": {"include_usage": true}, "temperature": 0.5, "seed": 1,
        "logit_bias": [[5, 1]],
    });
    vec![
        (CHAT, chat.clone()),
        (MESSAGES, messages.clone()),
        ("/v1/completions", completions),
        ("/v1/messages/count_tokens", messages),
        ("/apply-template", chat),
        ("/tokenize", json!({"content": "Hello", "add_special": true, "with_pieces": true})),
        ("/detokenize", json!({"tokens": [5, 6, 7]})),
    ]
}

/// A place in a value, at random: inner ones as often as outer ones.
fn place<'a>(value: &'a mut Value, random: &mut Random) -> &'a mut Value {
    let children = match value {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    if children == 0 || random.below(4) == 0 {
        return value;
    }
    let child = random.below(children);
    match value {
        Value::Object(map) => place(map.values_mut().nth(child).unwrap(), random),
        Value::Array(list) => place(&mut list[child], random),
        _ => unreachable!(),
    }
}

/// Changes a request in one place.
fn mutate(body: &mut Value, values: &[Value], random: &mut Random) {
    let value = values[random.below(values.len())].clone();
    let choice = random.below(6);
    match (choice, place(body, random)) {
        (0, Value::Array(list)) => list.push(value),
        (0, Value::Object(map)) => {
            // Without one of its fields.
            let name = map.keys().nth(random.below(map.len().max(1))).cloned();
            name.into_iter().for_each(|name| drop(map.remove(&name)));
        }
        (1, Value::Array(list)) => {
            let twice = list.clone();
            list.extend(twice);
        }
        (2, place) => *place = json!([place.clone()]),
        (_, place) => *place = value,
    }
}

#[test]
fn wrong_values_are_never_the_servers_error() {
    // Answers are empty at once.
    let engine = engine(&moeflux_tales::FILES, 2);
    let mut options = ServerOptions::default();
    let end = engine.end_tokens().ids()[0];
    options.masks = vec![Arc::new(ForcedTokens::new(Vec::new(), end))];
    let server = TestServer::serve(&engine, 512, options);
    let values = values();
    let check = |path: &str, body: &Value| {
        let since = Instant::now();
        let reply = post(&server, path, body);
        let start: String = body.to_string().chars().take(2000).collect();
        assert!(reply.status < 500, "{path} {start}: {} {}", reply.status, reply.body);
        // A stream has errors after its head.
        let fails = ["\"server_error\"", "\"api_error\""].iter().any(|e| reply.body.contains(e));
        assert!(!fails, "{path} {start}: {}", reply.body);
        // The time of a long prompt is the machine's.
        if reply.status != 200 {
            assert!(since.elapsed() < REFUSAL, "{path} {start}: {:?}", since.elapsed());
            refused(path, &reply, &start);
        }
        reply.status
    };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for (path, body) in requests() {
        assert_eq!(check(path, &body), 200, "{path}");
        // Each field with each value. Two paths share the reader of another one.
        let is_read_elsewhere = path.contains("count") || path.contains("template");
        for name in body.as_object().unwrap().keys() {
            for value in values.iter().filter(|_| !is_read_elsewhere) {
                let mut wrong = body.clone();
                wrong[name] = value.clone();
                check(path, &wrong);
            }
        }
        for _ in 0..80 {
            let mut wrong = body.clone();
            for _ in 0..=random.below(3) {
                mutate(&mut wrong, &values, &mut random);
            }
            check(path, &wrong);
        }
    }
    assert_eq!(get(&server, "/health").status, 200);
}
