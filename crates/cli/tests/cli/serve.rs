//! `serve`: the line with the URL, an answer, the end by a signal.

#![cfg(unix)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

use super::*;

/// A server that a test ends by a signal.
pub(super) struct Served {
    child: Child,
    /// Printed line with the URL of the API.
    line: String,
    /// Printed line with the URL of the page.
    page: String,
}

impl Served {
    pub(super) fn start(args: &[&str]) -> Self {
        let serve = ["serve", "--quiet", "--port", "0"].iter().chain(args);
        let mut child = moeflux(serve).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (mut line, mut page) = (String::new(), String::new());
        out.read_line(&mut line).unwrap();
        out.read_line(&mut page).unwrap();
        Self { child, line, page }
    }

    /// Address and port.
    fn address(&self) -> &str {
        let url = self.line.split_once("http://").unwrap().1;
        url.split_once("/v1").unwrap().0
    }

    /// Answer to a short request for a model.
    fn ask(&self, model: &str) -> String {
        let messages = r#""messages": [{"role": "user", "content": "Hello"}]"#;
        let body = format!(r#"{{"model": "{model}", {messages}, "max_tokens": 2}}"#);
        self.post("/v1/chat/completions", &body)
    }

    /// Response to a request with a JSON body.
    pub(super) fn post(&self, path: &str, body: &str) -> String {
        let mut client = TcpStream::connect(self.address()).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close");
        write!(client, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        reply
    }

    pub(super) fn end(mut self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{signal}");
    }
}

#[test]
fn a_signal_ends_the_server_after_it_has_answered() {
    for signal in ["-TERM", "-INT"] {
        let server = Served::start(&["--sessions", "1", "--ctx", "512"]);
        assert!(server.line.starts_with("tales-18m is served at http://"), "{}", server.line);
        let page = format!("http://{}/", server.address());
        assert_eq!(server.page.trim_end().split(' ').next_back(), Some(&*page));
        let reply = server.ask("any");
        assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("chat.completion"), "{reply}");
        server.end(signal);
    }
}

#[test]
fn a_folder_of_models_is_served_with_its_settings() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["one", "two"] {
        let model = folder.path().join(name);
        std::fs::create_dir(&model).unwrap();
        for (file, bytes) in moeflux_tales::FILES {
            std::fs::write(model.join(file), bytes).unwrap();
        }
    }
    let settings = folder.path().join("moeflux.toml");
    let text = "[defaults]\nctx = 512\nsessions = 1\n[models.two]\naliases = [\"fables\"]\n";
    std::fs::write(&settings, text).unwrap();
    let path = folder.path().to_str().unwrap();
    let server = Served::start(&["--models", path, "--ttl", "10m"]);
    assert!(server.line.starts_with("2 models are served at http://"), "{}", server.line);
    assert!(server.line.ends_with("/v1: one, two\n"), "{}", server.line);
    for (asked, model) in [("one", "one"), ("fables", "two"), ("one", "one")] {
        let reply = server.ask(asked);
        assert!(reply.contains(&format!("\"model\":\"{model}\"")), "{reply}");
    }
    assert!(server.ask("three").starts_with("HTTP/1.1 404 "));
    server.end("-TERM");
    std::fs::write(&settings, "[models.two]\ncontext = 512\n").unwrap();
    let failed = moeflux(["serve", "--port", "0", "--models", path]).output().unwrap();
    let error = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{error}");
    assert!(
        ["moeflux.toml", "line 2", "context"].iter().all(|word| error.contains(word)),
        "{error}"
    );
}
