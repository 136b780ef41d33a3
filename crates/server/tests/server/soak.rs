//! Many clients at once, of which most fail: the small form of `scripts/server-soak.py`.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    CONTEXT, Random, TestServer,
    client::{chat, receive, send, send_chat},
};

/// Requests.
const REQUESTS: usize = 50;

/// Clients at once.
const CLIENTS: usize = 6;

/// A request for one of a few answers.
fn ask(index: usize, tokens: usize) -> Value {
    json!({
        "messages": [{"role": "user", "content": format!("Tell me fable {}.", index % 3)}],
        "temperature": index % 2, "seed": index % 3, "max_tokens": tokens,
    })
}

/// One client, undisturbed or not.
fn client(server: &TestServer, index: usize, alone: &[Value], random: &mut Random) {
    let mut streamed = ask(index, CONTEXT);
    streamed["stream"] = json!(true);
    match random.below(5) {
        0 | 1 => {
            let reply = chat(server, &ask(index, 24));
            assert_eq!(reply.status, 200, "{}", reply.body);
            assert_eq!(reply.json()["choices"][0]["message"], alone[index % alone.len()]);
        }
        2 => {
            // Leaves before or after the first token.
            let mut stream = send_chat(server, &streamed);
            if random.below(2) == 0 {
                stream.read_exact(&mut [0; 500]).unwrap();
            }
        }
        3 => {
            // Reads slowly, then leaves.
            let mut stream = send_chat(server, &streamed);
            for _ in 0..10 {
                stream.read_exact(&mut [0; 20]).unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        _ => {
            let reply = receive(send(server, "POST /v1/messages", &[], b"{\"messages\": 1}"));
            assert_eq!(reply.status, 400, "{}", reply.body);
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(b"POST /v1/messages HTTP/1.1\r\nContent-Length: 9\r\n\r\n{").unwrap();
        }
    }
}

#[test]
fn clients_that_fail_change_no_other_answer() {
    let server = TestServer::start(3, 64, "");
    let answer = |index| chat(&server, &ask(index, 24)).json()["choices"][0]["message"].clone();
    let alone: Vec<Value> = (0..6).map(answer).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for seed in 1..=CLIENTS as u64 {
            let (server, alone, next) = (&server, &alone, &next);
            scope.spawn(move || {
                let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                loop {
                    let index = next.fetch_add(1, Ordering::SeqCst);
                    if index >= REQUESTS {
                        return;
                    }
                    client(server, index, alone, &mut random);
                }
            });
        }
    });
    server.wait_for(|core| core.stats().running + core.stats().waiting == 0);
}
