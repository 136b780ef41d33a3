//! `serve`: the line with the URL, an answer, the end by a signal.

#![cfg(unix)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
};

use super::*;

#[test]
fn a_signal_ends_the_server_after_it_has_answered() {
    for signal in ["-TERM", "-INT"] {
        let args = ["serve", "--quiet", "--port", "0", "--sessions", "1", "--ctx", "512"];
        let mut child = moeflux(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let url = line.strip_prefix("tales-18m is served at http://").unwrap().trim();
        let address = url.strip_suffix("/v1").unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}"#;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close";
        write!(client, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("chat.completion"), "{reply}");
        let id = child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal}");
    }
}
