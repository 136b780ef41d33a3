//! The stream of a connection, which notes what arrives and keeps back the library's own errors.
//!
//! hyper answers a head that it cannot read with an empty error. The stream takes that for sent and
//! remembers its status, so that the server can write an error in the shape of an API instead.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{access::REQUEST_ID, connections::Connection};

/// Most bytes of an error of hyper's own: status line, length, date.
const ERROR_BYTES: usize = 256;

/// Starts of such an error, whose version is that of the request before it.
const ERROR_STARTS: [&[u8]; 2] = [b"HTTP/1.1 4", b"HTTP/1.0 4"];

/// Bytes before the status.
const VERSION_BYTES: usize = 9;

/// End of a head.
const HEAD_END: &[u8] = b"\r\n\r\n";

/// A stream that tells its connection what arrives and what waits.
pub(crate) struct WatchedStream<S> {
    stream: S,
    connection: Arc<Connection>,
    /// Status of the error that was kept back.
    status: Option<u16>,
}

impl<S> WatchedStream<S> {
    pub(crate) fn new(stream: S, connection: Arc<Connection>) -> Self {
        Self { stream, connection, status: None }
    }

    /// Status of the error that hyper would have sent.
    pub(crate) fn kept_status(&self) -> Option<u16> {
        self.status
    }
}

/// Place of hyper's own error at the end of what it writes. Responses of the server have an id, and
/// no body of theirs ends like a head.
fn own_error(written: &[u8]) -> Option<usize> {
    let first = written.len().saturating_sub(ERROR_BYTES);
    let head = written[first..].strip_suffix(HEAD_END)?;
    let is_start = |bytes: &[u8]| ERROR_STARTS.contains(&bytes);
    let start = head.windows(VERSION_BYTES + 1).rposition(is_start)?;
    let head = &head[start..];
    let has_id = head
        .windows(REQUEST_ID.len())
        .any(|bytes| bytes.eq_ignore_ascii_case(REQUEST_ID.as_bytes()));
    let is_one = !head.windows(HEAD_END.len()).any(|bytes| bytes == HEAD_END);
    (is_one && !has_id).then_some(first + start)
}

/// Status of a response's head.
fn status_of(head: &[u8]) -> Option<u16> {
    let digits = head.get(VERSION_BYTES..VERSION_BYTES + 3)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = read {
            self.connection.received(&buf.filled()[before..]);
        }
        read
    }
}

/// Not vectored, so that hyper writes a response from one buffer, in order.
impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let end = match own_error(buf) {
            Some(0) => {
                self.status = status_of(buf);
                return Poll::Ready(Ok(buf.len()));
            }
            Some(start) => start,
            None => buf.len(),
        };
        let written = Pin::new(&mut self.stream).poll_write(cx, &buf[..end]);
        self.connection.waits_for_reader(written.is_pending());
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_librarys_own_errors_are_kept_back() {
        let error = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\
                      Content-Length: 0\r\nDate: Sat, 28 Nov 2026 12:00:00 GMT\r\n\r\n";
        let ours = b"HTTP/1.1 405 Method Not Allowed\r\nX-Request-Id: req_1\r\n\r\n";
        assert_eq!(own_error(error), Some(0));
        assert_eq!(status_of(error), Some(431));
        for before in [&b"0\r\n\r\n"[..], ours, b"{\"text\": \"HTTP/1.1 400 \"}"] {
            assert_eq!(own_error(&[before, error].concat()), Some(before.len()));
            assert_eq!(own_error(before), None);
            assert_eq!(own_error(&[error, before].concat()), None);
        }
        assert_eq!(own_error(b""), None);
        assert_eq!(own_error(b"\r\n\r\n"), None);
        assert_eq!(own_error(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), None);
    }
}
