//! HTTP requests to the server: redirects, the token, repeated tries.

use std::{
    fmt,
    io::{self, BufRead, BufReader, Read},
    ops::Range,
    time::Duration,
};

use ureq::{Agent, http, unversioned::resolver::DefaultResolver};

use crate::{
    error::HubError,
    json,
    proxies::{NamedProxy, Proxies, ProxyConnector},
    settings::Settings,
    tls,
    waits::{Received, Waits},
};

/// Redirects of a request, at most.
const MAX_REDIRECTS: usize = 8;

/// Connections that are kept for further requests, at most.
const MAX_IDLE: usize = 64;

/// Time for a connection to be made, and for a silent one to send a byte.
const SILENCE: Duration = Duration::from_secs(30);

/// The answer that a list or an index is, in errors.
const JSON: &str = "JSON";

/// The answer that a file is, in errors.
const FILE: &str = "a file";

/// Client of one server.
#[derive(Clone)]
pub(crate) struct Client {
    agent: Agent,
    proxies: Proxies,
    endpoint: String,
    token: Option<String>,
    pub(crate) waits: Waits,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Tokens and passwords are not for logs.
        f.debug_struct("Client").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// Headers of an answer of the server itself, and the body of the last redirect's.
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Entity tag of the file, by the server that was asked.
    pub(crate) tag: Option<String>,
    /// Size of the file, where the server that was asked says it beside a redirect.
    pub(crate) linked_size: Option<u64>,
    /// `Content-Length`.
    pub(crate) length: Option<u64>,
    /// `Content-Range`.
    pub(crate) range: Option<String>,
    /// Where the last redirect led, if there was one.
    pub(crate) location: Option<String>,
    is_html: bool,
    body: ureq::Body,
}

/// Why a request has no answer that can be used.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// Another try may help, after a pause that the server may have named.
    Transient { error: HubError, pause: Option<Duration> },
    /// Another try does not help.
    Final(HubError),
}

impl Client {
    /// Client of the settings' server, for the files of `repository`.
    ///
    /// # Errors
    /// The server is reached by TLS, for which the processor lacks instructions.
    pub(crate) fn new(
        settings: &Settings,
        repository: &str,
        waits: Waits,
    ) -> Result<Self, HubError> {
        let is_secure = settings.endpoint.starts_with("https:");
        let mut config = Agent::config_builder()
            .proxy(None)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .https_only(is_secure)
            .timeout_resolve(Some(SILENCE))
            .timeout_connect(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .max_idle_connections(MAX_IDLE)
            .max_idle_connections_per_host(MAX_IDLE)
            .user_agent(concat!("moeflux/", env!("CARGO_PKG_VERSION")));
        match tls::missing_instructions() {
            None => config = config.tls_config(tls::config()?),
            Some(needs) if is_secure => {
                return Err(HubError::NoTls { needs, repository: repository.to_owned() });
            }
            Some(_) => {}
        }
        Ok(Self {
            agent: Agent::with_parts(
                config.build(),
                ProxyConnector::default(),
                DefaultResolver::default(),
            ),
            proxies: settings.proxies.clone(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            waits,
        })
    }

    /// Address below the endpoint.
    pub(crate) fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint)
    }

    /// JSON of an answer, which `read` reads as it arrives, with repeated tries.
    ///
    /// # Errors
    /// All tries fail, the answer is too long or of another form, or `is_cancelled` says so.
    pub(crate) fn json<T: Send + 'static>(
        &self,
        url: &str,
        read: fn(&mut dyn Read) -> serde_json::Result<T>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<T, HubError> {
        self.waits.repeat(is_cancelled, || {
            let (client, address) = (self.clone(), url.to_owned());
            let request = move |received| client.json_once(&address, read, received);
            self.waits.attend(url, is_cancelled, request)
        })
    }

    fn json_once<T>(
        &self,
        url: &str,
        read: fn(&mut dyn Read) -> serde_json::Result<T>,
        received: Received,
    ) -> Result<T, RequestError> {
        let wrong = |problem| RequestError::Final(HubError::Answer { url: url.into(), problem });
        let too_long = |found: &str| {
            let limit = json::MAX_BYTES;
            wrong(format!("expected at most {limit} bytes of JSON, got {found}"))
        };
        let answer = self.request("GET", url, None);
        let mut answer = answer.map_err(|error| elsewhere(url, error))?;
        let page = html_page(&answer);
        let page = || RequestError::Final(portal(url, JSON, page.clone()));
        if answer.is_html {
            return Err(page());
        }
        if let Some(length) = answer.length.filter(|&length| length > json::MAX_BYTES) {
            return Err(too_long(&length.to_string()));
        }
        let mut body = BufReader::new(received.count(answer.reader()));
        let start = body.fill_buf().map_err(|error| connection(url, &error))?;
        if start.trim_ascii_start().starts_with(b"<") {
            return Err(page());
        }
        read(&mut body).map_err(|error| match error.io_error_kind() {
            Some(io::ErrorKind::FileTooLarge) => too_long("more"),
            Some(_) => connection(url, &error),
            None if error.is_data() => wrong(error.to_string()),
            None => wrong(format!("expected JSON: {error}")),
        })
    }

    /// Size and entity tag of a file, without its contents, with repeated tries.
    ///
    /// # Errors
    /// All tries fail, or `is_cancelled` says so.
    pub(crate) fn head(
        &self,
        url: &str,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Answer, HubError> {
        self.waits.repeat(is_cancelled, || {
            let (client, address) = (self.clone(), url.to_owned());
            let request = move |_| client.file("HEAD", &address, None);
            self.waits.attend(url, is_cancelled, request)
        })
    }

    /// A file's contents, or a range of them.
    ///
    /// # Errors
    /// The request fails.
    pub(crate) fn get(
        &self,
        url: &str,
        range: Option<&Range<u64>>,
    ) -> Result<Answer, RequestError> {
        self.file("GET", url, range)
    }

    /// A request for a file.
    fn file(
        &self,
        method: &str,
        url: &str,
        range: Option<&Range<u64>>,
    ) -> Result<Answer, RequestError> {
        let answer = self.request(method, url, range)?;
        // A file of a model is a page only if its name says so.
        let path = url.split('?').next().unwrap_or(url);
        match answer.is_html && ![".html", ".htm"].iter().any(|ending| path.ends_with(ending)) {
            true => Err(RequestError::Final(portal(url, FILE, html_page(&answer)))),
            false => Ok(answer),
        }
    }

    fn request(
        &self,
        method: &str,
        url: &str,
        range: Option<&Range<u64>>,
    ) -> Result<Answer, RequestError> {
        let mut address = url.to_owned();
        let mut first: Option<Answer> = None;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = http::Request::builder().method(method);
            if let Some(range) = range {
                let (start, last) = (range.start, range.end.saturating_sub(1));
                request = request.header("range", format!("bytes={start}-{last}"));
            }
            // Other servers, to which a redirect leads, must not see the token.
            if let Some(token) = &self.token
                && origin(&address) == origin(&self.endpoint)
            {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let unusable = |error: &dyn fmt::Display| {
                let problem = format!("the address cannot be used: {error}");
                RequestError::Final(HubError::Answer { url: address.clone(), problem })
            };
            let uri: http::Uri = address.parse().map_err(|error| unusable(&error))?;
            let proxy = self.proxies.find(&uri).map_err(RequestError::Final)?;
            if let Some(value) = proxy.as_ref().and_then(|proxy| proxy.authorization(&uri)) {
                request = request.header("proxy-authorization", value);
            }
            let request = request.uri(uri).body(()).map_err(|error| unusable(&error))?;
            let request = self.agent.configure_request(request);
            let request = request.proxy(proxy.as_ref().map(|named| named.proxy.clone())).build();
            let response = self.agent.run(request);
            let response = response.map_err(|error| failed(&address, error, proxy.as_ref()))?;
            let header = |name| response.headers().get(name)?.to_str().ok();
            let location = header("location").map(|location| joined(&address, location));
            let pause = header("retry-after").and_then(|value| value.trim().parse().ok());
            let limit = header("ratelimit").filter(|_| response.status() == 429);
            let pause = pause.or_else(|| limit.and_then(window_end));
            let tag = header("x-linked-etag").or_else(|| header("etag"));
            let number = |name| header(name)?.trim().parse().ok();
            let answer = Answer {
                status: response.status().as_u16(),
                tag: tag.map(plain_tag),
                linked_size: number("x-linked-size"),
                length: number("content-length"),
                range: header("content-range").map(str::to_owned),
                location: first.is_some().then(|| address.clone()),
                is_html: header("content-type").is_some_and(|kind| kind.starts_with("text/html")),
                body: response.into_body(),
            };
            match answer.status {
                200 | 206 => {
                    return Ok(match first {
                        None => answer,
                        Some(first) => {
                            Answer { tag: first.tag, linked_size: first.linked_size, ..answer }
                        }
                    });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let Some(location) = location else { return Err(nowhere(&address, &answer)) };
                    // The server that was asked has told everything; others need no question.
                    if method == "HEAD" && answer.linked_size.is_some() {
                        return Ok(answer);
                    }
                    address = location;
                    first.get_or_insert(answer);
                }
                407 if proxy.is_some() => {
                    let error = ureq::Error::ConnectProxyFailed("407".into());
                    return Err(failed(&address, error, proxy.as_ref()));
                }
                status => {
                    return Err(refused(&address, status, pause.map(Duration::from_secs), self));
                }
            }
        }
        let problem = format!("more than {MAX_REDIRECTS} redirects");
        Err(RequestError::Final(HubError::Answer { url: url.to_owned(), problem }))
    }
}

impl Answer {
    /// The contents.
    pub(crate) fn reader(&mut self) -> impl Read {
        self.body.as_reader()
    }
}

/// Error of a redirect that leads nowhere.
fn nowhere(url: &str, answer: &Answer) -> RequestError {
    let problem = format!("status {} without a location", answer.status);
    RequestError::Final(HubError::Answer { url: url.to_owned(), problem })
}

/// Error of a status that is neither an answer nor a redirect.
fn refused(url: &str, status: u16, pause: Option<Duration>, client: &Client) -> RequestError {
    let url = url.to_owned();
    match status {
        401 | 403 => {
            let advice = match client.token {
                None => "set HF_TOKEN, or accept the model's licence on its page first",
                Some(_) => "the token does not give access; is the model's licence accepted?",
            };
            RequestError::Final(HubError::Denied { url, status, advice })
        }
        511 => RequestError::Final(portal(&url, FILE, "status 511".into())),
        404 | 410 => RequestError::Final(HubError::NotFound { url, status }),
        408 | 425 | 429 | 500..=599 => RequestError::Transient {
            error: HubError::Status { url, status, tries: String::new() },
            pause,
        },
        _ => RequestError::Final(HubError::Status { url, status, tries: String::new() }),
    }
}

/// Error of a request without an answer.
fn failed(url: &str, error: ureq::Error, proxy: Option<&NamedProxy>) -> RequestError {
    let url = url.to_owned();
    if let Some((proxy, problem)) = proxy.zip(of_proxy(&error)) {
        let proxy = proxy.to_string();
        let error = HubError::Proxy { url, proxy, problem, tries: String::new() };
        // One that refuses does not think better of it.
        return match error {
            HubError::Proxy { ref problem, .. } if problem.starts_with("refuses") => {
                RequestError::Final(error)
            }
            _ => RequestError::Transient { error, pause: None },
        };
    }
    match error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::RequireHttpsOnly(_) => {
            let problem = format!("the address cannot be used: {error}");
            RequestError::Final(HubError::Answer { url, problem })
        }
        ureq::Error::Rustls(_) => RequestError::Final(untrusted(url, &error)),
        // Handshakes fail by this kind.
        ureq::Error::Io(ref cause) if cause.kind() == io::ErrorKind::InvalidData => {
            RequestError::Final(untrusted(url, cause))
        }
        ureq::Error::Timeout(_) => {
            connection(&url, &format_args!("no answer for {} s", SILENCE.as_secs()))
        }
        error => connection(&url, &error),
    }
}

/// Problem of a proxy, if an error is one: it is asked before all servers.
fn of_proxy(error: &ureq::Error) -> Option<String> {
    use io::ErrorKind::*;

    let is_connecting = |kind| {
        [ConnectionRefused, HostUnreachable, NetworkUnreachable, AddrNotAvailable, TimedOut]
            .contains(&kind)
    };
    match error {
        ureq::Error::ConnectProxyFailed(reason) => {
            Some(match reason.rsplit('/').next().filter(|status| status.starts_with('4')) {
                Some("407") => "refuses the name and the password, or wants them (407)".into(),
                Some(status) => format!("refuses the connection ({status})"),
                None => format!("does not connect ({reason})"),
            })
        }
        ureq::Error::HostNotFound | ureq::Error::Timeout(ureq::Timeout::Connect) => {
            Some(format!("does not answer ({error})"))
        }
        ureq::Error::Io(cause) if is_connecting(cause.kind()) => {
            Some(format!("does not answer ({cause})"))
        }
        _ => None,
    }
}

/// Error of an answer that is not the server's.
fn portal(url: &str, expected: &'static str, found: String) -> HubError {
    HubError::Portal { url: url.to_owned(), expected, found }
}

/// A page in an error, with its address if a redirect led there.
fn html_page(answer: &Answer) -> String {
    match &answer.location {
        Some(location) => format!("an HTML page of {location}"),
        None => "an HTML page".into(),
    }
}

/// Error of a request for JSON, which no server redirects to another.
fn elsewhere(url: &str, error: RequestError) -> RequestError {
    match error {
        RequestError::Final(
            HubError::NotFound { url: place, status }
            | HubError::Denied { url: place, status, .. }
            | HubError::Status { url: place, status, .. },
        ) if origin(&place) != origin(url) => {
            let found = format!("status {status} of {place}");
            RequestError::Final(portal(url, JSON, found))
        }
        other => other,
    }
}

/// Error of a handshake.
fn untrusted(url: String, cause: &dyn fmt::Display) -> HubError {
    HubError::Answer {
        url,
        problem: format!(
            "no encrypted connection: {cause}; behind a proxy with other certificates, set \
             SSL_CERT_FILE to them"
        ),
    }
}

/// Error of a connection that breaks within an answer.
pub(crate) fn connection(url: &str, error: &dyn fmt::Display) -> RequestError {
    let problem = error.to_string();
    let error = HubError::Connection { url: url.to_owned(), problem, tries: String::new() };
    RequestError::Transient { error, pause: None }
}

/// Seconds to the end of the Hub's window of requests: 55 in `"api";r=0;t=55`.
fn window_end(limit: &str) -> Option<u64> {
    limit.split(';').find_map(|part| part.trim().strip_prefix("t=")?.parse().ok())
}

/// An entity tag without its quotes.
fn plain_tag(tag: &str) -> String {
    tag.trim().trim_start_matches("W/").trim_matches('"').to_owned()
}

/// Scheme, host and port of an address.
pub(crate) fn origin(address: &str) -> &str {
    let start = address.find("://").map_or(0, |at| at + 3);
    let end = address[start..].find(['/', '?', '#']).map_or(address.len(), |at| start + at);
    &address[..end]
}

/// The address that a redirect leads to from another.
pub(crate) fn joined(address: &str, location: &str) -> String {
    // A query may hold another address.
    let is_scheme =
        |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    if location.split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme)) {
        return location.to_owned();
    }
    let origin = origin(address);
    if let Some(host) = location.strip_prefix("//") {
        let scheme = origin.split("://").next().unwrap_or("https");
        return format!("{scheme}://{host}");
    }
    if location.starts_with('/') {
        return format!("{origin}{location}");
    }
    let path = address.split(['?', '#']).next().unwrap_or(address);
    if location.starts_with('?') {
        return format!("{path}{location}");
    }
    let folder = path.rfind('/').filter(|&at| at >= origin.len()).unwrap_or(path.len());
    format!("{}/{location}", &path[..folder])
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_dead_proxy_is_named_without_its_password() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let value =
            |name: &str| (name == "ALL_PROXY").then(|| format!("http://user:secret@{closed}"));
        let settings = Settings {
            endpoint: "http://hub.invalid".into(),
            token: None,
            cache: "none".into(),
            offline: false,
            proxies: Proxies::new(value),
        };
        let mut waits = Waits::default();
        waits.patience.tries = 1;
        let client = Client::new(&settings, "a/b", waits).unwrap();
        for url in ["http://hub.invalid/x", "https://hub.invalid/x"] {
            let Err(error) = client.head(url, &|| false) else { panic!("an answer of {url}") };
            let error = error.to_string();
            let named = format!("{url}: the proxy {closed} of ALL_PROXY does not answer");
            assert!(error.starts_with(&named) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn redirects_are_joined_as_browsers_do() {
        let from = "https://hub.example:8443/a/b?c=d";
        for (location, joined_to) in [
            ("https://cdn.example/x?y=z", "https://cdn.example/x?y=z"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("/x/y", "https://hub.example:8443/x/y"),
            ("/x?y=https://z", "https://hub.example:8443/x?y=https://z"),
            ("x?y=https://z", "https://hub.example:8443/a/x?y=https://z"),
            ("?y=https://z", "https://hub.example:8443/a/b?y=https://z"),
            ("x", "https://hub.example:8443/a/x"),
        ] {
            assert_eq!(joined(from, location), joined_to);
        }
        assert_eq!(joined("http://host", "x"), "http://host/x");
    }

    #[test]
    fn the_end_of_a_window_is_read() {
        assert_eq!(window_end(r#""api";r=0;t=55"#), Some(55));
        assert_eq!(window_end(r#""api";r=0"#), None);
    }

    #[test]
    fn a_token_is_for_one_origin() {
        assert_eq!(origin("https://hub.example/a://b"), "https://hub.example");
        assert_ne!(origin("https://hub.example.evil/x"), origin("https://hub.example"));
        assert_ne!(origin("http://hub.example/x"), origin("https://hub.example"));
        assert_ne!(origin("https://hub.example:444/x"), origin("https://hub.example"));
    }
}
