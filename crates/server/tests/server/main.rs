//! The server over loopback, with the built-in model.

#![allow(clippy::unwrap_used, clippy::panic)]
// Requests with all fields.
#![recursion_limit = "256"]

mod anthropic;
mod chat;
mod client;
mod completions;
mod embeddings;
mod fim;
mod grammars;
mod hostile;
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
    thread::JoinHandle,
    time::{Duration, Instant},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest,
    runtime::DeviceOptions,
    serve::{ServingCore, ServingOptions},
};
use moeflux_server::{ApiKeys, Server, ServerError, ServerOptions, Stopper};

/// Context of the tests' engines.
const CONTEXT: usize = 2048;

/// Longest time for anything in a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// The model in these files.
fn engine(files: &[(&'static str, &'static [u8])], sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).context(CONTEXT).grammars(true);
    let device = DeviceOptions::default().name("cpu").threads(1).exact(true);
    let options = EngineOptions::default().memory(memory).device(device);
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
struct TestServer {
    address: SocketAddr,
    core: ServingCore,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
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

    fn serve_with(engine: &Engine, serving: ServingOptions, mut options: ServerOptions) -> Self {
        options.port = 0;
        Self::run(engine, serving, Server::bind(options).unwrap())
    }

    fn run(engine: &Engine, serving: ServingOptions, server: Server) -> Self {
        let core = ServingCore::start(engine, serving).unwrap();
        let (address, stopper) = (server.address(), server.stopper());
        let of_thread = core.clone();
        let thread = std::thread::spawn(move || server.run(of_thread, "tales".to_owned()));
        Self { address, core, stopper, thread: Some(thread) }
    }

    /// Waits until the core's statistics satisfy `condition`.
    fn wait_for(&self, condition: impl Fn(&ServingCore) -> bool) {
        let since = Instant::now();
        while !condition(&self.core) {
            assert!(since.elapsed() < PATIENCE, "{:?}", self.core.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the server and waits for its end.
    fn end(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stopper.stop();
    }
}
