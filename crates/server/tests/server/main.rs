//! The server over loopback, with the built-in model.

#![allow(clippy::unwrap_used, clippy::panic)]
// Requests with all fields.
#![recursion_limit = "256"]

mod anthropic;
mod call_forms;
mod chat;
mod client;
mod completions;
mod connections;
mod embeddings;
mod fields;
mod fim;
mod grammars;
mod hostile;
mod images;
mod in_memory;
mod models;
mod native;
mod ollama;
mod page;
mod requests;
mod responses;
mod soak;
mod tools;
mod turns;

use std::{
    net::SocketAddr,
    ops::{Deref, DerefMut},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest,
    runtime::DeviceOptions,
    serve::{ServingCore, ServingOptions},
    session::DraftMode,
};
use moeflux_server::{ApiKeys, LoadedModel, Models, Server, ServerError, ServerOptions, Stopper};

/// Context of the tests' engines.
const CONTEXT: usize = 2048;

/// Longest time for anything in a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// The model in these files.
fn engine(files: &[(&'static str, &'static [u8])], sessions: usize) -> Engine {
    drafting_engine(files, sessions, DraftMode::Off)
}

/// The same, with drafts.
fn drafting_engine(
    files: &[(&'static str, &'static [u8])],
    sessions: usize,
    draft: DraftMode,
) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).context(CONTEXT).grammars(true);
    let device = DeviceOptions::default().name("cpu").threads(1).exact(true);
    let options = EngineOptions::default().memory(memory).device(device).draft(draft);
    Engine::open(Checkpoint::embedded(files).unwrap(), options, &mut |_, _| {}).unwrap()
}

/// Pseudo-random numbers, by xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

/// A running server. Stops when it is dropped.
struct RunningServer {
    address: SocketAddr,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
}

impl RunningServer {
    fn start(mut options: ServerOptions, models: Models) -> Self {
        options.port = 0;
        let server = Server::bind(options).unwrap();
        let (address, stopper) = (server.address(), server.stopper());
        let thread = std::thread::spawn(move || server.run(models));
        Self { address, stopper, thread: Some(thread) }
    }

    /// Stops the server and waits for its end.
    fn end(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.stopper.stop();
    }
}

/// A running server of one model.
struct TestServer {
    core: ServingCore,
    running: RunningServer,
}

impl Deref for TestServer {
    type Target = RunningServer;

    fn deref(&self) -> &RunningServer {
        &self.running
    }
}

impl DerefMut for TestServer {
    fn deref_mut(&mut self) -> &mut RunningServer {
        &mut self.running
    }
}

impl TestServer {
    fn start(sessions: usize, waiting: usize, keys: &str) -> Self {
        let mut options = ServerOptions::default();
        options.keys = ApiKeys::from_lines(keys);
        Self::serve(&engine(&moeflux_tales::FILES, sessions), waiting, options)
    }

    fn serve(engine: &Engine, waiting: usize, options: ServerOptions) -> Self {
        Self::serve_with(engine, ServingOptions::default().waiting(waiting), options)
    }

    fn serve_with(engine: &Engine, serving: ServingOptions, options: ServerOptions) -> Self {
        Self::run(LoadedModel::new(ServingCore::start(engine, serving).unwrap()), options)
    }

    fn run(model: LoadedModel, options: ServerOptions) -> Self {
        let core = model.core.clone();
        Self { core, running: RunningServer::start(options, Models::one("tales", model).unwrap()) }
    }

    /// Waits until the core's statistics satisfy `condition`.
    fn wait_for(&self, condition: impl Fn(&ServingCore) -> bool) {
        wait_until(|| condition(&self.core));
    }
}

/// Waits until `condition` holds.
fn wait_until(mut condition: impl FnMut() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(since.elapsed() < PATIENCE, "the condition does not hold in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}
