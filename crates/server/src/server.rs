//! Listening, and the graceful end.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use moeflux::{Error, text::MaskSource};
use tokio::{
    runtime::Builder,
    select,
    sync::{Notify, watch},
    time::sleep,
};

use crate::{
    access::RequestLog,
    allowed::{AllowedHost, AllowedOrigin},
    app::{App, RequestMemory},
    connection_task::ConnectionOptions,
    connections::Connections,
    form::FormRules,
    guard::{ApiKeys, Guard},
    models::{AnswerOptions, ModelRegistry, Models},
    overflow::Overflow,
    refusal,
    responses::RESPONSES_BYTES,
    routes,
    turns::TURNS_BYTES,
    work,
};

/// Threads that wait for clients.
const THREADS: usize = 2;

/// Default connections at once.
const CONNECTIONS: usize = 512;

/// Pause after a connection could not be accepted, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that running answers have once the server stops.
const DRAIN: Duration = Duration::from_secs(30);

/// Time that threads have to end.
const THREADS_END: Duration = Duration::from_secs(1);

/// Bytes for requests that are being read: their bodies, fields and prompts. A sixteenth of the
/// budget within these bounds.
const REQUEST_BYTES: (u64, u64) = (80 << 20, 1 << 30);
const REQUEST_SHARE: u64 = 16;

/// Bytes of the memory plan for requests that are being read
/// ([`ServerOptions::request_memory`]), with `budget` bytes for the process.
pub fn request_memory(budget: u64) -> u64 {
    let (least, most) = REQUEST_BYTES;
    (budget / REQUEST_SHARE).clamp(least, most)
}

/// Bytes that a server holds beside its engine, for the memory plan
/// ([`MemoryRequest::reserved`](moeflux::MemoryRequest::reserved)), with `budget` bytes for the
/// process: requests that are being read ([`request_memory`]), remembered turns and stored
/// responses; stacks and queues; buffers of the connections that are likely at once.
pub fn reserved_bytes(budget: u64) -> u64 {
    request_memory(budget) + (TURNS_BYTES + RESPONSES_BYTES) as u64 + (16 << 20)
}

/// Options of a [`Server`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Address to listen at; default 127.0.0.1.
    pub host: IpAddr,
    /// Port; 0 is any free one. Default 8080.
    pub port: u16,
    /// Keys, one of which a request must have. Default: none.
    pub keys: ApiKeys,
    /// Whether an address that other machines reach may be open without keys. Default: no.
    pub no_key: bool,
    /// Hosts that are allowed in the headers Host and Origin, beside the local machine's names.
    pub allow_hosts: Vec<AllowedHost>,
    /// Origins of pages and apps that may send requests and read responses, beside those of these
    /// hosts. Origins of anybody's pages, such as `null`, need keys.
    pub allow_origins: Vec<AllowedOrigin>,
    /// Receiver of a record of each request. Default: none.
    pub log: RequestLog,
    /// Masks of all answers, applied last. Default: none.
    pub masks: Vec<Arc<dyn MaskSource>>,
    /// Rule for a prompt over the context, unless its request says it.
    pub overflow: Overflow,
    /// Whether keywords of schemas that cannot be enforced are left out and named in the header
    /// `x-moeflux-notes`, instead of an error. Default: no.
    pub lenient_schemas: bool,
    /// Whether an object may have properties that its schema does not list, if it says nothing of
    /// them. Default: no.
    pub open_objects: bool,
    /// Times that clients have.
    pub timeouts: Timeouts,
    /// Bytes for requests that are being read: see [`request_memory`]. Default 80 MiB.
    pub request_memory: u64,
    /// Returns freed memory to the system, after a large request. Default: does nothing.
    pub give_back: fn(),
    /// Connections at once, beside a sixteenth in reserve for short requests; default 512. One
    /// without a running answer ends when another needs its place.
    pub connections: usize,
}

/// Times that clients have.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Timeouts {
    /// Time in which the headers of a request must arrive; default 30 seconds.
    pub headers: Duration,
    /// Time in which a body must arrive; default one minute.
    pub body: Duration,
    /// Time without progress after which a connection whose client does not read is closed; default
    /// one minute.
    pub write: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let minute = Duration::from_secs(60);
        Self { headers: Duration::from_secs(30), body: minute, write: minute }
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            host: Ipv4Addr::LOCALHOST.into(),
            port: 8080,
            keys: ApiKeys::default(),
            no_key: false,
            allow_hosts: Vec::new(),
            allow_origins: Vec::new(),
            log: RequestLog::default(),
            masks: Vec::new(),
            overflow: Overflow::default(),
            lenient_schemas: false,
            open_objects: false,
            timeouts: Timeouts::default(),
            request_memory: REQUEST_BYTES.0,
            give_back: || {},
            connections: CONNECTIONS,
        }
    }
}

/// Failure of a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Address that other machines reach, without keys.
    #[error(
        "{address} can be reached from other machines, and there is no key: give \
         --api-key-file FILE, or --no-key to let everybody in"
    )]
    OpenWithoutKey {
        /// The address.
        address: IpAddr,
    },
    /// Origin that pages of anybody have, without keys.
    #[error(
        "--allow-origin {origin} lets pages of anybody send requests, and there is no key: give \
         --api-key-file FILE"
    )]
    OriginWithoutKey {
        /// The origin.
        origin: AllowedOrigin,
    },
    /// Address that cannot be listened at.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Folder of turns that cannot be used.
    #[error("{}: the folder of answers cannot be opened: {source}", path.display())]
    TurnFolder {
        /// The folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Failure to start the threads that wait for clients.
    #[error("cannot start the server's threads: {0}")]
    Runtime(io::Error),
    /// Failure of the engine.
    #[error(transparent)]
    Engine(#[from] Error),
}

/// Stops a server. Clones stop the same one.
#[derive(Clone, Debug, Default)]
pub struct Stopper(Arc<Notify>);

impl Stopper {
    /// Ends the server: running answers are completed, for at most 30 seconds; connections without
    /// one end at once. A second call ends all.
    pub fn stop(&self) {
        self.0.notify_one();
    }
}

/// A server that listens. Connections wait until it runs.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    guard: Guard,
    options: ServerOptions,
    stopper: Stopper,
}

impl Server {
    /// Starts to listen.
    ///
    /// # Errors
    /// The address or an origin is open without a key, or the address cannot be listened at.
    pub fn bind(mut options: ServerOptions) -> Result<Self, ServerError> {
        let keys = std::mem::take(&mut options.keys);
        let guard = Guard::new(options.host, keys, options.no_key, &options.allow_hosts)?;
        let guard = guard.origins(&options.allow_origins)?;
        let address = SocketAddr::new(options.host, options.port);
        let failed = |source| ServerError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, guard, options, stopper: Stopper::default() })
    }

    /// Address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the server from another thread.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves `models` until it is stopped, or the process receives SIGTERM or Ctrl-C. Ends the
    /// serving core of the loaded model. A model that is being loaded then is loaded in vain, on a
    /// thread that outlives this call.
    ///
    /// # Errors
    /// The folder of answers of a loaded model cannot be opened, or threads cannot be started.
    pub fn run(self, models: Models) -> Result<(), ServerError> {
        let bytes = usize::try_from(self.options.request_memory).unwrap_or(usize::MAX);
        let memory = RequestMemory { bytes, give_back: self.options.give_back };
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(work::threads())
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(ServerError::Runtime)?;
        let ServerOptions { masks, overflow, lenient_schemas, open_objects, .. } = &self.options;
        let (masks, overflow) = (masks.clone(), *overflow);
        let forms = FormRules { lenient: *lenient_schemas, open_objects: *open_objects };
        let options = AnswerOptions { masks, overflow, forms, ..AnswerOptions::default() };
        let models = ModelRegistry::start(models, options)?;
        let served = runtime.block_on(self.serve(Arc::clone(&models), memory));
        // Connections that are left end here, which cancels their requests.
        runtime.shutdown_timeout(THREADS_END);
        models.end();
        served
    }

    async fn serve(
        self,
        models: Arc<ModelRegistry>,
        memory: RequestMemory,
    ) -> Result<(), ServerError> {
        let Self { listener, guard, options, stopper, .. } = self;
        let ServerOptions { log, timeouts, connections, .. } = options;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(ServerError::Runtime)?;
        let mut signals = Signals::listen(stopper).map_err(ServerError::Runtime)?;
        let app = App::new(Arc::clone(&models), guard, memory).log(log).body_time(timeouts.body);
        let (stop, stops) = watch::channel(false);
        let options = ConnectionOptions::new(routes::router(Arc::new(app)), timeouts, stops);
        let connections = Arc::new(Connections::new(connections));
        loop {
            let accepted = select! {
                accepted = listener.accept() => accepted,
                () = signals.next() => break,
            };
            let Ok((stream, peer)) = accepted else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            match connections.admit(peer.ip()) {
                Some(open) => drop(tokio::spawn(options.clone().serve(stream, open))),
                // The buffer of a new connection has room.
                None => drop(stream.try_write(&refusal::no_place())),
            }
        }
        drop((listener, options));
        models.stop();
        // An error says that there are no connections.
        let _ = stop.send(true);
        select! {
            () = stop.closed() => {}
            () = sleep(DRAIN) => {}
            () = signals.next() => {}
        }
        Ok(())
    }
}

/// Requests to stop. Its listeners exist as long as the server: an event between two calls of
/// [`next`](Self::next) is not lost.
struct Signals {
    stopper: Stopper,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(windows)]
    ctrl_c: tokio::signal::windows::CtrlC,
    #[cfg(windows)]
    ctrl_break: tokio::signal::windows::CtrlBreak,
    /// The console window is closed: the system ends the process five seconds later.
    #[cfg(windows)]
    close: tokio::signal::windows::CtrlClose,
    #[cfg(windows)]
    shutdown: tokio::signal::windows::CtrlShutdown,
}

impl Signals {
    #[cfg(unix)]
    fn listen(stopper: Stopper) -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (terminate, interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { stopper, terminate, interrupt })
    }

    #[cfg(windows)]
    fn listen(stopper: Stopper) -> io::Result<Self> {
        use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};
        let (ctrl_c, ctrl_break) = (ctrl_c()?, ctrl_break()?);
        Ok(Self { stopper, ctrl_c, ctrl_break, close: ctrl_close()?, shutdown: ctrl_shutdown()? })
    }

    /// Waits for the next one.
    #[cfg(unix)]
    async fn next(&mut self) {
        select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            () = self.stopper.0.notified() => {}
        }
    }

    /// Waits for the next one.
    #[cfg(windows)]
    async fn next(&mut self) {
        select! {
            _ = self.ctrl_c.recv() => {}
            _ = self.ctrl_break.recv() => {}
            _ = self.close.recv() => {}
            _ = self.shutdown.recv() => {}
            () = self.stopper.0.notified() => {}
        }
    }
}
