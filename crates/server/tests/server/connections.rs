//! Connections: limits of heads, errors of HTTP itself, places, the end of the server.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use moeflux::{
    Error,
    serve::ServingCore,
    text::{MaskSource, TokenMask},
};
use moeflux_server::ServerOptions;
use serde_json::{Value, json};

use crate::{
    CONTEXT, PATIENCE, TestServer,
    client::{Reply, chat, get, receive, send, send_chat},
    engine,
};

/// Path of chat completions.
const CHAT: &str = "/v1/chat/completions";

/// Longest time for `/health`.
const HEALTH: Duration = Duration::from_secs(1);

/// Most bytes of a head.
const HEAD_BYTES: usize = 64 << 10;

/// A server with this many connections.
fn server(connections: usize) -> TestServer {
    let mut options = ServerOptions::default();
    options.connections = connections;
    TestServer::serve(&engine(&moeflux_tales::FILES, 2), 8, options)
}

/// A connection on which these bytes were sent.
fn connect(server: &TestServer, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // It may be closed already.
    let _ = stream.write_all(bytes);
    stream
}

/// The server's answer to these bytes.
fn raw(server: &TestServer, bytes: &[u8]) -> Vec<u8> {
    let mut received = Vec::new();
    let _ = connect(server, bytes).read_to_end(&mut received);
    received
}

fn is_healthy(server: &TestServer) {
    let since = Instant::now();
    assert_eq!(get(server, "/health").status, 200);
    assert!(since.elapsed() < HEALTH, "{:?}", since.elapsed());
}

/// A long stream that has begun.
fn begun_stream(server: &TestServer, max_tokens: usize) -> TcpStream {
    let messages = json!([{"role": "user", "content": "Tell me a fable."}]);
    let body = json!({
        "messages": messages, "temperature": 3, "seed": 1, "max_tokens": max_tokens, "stream": true,
    });
    let mut stream = send_chat(server, &body);
    stream.read_exact(&mut [0; 300]).unwrap();
    stream
}

#[test]
fn requests_that_are_no_http_get_errors_in_the_shape_of_their_api() {
    let server = server(64);
    let host = format!("Host: {}\r\n", server.address);
    let many: String = (0..101).map(|i| format!("X-{i}: {i}\r\n")).collect();
    let long = format!("X: {}\r\n", "x".repeat(HEAD_BYTES));
    let cases = [
        ("a line without version", "POST {}\r\n{host}\r\n", 400),
        ("a line of one word", "POST\r\n\r\n", 400),
        ("a wrong method", "PO\"ST {} HTTP/1.1\r\n{host}\r\n", 400),
        ("another version", "POST {} HTTP/3.7\r\n{host}\r\n", 400),
        ("no protocol", "POST {} SMTP/1.1\r\n{host}\r\n", 400),
        ("a space in a name", "POST {} HTTP/1.1\r\n{host}X X: x\r\n\r\n", 400),
        ("a header without colon", "POST {} HTTP/1.1\r\n{host}X\r\n\r\n", 400),
        ("a NUL in a value", "POST {} HTTP/1.1\r\n{host}X: \0\r\n\r\n", 400),
        ("a wrong length", "POST {} HTTP/1.1\r\n{host}Content-Length: x\r\n\r\n", 400),
        ("a wrong coding", "POST {} HTTP/1.1\r\n{host}Transfer-Encoding: gzip\r\n\r\n", 400),
        ("an old coding", "POST {} HTTP/1.0\r\n{host}Transfer-Encoding: chunked\r\n\r\n", 400),
        ("two hosts", "POST {} HTTP/1.1\r\n{host}{host}Connection: close\r\n\r\n", 400),
        ("other hosts", "POST {} HTTP/1.1\r\n{host}Host: x\r\nConnection: close\r\n\r\n", 400),
        ("many headers", "POST {} HTTP/1.1\r\n{host}{many}\r\n", 431),
        ("a long header", "POST {} HTTP/1.1\r\n{host}{long}\r\n", 431),
        ("a long target", "POST {}?{target}", 431),
        ("half a head", "POST {} HTTP/1.1\r\nX: x", 400),
        (
            "a wrong chunk",
            "POST {} HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
            400,
        ),
    ];
    for (what, text, status) in cases {
        for (path, api) in
            [(CHAT, "openai"), ("/v1/messages", "anthropic"), ("/api/chat", "ollama")]
        {
            // A line without a path tells no API.
            let api = if text.contains("{}") { api } else { "openai" };
            let text = text.replace("{}", path).replace("{host}", &host);
            let text = text.replace("{many}", &many).replace("{long}", &long);
            let text = text.replace("{target}", &"x".repeat(HEAD_BYTES));
            let mut stream = connect(&server, text.as_bytes());
            if what == "half a head" {
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            }
            let mut received = Vec::new();
            let _ = stream.read_to_end(&mut received);
            let reply = Reply::parse(&received);
            let what = format!("{what} to {path}: {}\n{}", reply.head, reply.body);
            assert_eq!(reply.status, status, "{what}");
            assert!(reply.head.contains("content-type: application/json"), "{what}");
            assert!(reply.head.contains("x-request-id: "), "{what}");
            let (json, is_text) = (reply.json(), |value: &Value| value.is_string());
            match api {
                "anthropic" => assert!(json["type"] == "error", "{what}"),
                "ollama" => assert!(is_text(&json["error"]), "{what}"),
                _ => assert!(is_text(&json["error"]["type"]), "{what}"),
            }
        }
    }
    // HTTP/2 without TLS begins like this.
    let reply = Reply::parse(&raw(&server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0"));
    assert!(reply.status == 400 && reply.body.contains("HTTP/2"), "{}", reply.body);
    // The error follows the answers to earlier requests on its connection.
    let good = format!("GET /health HTTP/1.1\r\n{host}\r\n");
    let replies = raw(&server, format!("{good}{good}GET\r\n\r\n").as_bytes());
    let replies = String::from_utf8(replies).unwrap();
    assert_eq!(replies.matches("HTTP/1.1 200 OK").count(), 2, "{replies}");
    let last = &replies[replies.rfind("HTTP/1.1 400").unwrap()..];
    assert!(Reply::parse(last.as_bytes()).json()["error"]["message"].is_string(), "{last}");
}

#[test]
fn a_head_has_at_most_64_kib() {
    let server = server(64);
    let head = |bytes: usize| {
        let start = format!("GET /health HTTP/1.1\r\nHost: {}\r\n", server.address);
        let rest = bytes - start.len() - "Connection: close\r\nX: \r\n\r\n".len();
        format!("{start}Connection: close\r\nX: {}\r\n\r\n", "x".repeat(rest))
    };
    for (bytes, status) in [(HEAD_BYTES, 200), (HEAD_BYTES + 1, 431), (2 * HEAD_BYTES, 431)] {
        for piece in [bytes, 5000] {
            let mut stream = connect(&server, b"");
            for piece in head(bytes).as_bytes().chunks(piece) {
                let _ = stream.write_all(piece);
            }
            let reply = receive(stream);
            assert_eq!(reply.status, status, "{bytes} bytes in pieces of {piece}: {}", reply.body);
            assert!(status == 200 || reply.body.contains("65536 bytes"), "{}", reply.body);
        }
    }
}

#[test]
fn connections_without_an_answer_do_not_stop_health() {
    let server = server(32);
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: {}\r\n", server.address);
    let mut answer = begun_stream(&server, 300);
    for bytes in [
        String::new(),
        head.clone(),
        format!("{head}Content-Length: 1000\r\n\r\n{{"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n"),
    ] {
        let held: Vec<TcpStream> = (0..64).map(|_| connect(&server, bytes.as_bytes())).collect();
        is_healthy(&server);
        // Those who came last were not closed.
        let mut last = &held[63];
        last.set_nonblocking(true).unwrap();
        let read = last.read(&mut [0; 1]);
        assert!(read.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock), "{bytes}");
    }
    // Idle after a request.
    let get_health = format!("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
    let idle = (0..64).map(|_| {
        let mut stream = connect(&server, get_health.as_bytes());
        stream.read_exact(&mut [0; 40]).unwrap();
        stream
    });
    let idle: Vec<TcpStream> = idle.collect();
    is_healthy(&server);
    drop(idle);
    // The answer that began before has its end.
    let mut rest = String::new();
    answer.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
}

#[test]
fn feeds_are_limited_and_leave_connections_for_others() {
    let server = server(512);
    let open = || {
        let mut stream = send(&server, "GET /moeflux/experts", &[], b"");
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (status.ends_with(b"200"), stream)
    };
    let feeds: Vec<_> = (0..16).map(|_| open()).collect();
    assert!(feeds.iter().all(|(is_open, _)| *is_open));
    for _ in 0..40 {
        let reply = get(&server, "/moeflux/experts");
        assert_eq!(reply.status, 503, "{}", reply.body);
        assert!(reply.head.contains("retry-after: "), "{}", reply.head);
        assert!(reply.json()["error"]["message"].as_str().unwrap().contains("16 feeds"));
    }
    is_healthy(&server);
    drop(feeds);
    crate::wait_until(|| open().0);
}

#[test]
fn a_reserve_answers_short_requests_while_all_others_have_answers() {
    let server = server(8);
    let open = || {
        let mut stream = send(&server, "GET /moeflux/experts", &[], b"");
        stream.read_exact(&mut [0; 12]).unwrap();
        stream
    };
    // Seven of eight places are for one address.
    let feeds: Vec<_> = (0..7).map(|_| open()).collect();
    is_healthy(&server);
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1});
    let reply = chat(&server, &body);
    assert_eq!(reply.status, 503, "{}", reply.body);
    assert!(reply.head.contains("retry-after: "), "{}", reply.head);
    drop(feeds);
    crate::wait_until(|| chat(&server, &body).status == 200);
}

#[test]
fn only_running_answers_hold_up_the_end() {
    let mut server = server(64);
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: {}\r\n", server.address);
    let mut answer = begun_stream(&server, 300);
    let mut others = vec![connect(&server, b""), connect(&server, head.as_bytes())];
    let asks = format!("{head}Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n");
    let mut body = connect(&server, asks.as_bytes());
    // The server asks for the body once it handles the request.
    let mut go = [0; 25];
    body.read_exact(&mut go).unwrap();
    assert_eq!(&go[..], b"HTTP/1.1 100 Continue\r\n\r\n");
    body.write_all(b"{").unwrap();
    others.push(body);
    let since = Instant::now();
    server.stopper.stop();
    for mut other in others {
        // Closed, or reset with bytes that were not read.
        let mut received = Vec::new();
        let _ = other.read_to_end(&mut received);
        assert!(received.is_empty(), "{received:?}");
    }
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    let mut rest = String::new();
    answer.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    server.end();
    assert!(since.elapsed() < Duration::from_secs(30), "{:?}", since.elapsed());
}

/// A mask that allows all tokens, one in some time.
#[derive(Debug)]
struct Slow;

impl MaskSource for Slow {
    fn start(&self) -> Result<Box<dyn TokenMask>, Error> {
        Ok(Box::new(Self))
    }
}

impl TokenMask for Slow {
    fn mask(&mut self, _: &mut [f32]) -> Result<(), Error> {
        std::thread::sleep(Duration::from_millis(50));
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
fn a_second_signal_ends_running_answers() {
    let mut options = ServerOptions::default();
    options.masks = vec![Arc::new(Slow)];
    let mut server = TestServer::serve(&engine(&moeflux_tales::FILES, 2), 8, options);
    let mut answer = begun_stream(&server, CONTEXT);
    server.stopper.stop();
    server.wait_for(ServingCore::is_stopping);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!server.thread.as_ref().unwrap().is_finished());
    let since = Instant::now();
    server.end();
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
    let mut rest = String::new();
    let _ = answer.read_to_string(&mut rest);
    assert!(!rest.contains("data: [DONE]"), "{rest}");
}
