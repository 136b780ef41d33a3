//! Serves a checkpoint whose answers are those of a script, for tests of clients and tools without
//! trained weights. The tokens take the way of any others: sampler, masks, scheduler, dialect and
//! encoders.
//!
//! `cargo run --release -p moeflux-server --example scripted -- --script FILE.json [--model DIR]
//! [--port N] [--ctx N]`; without a folder, the embedded model. The script is a list of texts in
//! the model's own syntax, special tokens included. Requests take them in order, and the last one
//! again and again.
#![allow(clippy::print_stdout, reason = "address and requests are for people")]

use std::{collections::HashMap, env, error::Error, fs, path::Path, sync::Arc};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest,
    serve::{ForcedTokens, ServingCore, ServingOptions},
};
use moeflux_server::{LoadedModel, Models, RequestLog, RequestRecord, Server, ServerOptions};

/// Requests that are answered at once.
const SESSIONS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let (pairs, rest) = args.as_chunks::<2>();
    let args: HashMap<&str, &str> =
        pairs.iter().map(|[name, value]| (name.as_str(), value.as_str())).collect();
    let known = ["--script", "--model", "--port", "--ctx"];
    if !rest.is_empty() || args.keys().any(|name| !known.contains(name)) {
        return Err("the flags are --script FILE, --model DIR, --port N and --ctx N".into());
    }
    let script = args.get("--script").ok_or("--script FILE is missing")?;
    let script: Vec<String> = serde_json::from_slice(&fs::read(script)?)?;

    let checkpoint = match args.get("--model") {
        Some(folder) => Checkpoint::open(Path::new(folder))?,
        None => Checkpoint::embedded(&moeflux_tales::FILES)?,
    };
    let mut memory = MemoryRequest::default().sessions(SESSIONS).grammars(true);
    if let Some(context) = args.get("--ctx") {
        memory = memory.context(context.parse::<usize>()?);
    }
    let options = EngineOptions::default().memory(memory);
    let engine = Engine::open(checkpoint, options, &mut |_, _| {})?;
    let tokenizer = engine.text()?.tokenizer();
    let answers = script.iter().map(|answer| tokenizer.encode(answer, false));
    let answers = answers.collect::<Result<Vec<_>, _>>()?;
    let end = *engine.end_tokens().ids().first().ok_or("the model has no end token")?;

    let mut options = ServerOptions::default();
    options.port = args.get("--port").map_or(Ok(options.port), |port| port.parse())?;
    options.masks = vec![Arc::new(ForcedTokens::new(answers, end))];
    options.log = RequestLog::new(|request| {
        let RequestRecord { method, path, status, time, .. } = request;
        println!("{method} {path} {status} {:.2} s", time.as_secs_f64());
    });
    let server = Server::bind(options)?;
    println!("the script is served at http://{}/v1", server.address());
    let core = ServingCore::start(&engine, ServingOptions::default())?;
    server.run(Models::one("scripted", LoadedModel::new(core))?)?;
    Ok(())
}
