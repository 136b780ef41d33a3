//! The web page, its live feed and the memory plan.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Read},
    net::TcpStream,
};

use moeflux::{
    serve::{ServingCore, ServingOptions},
    session::DraftMode,
};
use moeflux_server::{LoadedModel, ServerOptions};
use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{Reply, chat, get, receive, send},
    drafting_engine,
};

/// A decoded frame of the feed.
#[derive(Debug)]
struct LiveFrame {
    values: Vec<f64>,
    /// Number of experts of each layer.
    sizes: Vec<usize>,
    /// Hits, prefetches and misses of each expert.
    experts: Vec<[u32; 3]>,
}

/// Places of values in a frame.
const TIME: usize = 0;
const ENDED: usize = 3;
const GENERATED: usize = 6;
const DRAFTED: usize = 14;
const ACCEPTED: usize = 15;

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

impl LiveFrame {
    fn decode(bytes: &[u8]) -> Self {
        let head = u32s(&bytes[..16]);
        assert_eq!((&bytes[..4], head[1]), (&b"moe\x01"[..], bytes.len() as u32));
        let (layers, values) = (head[2] as usize, head[3] as usize);
        let (values, rest) = bytes[16..].split_at(8 * values);
        let (sizes, experts) = rest.split_at(4 * layers);
        let values = values.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        let sizes: Vec<usize> = u32s(sizes).into_iter().map(|size| size as usize).collect();
        let experts = u32s(experts).as_chunks().0.to_vec();
        assert_eq!(sizes.iter().sum::<usize>(), experts.len());
        Self { values, sizes, experts }
    }

    /// Reads the next frame, which is one chunk of the response.
    fn read(stream: &mut BufReader<TcpStream>) -> Option<Self> {
        let mut size = String::new();
        stream.read_line(&mut size).unwrap();
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut bytes = vec![0; size + 2];
        stream.read_exact(&mut bytes).unwrap();
        (size > 0).then(|| Self::decode(&bytes[..size]))
    }
}

/// A feed after its headers.
fn feed(server: &TestServer) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(send(server, "GET /moeflux/experts", &[], b""));
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        stream.read_line(&mut line).unwrap();
    }
    stream
}

fn page(server: &TestServer, path: &str) -> Reply {
    receive(send(server, &format!("GET {path}"), &["Accept: text/html,*/*;q=0.8"], b""))
}

#[test]
fn the_page_needs_no_key_and_loads_only_its_files() {
    let server = TestServer::start(1, 4, "secret");
    assert_eq!(get(&server, "/").body, "Ollama is running");
    let index = page(&server, "/");
    assert!(index.body.starts_with("<!doctype html>"));
    let mut seen = BTreeSet::new();
    let mut texts = vec![index];
    let mut bytes = 0;
    while let Some(reply) = texts.pop() {
        assert_eq!(reply.status, 200);
        for line in [
            "content-security-policy: default-src 'self'; img-src 'self' blob:; base-uri 'none'",
            "x-content-type-options: nosniff",
            "cache-control: no-cache",
            "etag: \"",
            "content-type: ",
        ] {
            assert!(reply.head.contains(&format!("\r\n{line}")), "{line}: {}", reply.head);
        }
        bytes += reply.body.len();
        let folder = ["\"/page/", "\"./"].map(|start| reply.body.split(start).skip(1));
        for name in folder.into_iter().flatten().filter_map(|rest| rest.split('"').next()) {
            if seen.insert(name.to_owned()) {
                texts.push(get(&server, &format!("/page/{name}")));
                let kind = match name.rsplit('.').next().unwrap() {
                    "js" => "text/javascript; charset=utf-8",
                    "css" => "text/css; charset=utf-8",
                    "svg" => "image/svg+xml",
                    other => other,
                };
                let head = &texts.last().unwrap().head;
                assert!(head.contains(&format!("\r\ncontent-type: {kind}")), "{name}: {head}");
            }
        }
    }
    assert!(seen.len() > 10 && seen.contains("markdown.js"), "{seen:?}");
    assert!(bytes < 150_000, "{bytes} bytes");
    // With a key no path is open beside them, nor is an unknown file.
    for path in ["/moeflux/experts", "/moeflux/plan", "/page/other.js", "/page/../metrics"] {
        assert_eq!(page(&server, path).status, 401, "{path}");
    }
    assert_eq!(receive(send(&server, "POST /page/app.js", &[], b"")).status, 405);
}

#[test]
fn a_browser_keeps_the_files_that_are_current() {
    let server = TestServer::start(1, 4, "");
    let reply = get(&server, "/page/app.js");
    let tag = reply.head.split("etag: ").nth(1).unwrap().split("\r\n").next().unwrap();
    let headers = [&*format!("If-None-Match: {tag}")];
    let again = receive(send(&server, "GET /page/app.js", &headers, b""));
    assert_eq!((again.status, &*again.body), (304, ""));
    let other = receive(send(&server, "GET /page/chat.js", &headers, b""));
    assert_eq!(other.status, 200);
    assert_eq!(get(&server, "/page/nothing.js").status, 404);
    let foreign = receive(send(&server, "GET /page/app.js", &["Host: evil.example"], b""));
    assert_eq!(foreign.status, 403);
}

#[test]
fn frames_of_the_feed_have_the_counters_and_end_with_the_server() {
    let mut server = TestServer::start(1, 4, "");
    let mut stream = feed(&server);
    let first = LiveFrame::read(&mut stream).unwrap();
    assert!(first.experts.iter().all(|counts| counts == &[0; 3]));
    let messages = json!([{"role": "user", "content": "Tell me a fable."}]);
    let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0});
    assert_eq!(chat(&server, &body).status, 200);
    server.wait_for(|core| core.stats().ended == 1);
    let last = loop {
        let frame = LiveFrame::read(&mut stream).unwrap();
        if frame.values[ENDED] > 0.0 {
            break frame;
        }
    };
    assert!(last.values[TIME] > first.values[TIME]);
    assert_eq!((last.values[ENDED], last.values[GENERATED]), (1.0, 8.0));
    let stats = server.core.engine().layer_stats();
    assert_eq!(last.sizes.len(), stats.len());
    let mut experts = last.experts.iter();
    for (size, stats) in last.sizes.iter().zip(stats) {
        let sums = experts.by_ref().take(*size).fold([0; 3], |sums: [u64; 3], counts| {
            std::array::from_fn(|i| sums[i] + u64::from(counts[i]))
        });
        assert_eq!(sums[0], stats.hit);
        assert_eq!(sums.iter().sum::<u64>(), stats.needed);
        assert!(stats.needed > 0);
    }
    server.end();
    while LiveFrame::read(&mut stream).is_some() {}
}

#[test]
fn drafts_are_in_answers_metrics_and_the_feed() {
    let engine = drafting_engine(&moeflux_tales::FILES, 1, DraftMode::Always(2));
    let server = TestServer::serve(&engine, 4, ServerOptions::default());
    // An answer that repeats its prompt.
    let question = "Tell me the fable of The Fox and the Crow.";
    let mut messages = vec![json!({"role": "user", "content": question})];
    let ask = |messages: &[Value]| {
        let body = json!({"messages": messages, "max_tokens": 40, "temperature": 0});
        chat(&server, &body).json()
    };
    let fable = ask(&messages)["choices"][0]["message"]["content"].clone();
    messages.push(json!({"role": "assistant", "content": fable}));
    messages.push(json!({"role": "user", "content": question}));
    let answer = ask(&messages);
    let details = &answer["usage"]["completion_tokens_details"];
    let count = |name: &str| details[name].as_u64().unwrap_or_else(|| panic!("{answer}"));
    let (right, wrong) = (count("accepted_prediction_tokens"), count("rejected_prediction_tokens"));
    assert!(right > 0, "{answer}");
    let timings = &answer["timings"];
    assert_eq!(timings["draft_n"], right + wrong, "{answer}");
    assert_eq!(timings["draft_n_accepted"], right);
    server.wait_for(|core| core.stats().ended == 2);
    let stats = server.core.stats().steps;
    let metrics = get(&server, "/metrics").body;
    assert!(stats.accepted >= right && stats.drafted >= right + wrong);
    for (name, value) in [("drafted_tokens", stats.drafted), ("accepted_drafts", stats.accepted)] {
        let line = format!("\nmoeflux_{name}_total {value}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    let frame = LiveFrame::read(&mut feed(&server)).unwrap();
    let drafts = [stats.drafted as f64, stats.accepted as f64];
    assert_eq!(frame.values[DRAFTED..=ACCEPTED], drafts);
}

#[test]
fn the_plan_and_the_roof_of_the_disk_are_reported() {
    let server = TestServer::start(2, 4, "");
    let report = get(&server, "/moeflux/plan").json();
    let plan = server.core.engine().plan();
    assert_eq!((&report["model"], &report["sessions"]), (&json!("tales"), &json!(2)));
    assert_eq!((&report["context"], &report["disk_speed"]), (&json!(plan.context), &json!(null)));
    let host = &report["pools"][0];
    let lines = host["lines"].as_array().unwrap();
    let total: u64 = lines.iter().map(|line| line["bytes"].as_u64().unwrap()).sum();
    assert_eq!((&host["place"], total), (&json!("host"), plan.host().total()));
    let slots = lines.iter().find(|line| line["name"] == "slots").unwrap();
    assert_eq!(slots["count"], plan.host().slots());
    assert!(!get(&server, "/metrics").body.contains("disk_roof"));

    let core = ServingCore::start(server.core.engine(), ServingOptions::default()).unwrap();
    let measured = LoadedModel::new(core).disk_speed(Some(1e9));
    let server = TestServer::run(measured, ServerOptions::default());
    assert_eq!(get(&server, "/moeflux/plan").json()["disk_speed"], 1e9);
    let metrics = get(&server, "/metrics").body;
    for line in [
        "moeflux_disk_roof_bytes_per_second 1000000000",
        "moeflux_disk_roof_ratio 0",
        "moeflux_experts_prefetched_total{layer=\"0\"} 0",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
}
