//! A server on the loopback that has the Hub's API, and its faults.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use sha1::{Digest as _, Sha1};
use sha2::Sha256;

/// How the server departs from one that always works.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Each connection breaks after this many bytes of a file.
    pub(crate) breaks_after: Option<u64>,
    /// Pause after each 64 KiB.
    pub(crate) pause: Option<Duration>,
    /// This many requests for files get the status first.
    pub(crate) status: Option<(u16, usize)>,
    /// The status begins after this many requests for files.
    pub(crate) gone_after: Option<usize>,
    /// `Retry-After` of answers with `status`, and of the list with `list_status`.
    pub(crate) retry_after: Option<u64>,
    /// A byte of the list comes after each such pause.
    pub(crate) list_pause: Option<Duration>,
    /// Status of the list of files.
    pub(crate) list_status: Option<u16>,
    /// Paths with this start get an HTML page.
    pub(crate) pages: Option<&'static str>,
    /// Where the list is redirected to, once.
    pub(crate) list_location: Option<String>,
    /// Header without which nothing is asked of the server as a proxy.
    pub(crate) proxy_authorization: Option<&'static str>,
    /// Text of the list in place of the true one.
    pub(crate) list: Option<Arc<Vec<u8>>>,
    /// Files are redirected to this server.
    pub(crate) redirect: Option<SocketAddr>,
    /// Ranges are ignored: the whole file is sent.
    pub(crate) ignores_ranges: bool,
    /// The list says sizes larger by this.
    pub(crate) list_size_error: u64,
    /// `Content-Range` says sizes larger by this.
    pub(crate) range_size_error: u64,
    /// `Content-Range` begins this much later.
    pub(crate) range_start_error: u64,
    /// The list has neither sizes nor digests.
    pub(crate) bare_list: bool,
    /// Bytes of files are wrong, their sizes right.
    pub(crate) flips_bytes: bool,
    /// A token without which access is denied.
    pub(crate) token: Option<String>,
    /// Names in the list in place of the true ones.
    pub(crate) listed_name: Option<String>,
    /// After this many requests for files, they have other contents.
    pub(crate) changes_after: Option<usize>,
    /// Redirects lead in a circle.
    pub(crate) circle: bool,
}

/// Contents of a file, with their digest: computing it takes longer than many a request.
#[derive(Clone, Debug)]
struct ServedFile {
    bytes: Arc<Vec<u8>>,
    tag: String,
}

impl ServedFile {
    fn new(bytes: Vec<u8>) -> Self {
        Self { tag: tag(&bytes), bytes: Arc::new(bytes) }
    }

    /// The contents after a change.
    fn changed(&self, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = self.bytes.to_vec();
        change(&mut bytes);
        bytes
    }
}

#[derive(Debug)]
struct State {
    files: BTreeMap<String, ServedFile>,
    faults: Mutex<Faults>,
    requests: AtomicUsize,
    /// Requests to it as a proxy.
    proxied: AtomicUsize,
    sent: AtomicU64,
    /// Whether a server of another origin was shown a token.
    leaked: AtomicBool,
    serves_any_path: AtomicBool,
}

/// The server. It ends with the process.
#[derive(Clone, Debug)]
pub(crate) struct FakeHub {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
}

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl FakeHub {
    pub(crate) fn start(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let files = files.iter();
        let files = files.map(|(name, bytes)| ((*name).to_owned(), ServedFile::new(bytes.clone())));
        let state = Arc::new(State {
            files: files.collect(),
            faults: Mutex::default(),
            requests: AtomicUsize::new(0),
            proxied: AtomicUsize::new(0),
            sent: AtomicU64::new(0),
            leaked: AtomicBool::new(false),
            serves_any_path: AtomicBool::new(false),
        });
        let hub = Self { address, state };
        let server = hub.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                thread::spawn(move || server.connection(stream));
            }
        });
        hub
    }

    pub(crate) fn set(&self, faults: Faults) {
        *self.state.faults.lock().unwrap() = faults;
    }

    /// Makes this the server that another one's redirects lead to.
    pub(crate) fn serve_any_path(&self) {
        self.state.serves_any_path.store(true, Ordering::Relaxed);
    }

    /// Bytes of files that were sent.
    pub(crate) fn sent(&self) -> u64 {
        self.state.sent.load(Ordering::Relaxed)
    }

    /// Requests for files.
    pub(crate) fn requests(&self) -> usize {
        self.state.requests.load(Ordering::Relaxed)
    }

    /// Requests to the server as a proxy.
    pub(crate) fn proxied(&self) -> usize {
        self.state.proxied.load(Ordering::Relaxed)
    }

    pub(crate) fn has_leaked_token(&self) -> bool {
        self.state.leaked.load(Ordering::Relaxed)
    }

    fn connection(&self, stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        while let Some(mut request) = Request::read(&mut reader) {
            if let Some(path) = request.path.strip_prefix("http://hub.invalid") {
                assert_eq!(request.header("host"), Some("hub.invalid"));
                request.path = path.to_owned();
                request.is_proxied = true;
                self.state.proxied.fetch_add(1, Ordering::Relaxed);
            }
            if self.answer(&request, &mut stream).is_none() {
                return;
            }
        }
    }

    /// `None` ends the connection.
    fn answer(&self, request: &Request, stream: &mut TcpStream) -> Option<()> {
        let faults = self.state.faults.lock().unwrap().clone();
        if request.method == "CONNECT" {
            return plain(stream, 405, "", b"plain HTTP has no tunnel");
        }
        if request.is_proxied && request.header("proxy-authorization") != faults.proxy_authorization
        {
            return plain(stream, 407, "", b"who?");
        }
        if faults.pages.is_some_and(|start| request.path.starts_with(start)) {
            return plain(stream, 200, "Content-Type: text/html; charset=utf-8\r\n", b"<html>");
        }
        let token = faults.token.as_ref().map(|token| format!("Bearer {token}"));
        if token.is_some() && request.header("authorization") != token.as_deref() {
            return plain(stream, 401, "", b"denied");
        }
        if request.path.starts_with("/api/models/org/model/revision/") {
            let status = faults.list_status.unwrap_or(200);
            let location = faults.list_location.as_ref();
            if let Some(location) = location.filter(|to| !to.ends_with(&request.path)) {
                return plain(stream, 302, &format!("Location: {location}\r\n"), b"");
            }
            let retry = faults.retry_after.map(|seconds| format!("Retry-After: {seconds}\r\n"));
            let retry = retry.unwrap_or_default();
            let list = self.list(&faults);
            let list = faults.list.as_ref().map_or(list.as_bytes(), |list| list);
            let Some(pause) = faults.list_pause else { return plain(stream, status, &retry, list) };
            for byte in format!("HTTP/1.1 200 X\r\nContent-Length: {}\r\n\r\n", 9999).bytes() {
                // The head comes at once, unless nothing does.
                if pause > Duration::from_secs(1) {
                    thread::sleep(pause);
                }
                stream.write_all(&[byte]).ok()?;
            }
            for &byte in list {
                thread::sleep(pause);
                stream.write_all(&[byte]).ok()?;
            }
            return None;
        }
        let name = match self.state.serves_any_path.load(Ordering::Relaxed) {
            true => {
                let leaks = request.header("authorization").is_some();
                self.state.leaked.fetch_or(leaks, Ordering::Relaxed);
                request.path.rsplit('/').next()
            }
            false => request.path.strip_prefix(&format!("/org/model/resolve/{COMMIT}/")),
        };
        let Some(name) = name else { return plain(stream, 404, "", b"no such model") };
        let count = self.state.requests.fetch_add(1, Ordering::Relaxed);
        if let Some((status, times)) = faults.status
            && count < times
            && faults.gone_after.is_none_or(|after| count >= after)
        {
            let retry = faults.retry_after.map(|seconds| format!("Retry-After: {seconds}\r\n"));
            return plain(stream, status, &retry.unwrap_or_default(), b"later");
        }
        let Some(mut file) = self.state.files.get(name).cloned() else {
            return plain(stream, 404, "", b"no such file");
        };
        if faults.changes_after.is_some_and(|after| count >= after) {
            file = ServedFile::new(file.changed(|bytes| bytes.push(7)));
        }
        if faults.circle {
            return plain(stream, 302, &format!("Location: {}\r\n", request.path), b"");
        }
        if let Some(to) = faults.redirect {
            let head = format!(
                "Location: http://{to}/cdn/{name}\r\nX-Linked-Etag: \"{}\"\r\n\
                 X-Linked-Size: {}\r\nX-Repo-Commit: {COMMIT}\r\n",
                file.tag,
                file.bytes.len()
            );
            return plain(stream, 302, &head, b"");
        }
        if faults.flips_bytes {
            let flip = |bytes: &mut Vec<u8>| bytes.iter_mut().for_each(|byte| *byte ^= 1);
            file.bytes = Arc::new(file.changed(flip));
        }
        self.file(request, stream, &file, &faults)
    }

    fn file(
        &self,
        request: &Request,
        stream: &mut TcpStream,
        ServedFile { bytes, tag }: &ServedFile,
        faults: &Faults,
    ) -> Option<()> {
        let size = bytes.len() as u64;
        let range = request.header("range").filter(|_| !faults.ignores_ranges).map(|range| {
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            (first.parse::<u64>().unwrap(), last.parse::<u64>().unwrap().min(size - 1))
        });
        let (status, part, head) = match range {
            None => (200, &bytes[..], String::new()),
            Some((first, last)) => {
                let total = size + faults.range_size_error;
                let shown = first + faults.range_start_error;
                let head = format!("Content-Range: bytes {shown}-{last}/{total}\r\n");
                (206, &bytes[first as usize..=last as usize], head)
            }
        };
        let head = format!(
            "HTTP/1.1 {status} OK\r\nETag: \"{tag}\"\r\nAccept-Ranges: bytes\r\n{head}\
             Content-Length: {}\r\n\r\n",
            part.len()
        );
        stream.write_all(head.as_bytes()).ok()?;
        if request.method == "HEAD" {
            return Some(());
        }
        let mut sent = 0;
        for piece in part.chunks(64 << 10) {
            let rest = faults.breaks_after.map_or(u64::MAX, |limit| limit - sent);
            let piece = &piece[..piece.len().min(rest as usize)];
            stream.write_all(piece).ok()?;
            sent += piece.len() as u64;
            self.state.sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
            if faults.breaks_after == Some(sent) {
                return None;
            }
            if let Some(pause) = faults.pause {
                thread::sleep(pause);
            }
        }
        Some(())
    }

    fn list(&self, faults: &Faults) -> String {
        let entries = self.state.files.iter().map(|(name, ServedFile { bytes, tag })| {
            let name = faults.listed_name.as_ref().unwrap_or(name);
            let name = serde_json::to_string(name).unwrap();
            let size = bytes.len() as u64 + faults.list_size_error;
            match (faults.bare_list, is_large(bytes)) {
                (true, _) => format!(r#"{{"rfilename": {name}}}"#),
                (false, true) => format!(
                    r#"{{"rfilename": {name}, "size": {size}, "blobId": "{COMMIT}",
                         "lfs": {{"sha256": "{tag}", "size": {size}, "pointerSize": 134}}}}"#
                ),
                (false, false) => {
                    format!(r#"{{"rfilename": {name}, "size": {size}, "blobId": "{tag}"}}"#)
                }
            }
        });
        let entries: Vec<_> = entries.collect();
        format!(r#"{{"sha": "{COMMIT}", "siblings": [{}]}}"#, entries.join(", "))
    }
}

/// A request without a body.
struct Request {
    method: String,
    path: String,
    is_proxied: bool,
    headers: Vec<(String, String)>,
}

impl Request {
    fn read(reader: &mut impl BufRead) -> Option<Self> {
        let mut line = String::new();
        if reader.take(64 << 10).read_line(&mut line).ok()? == 0 {
            return None;
        }
        let mut words = line.split_whitespace();
        let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Some(Self { method, path, is_proxied: false, headers })
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

fn plain(stream: &mut TcpStream, status: u16, head: &str, body: &[u8]) -> Option<()> {
    let head = format!("HTTP/1.1 {status} X\r\n{head}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body).ok()
}

/// Whether the Hub keeps such a file apart from git.
fn is_large(bytes: &[u8]) -> bool {
    bytes.len() > 10_000
}

/// Digest of a file, as the Hub names it.
pub(crate) fn tag(bytes: &[u8]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    match is_large(bytes) {
        true => hex(&Sha256::digest(bytes)),
        false => {
            let head = format!("blob {}\0", bytes.len());
            hex(&Sha1::digest([head.as_bytes(), bytes].concat()))
        }
    }
}
