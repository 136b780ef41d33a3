//! A small HTTP client: one request per connection.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
};

use serde_json::Value;

use crate::{PATIENCE, RunningServer};

/// A response.
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Status line and headers, in lower case.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Data of the events of a stream.
    pub(crate) fn events(&self) -> Vec<&str> {
        self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
    }

    /// Text of a streamed chat completion that has its end.
    pub(crate) fn text(&self) -> String {
        let events = self.events();
        assert_eq!(events.last(), Some(&"[DONE]"), "{}", self.body);
        let chunks = events[..events.len() - 1].iter();
        let chunks = chunks.map(|event| serde_json::from_str::<Value>(event).unwrap());
        chunks
            .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()))
            .collect()
    }

    pub(crate) fn parse(raw: &[u8]) -> Self {
        let end = raw.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = std::str::from_utf8(&raw[..end]).unwrap().to_ascii_lowercase();
        let mut rest = &raw[end + 4..];
        let mut body = Vec::new();
        if head.contains("transfer-encoding: chunked") {
            while let Some(line) = rest.windows(2).position(|bytes| bytes == b"\r\n") {
                let size = std::str::from_utf8(&rest[..line]).unwrap();
                let size = usize::from_str_radix(size, 16).unwrap();
                body.extend_from_slice(&rest[line + 2..line + 2 + size]);
                rest = &rest[line + 2 + size + 2..];
            }
        } else {
            body.extend_from_slice(rest);
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head, body: String::from_utf8(body).unwrap() }
    }
}

/// Sends a request. `headers` are lines.
pub(crate) fn send(server: &RunningServer, head: &str, headers: &[&str], body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut text = format!("{head} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|line| line.starts_with("Host:")) {
        text += &format!("Host: {}\r\n", server.address);
    }
    headers.iter().for_each(|line| text += &format!("{line}\r\n"));
    text += &format!("Content-Length: {}\r\n\r\n", body.len());
    // A refusal closes the connection, which a large body may find too late.
    let _ = stream.write_all(&[text.as_bytes(), body].concat());
    stream
}

/// Reads a response to its end.
pub(crate) fn receive(mut stream: TcpStream) -> Reply {
    let mut raw = Vec::new();
    // A connection that is reset has had its response before.
    let _ = stream.read_to_end(&mut raw);
    let _ = stream.shutdown(Shutdown::Both);
    Reply::parse(&raw)
}

pub(crate) fn get(server: &RunningServer, path: &str) -> Reply {
    receive(send(server, &format!("GET {path}"), &[], b""))
}

pub(crate) fn post(server: &RunningServer, path: &str, body: &Value) -> Reply {
    receive(send(server, &format!("POST {path}"), &[], body.to_string().as_bytes()))
}

pub(crate) fn chat(server: &RunningServer, body: &Value) -> Reply {
    post(server, "/v1/chat/completions", body)
}

/// Sends a request for a chat completion, and reads nothing.
pub(crate) fn send_chat(server: &RunningServer, body: &Value) -> TcpStream {
    send(server, "POST /v1/chat/completions", &[], body.to_string().as_bytes())
}
