//! Listening, and the graceful end.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use tokio::{
    runtime::Builder,
    select,
    sync::{Notify, watch},
    time::sleep,
};

use crate::{
    requests::models::Models,
    server_options::ServerOptions,
    server_router::{self, ServerRouter},
    transport::{
        connection_task::ConnectionOptions, connections::Connections, guard::Guard, refusal,
        server_error::ServerError, work,
    },
};

/// Threads that wait for clients.
const THREADS: usize = 2;

/// Pause after a connection could not be accepted, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that running answers have once the server stops.
const DRAIN: Duration = Duration::from_secs(30);

/// Time that threads have to end.
const THREADS_END: Duration = Duration::from_secs(1);

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
    has_signals: bool,
}

impl Server {
    /// Starts to listen.
    ///
    /// # Errors
    /// The address or an origin is open without a key, or the address cannot be listened at.
    pub fn bind(options: ServerOptions) -> Result<Self, ServerError> {
        let guard = server_router::guard(&options)?;
        let address = SocketAddr::new(options.host, options.port);
        let failed = |source| ServerError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stopper = Stopper::default();
        Ok(Self { listener, address, guard, options, stopper, has_signals: true })
    }

    /// Leaves signals to the program: only [`Server::stopper`] stops the server then.
    #[must_use]
    pub fn without_signals(self) -> Self {
        Self { has_signals: false, ..self }
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
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(work::threads())
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(ServerError::Runtime)?;
        let Self { listener, guard, options, stopper, has_signals, .. } = self;
        let router = ServerRouter::with_guard(guard, &options, models)?;
        let served = runtime.block_on(async {
            let listen = || ProcessSignals::listen().map_err(ServerError::Runtime);
            let process = has_signals.then(listen).transpose()?;
            serve(listener, Signals { stopper, process }, &options, &router).await
        });
        // Connections that are left end here, which cancels their requests.
        runtime.shutdown_timeout(THREADS_END);
        router.end();
        served
    }
}

/// Answers the requests of a listener's connections until it is stopped.
async fn serve(
    listener: TcpListener,
    mut signals: Signals,
    options: &ServerOptions,
    router: &ServerRouter,
) -> Result<(), ServerError> {
    let listener = tokio::net::TcpListener::from_std(listener).map_err(ServerError::Runtime)?;
    let (stop, stops) = watch::channel(false);
    let connections = Arc::new(Connections::new(options.connections));
    let options = ConnectionOptions::new(router.router(), options.timeouts, stops);
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
    router.stop();
    // An error says that there are no connections.
    let _ = stop.send(true);
    select! {
        () = stop.closed() => {}
        () = sleep(DRAIN) => {}
        () = signals.next() => {}
    }
    Ok(())
}

/// Requests to stop. Its listeners exist as long as the server: an event between two calls of
/// [`next`](Self::next) is not lost.
struct Signals {
    stopper: Stopper,
    /// Signals of the process, unless the program has them.
    process: Option<ProcessSignals>,
}

impl Signals {
    /// Waits for the next one.
    async fn next(&mut self) {
        let Self { stopper, process } = self;
        let of_process = async {
            match process {
                Some(process) => process.next().await,
                None => std::future::pending().await,
            }
        };
        select! {
            () = stopper.0.notified() => {}
            () = of_process => {}
        }
    }
}

/// Signals that end a process.
struct ProcessSignals {
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

impl ProcessSignals {
    #[cfg(unix)]
    fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (terminate, interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt })
    }

    #[cfg(windows)]
    fn listen() -> io::Result<Self> {
        use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};
        let (ctrl_c, ctrl_break) = (ctrl_c()?, ctrl_break()?);
        Ok(Self { ctrl_c, ctrl_break, close: ctrl_close()?, shutdown: ctrl_shutdown()? })
    }

    /// Waits for the next one.
    #[cfg(unix)]
    async fn next(&mut self) {
        select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
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
        }
    }
}
