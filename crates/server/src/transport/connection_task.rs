//! A connection from its first byte to its end.

use std::{
    convert::Infallible,
    future::poll_fn,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::{Bytes, HttpBody},
    extract::Request,
    response::Response,
};
use http_body::{Frame, SizeHint};
use hyper::{
    body::Incoming,
    server::conn::http1::{Builder, Parts},
    service::Service,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    select,
    sync::watch::Receiver,
    time::timeout,
};

use super::{
    connections::{Connection, OpenConnection},
    guarded_body::GuardedBody,
    refusal::{HEAD_BYTES, UnreadHead},
    timed_stream::TimedStream,
    timeouts::Timeouts,
    watched_stream::WatchedStream,
    work::PeerAddress,
};

/// Most bytes of a response that wait for a slow reader.
const BUFFER_BYTES: usize = 64 << 10;

/// Most bytes of a refused request that are discarded, and the time for it. A client that still
/// sends when its connection is closed sees a reset in place of the refusal.
const DISCARD_BYTES: usize = 16 << 20;
const DISCARD_TIME: Duration = Duration::from_millis(500);

/// Bytes that are discarded at once.
const DISCARD_PIECE: usize = 8 << 10;

/// The stream of a connection.
type ClientStream = WatchedStream<TimedStream<TcpStream>>;

/// Settings that all connections share.
#[derive(Clone)]
pub(crate) struct ConnectionOptions {
    http: Builder,
    routes: TowerToHyperService<Router>,
    timeouts: Timeouts,
    /// Whether the server stops.
    stops: Receiver<bool>,
}

impl ConnectionOptions {
    pub(crate) fn new(routes: Router, timeouts: Timeouts, stops: Receiver<bool>) -> Self {
        let mut http = Builder::new();
        // Some clients look headers up by case.
        http.title_case_headers(true);
        http.timer(TokioTimer::new()).header_read_timeout(timeouts.headers);
        http.max_header_size(HEAD_BYTES).max_buf_size(BUFFER_BYTES).writev(false);
        Self { http, routes: TowerToHyperService::new(routes), timeouts, stops }
    }

    /// Serves the requests of a client until the connection ends. It ends at once without a running
    /// answer, when another one needs its place or the server stops.
    pub(crate) async fn serve(self, stream: TcpStream, open: OpenConnection) {
        let Self { http, routes, timeouts, mut stops } = self;
        // Tokens are small and must not wait for each other. Without it they are only later.
        let _ = stream.set_nodelay(true);
        // A connection that is closed already has no address.
        let peer = stream.peer_addr().ok();
        let stream = TimedStream::new(stream, timeouts.write);
        let stream = WatchedStream::new(stream, Arc::clone(&open.0));
        let service = ConnectionService { routes, connection: Arc::clone(&open.0), peer };
        let mut served = http.serve_connection(TokioIo::new(stream), service);
        let mut is_stopping = false;
        let end = loop {
            select! {
                // A request that has arrived is answered before the server stops.
                biased;
                end = poll_fn(|cx| served.poll_without_shutdown(cx)) => break end,
                () = open.0.ended() => return,
                _ = stops.wait_for(|stops| *stops), if !is_stopping => {
                    if !open.0.is_answering() {
                        return;
                    }
                    is_stopping = true;
                    Pin::new(&mut served).graceful_shutdown();
                }
            }
        };
        let Parts { io, read_buf, .. } = served.into_parts();
        let stream: ClientStream = io.into_inner();
        select! {
            () = close(stream, end, &read_buf, &open.0) => {}
            () = open.0.ended() => {}
        }
    }
}

/// Closes a connection. A request that could not be read gets its error first.
async fn close(
    mut stream: ClientStream,
    end: hyper::Result<()>,
    unread: &[u8],
    connection: &Connection,
) {
    let refusal = end.err().and_then(|error| {
        let start = connection.start_of_head();
        let start = if start.is_empty() { unread } else { &start };
        UnreadHead { error: &error, status: stream.kept_status(), start }.response()
    });
    let mut left = refusal.as_deref().unwrap_or_default();
    while !left.is_empty() {
        match poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, left)).await {
            Ok(written @ 1..) => left = left.get(written..).unwrap_or_default(),
            // A failed connection is its client's.
            _ => return,
        }
    }
    let is_shut = poll_fn(|cx| Pin::new(&mut stream).poll_shutdown(cx)).await.is_ok();
    if is_shut && refusal.is_some() {
        let _ = timeout(DISCARD_TIME, discard(stream)).await;
    }
}

/// Reads what a client still sends.
async fn discard(mut stream: ClientStream) {
    let (mut piece, mut left) = ([0; DISCARD_PIECE], DISCARD_BYTES);
    while left > 0 {
        let mut buf = ReadBuf::new(&mut piece);
        let read = poll_fn(|cx| Pin::new(&mut stream).poll_read(cx, &mut buf)).await;
        match buf.filled().len() {
            1.. if read.is_ok() => left = left.saturating_sub(buf.filled().len()),
            _ => return,
        }
    }
}

/// The routes, with the connection in each request.
#[derive(Clone)]
struct ConnectionService {
    routes: TowerToHyperService<Router>,
    connection: Arc<Connection>,
    /// Address of the client.
    peer: Option<SocketAddr>,
}

impl Service<Request<Incoming>> for ConnectionService {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let connection = Arc::clone(&self.connection);
        match request.body().is_end_stream() {
            true => connection.begin_answer(),
            false => connection.begin_body(),
        }
        request.extensions_mut().insert(Arc::clone(&connection));
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(PeerAddress(peer));
        }
        let request =
            request.map(|body| WatchedRequest { body, connection: Arc::clone(&self.connection) });
        let response = self.routes.call(request);
        Box::pin(async move {
            let response = response.await?;
            connection.begin_answer();
            Ok(response.map(|body| GuardedBody::guard(body, RunningAnswer(connection))))
        })
    }
}

/// Body of a request, whose end the connection notes.
struct WatchedRequest {
    body: Incoming,
    connection: Arc<Connection>,
}

impl HttpBody for WatchedRequest {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.connection.begin_answer();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A running answer, whose end the connection notes.
struct RunningAnswer(Arc<Connection>);

impl Drop for RunningAnswer {
    fn drop(&mut self) {
        self.0.end_answer();
    }
}
