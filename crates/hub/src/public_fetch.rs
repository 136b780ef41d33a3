//! Files of allowed hosts on the internet, for addresses that strangers send.
//!
//! Such an address must not lead into the local network, neither by its host's name nor by a
//! redirect. A host is resolved once, all its addresses are checked, and the connection goes to one
//! of these. No proxy is asked.

use std::{
    io::Read,
    net::IpAddr,
    str::FromStr,
    time::{Duration, Instant},
};

use ureq::{
    Agent, Body,
    config::Config,
    http::{Response, Uri},
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

use crate::{client::joined, error::HubError, public_address::is_public, tls};

/// Maximum number of redirects.
const MAX_REDIRECTS: usize = 3;

/// Time of a fetch with its redirects.
const TIME: Duration = Duration::from_secs(10);

/// Port of HTTP with TLS.
const PORT: u16 = 443;

/// Exact name of a host, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicHost(String);

/// Text that is no name of a host.
#[derive(Debug, thiserror::Error)]
#[error("expected the name of a host such as images.example.com, without a port, got {0:?}")]
pub struct WrongHost(String);

impl FromStr for PublicHost {
    type Err = WrongHost;

    fn from_str(text: &str) -> Result<Self, WrongHost> {
        let name = text.strip_suffix(":443").unwrap_or(text);
        let is_label = |label: &str| {
            !label.is_empty()
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
        };
        match name.split('.').all(is_label) {
            true => Ok(Self(name.to_ascii_lowercase())),
            false => Err(WrongHost(text.to_owned())),
        }
    }
}

/// Why a file is not fetched. Messages have neither the address nor words of the server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The address, or the one of a redirect, has another form.
    #[error("expected an address such as https://HOST/PATH, without a user and a port")]
    Address,
    /// The host is not allowed.
    #[error("the host is not one of --image-urls")]
    Host,
    /// The host is on a local network.
    #[error("the host has an address that is not public")]
    NotPublic,
    /// The host has no address.
    #[error("the host is not found")]
    Unknown,
    /// There are more redirects.
    #[error("expected at most {MAX_REDIRECTS} redirects, got more")]
    Redirects,
    /// The server has no such file.
    #[error("expected status 200, got {status}")]
    Status {
        /// Status line's code.
        status: u16,
    },
    /// The file is compressed for its way.
    #[error("expected a file without a content encoding")]
    Encoding,
    /// The file is too long.
    #[error("expected at most {bytes} bytes")]
    TooLong {
        /// Maximum number of bytes.
        bytes: usize,
    },
    /// Time is over.
    #[error("it took longer than {} s", time.as_secs_f64())]
    TooSlow {
        /// Maximum time.
        time: Duration,
    },
    /// The connection fails, or its certificate is not trusted.
    #[error("the connection to the host failed")]
    Connection,
}

/// Bounds of a fetch.
#[derive(Clone, Copy, Debug)]
struct FetchRules {
    scheme: &'static str,
    port: u16,
    is_public: fn(IpAddr) -> bool,
    time: Duration,
}

/// Fetches files of allowed hosts with TLS, for strangers.
#[derive(Debug)]
pub struct PublicFetcher {
    hosts: Vec<PublicHost>,
    rules: FetchRules,
    agent: Agent,
}

impl PublicFetcher {
    /// Fetcher of files of `hosts`.
    ///
    /// # Errors
    /// The processor lacks instructions that TLS needs, or the certificates that the environment
    /// names cannot be used.
    pub fn new(hosts: Vec<PublicHost>) -> Result<Self, HubError> {
        if let Some(needs) = tls::missing_instructions() {
            return Err(HubError::NoTlsForImages { needs });
        }
        let rules = FetchRules { scheme: "https", port: PORT, is_public, time: TIME };
        Self::with_rules(hosts, rules)
    }

    fn with_rules(hosts: Vec<PublicHost>, rules: FetchRules) -> Result<Self, HubError> {
        let config = Agent::config_builder()
            .proxy(None)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            // A kept connection would outlive the check of its address.
            .max_idle_connections(0)
            .tls_config(tls::config()?)
            .user_agent(concat!("moeflux/", env!("CARGO_PKG_VERSION")));
        let resolver = PublicResolver(rules.is_public);
        let agent = Agent::with_parts(config.build(), DefaultConnector::default(), resolver);
        Ok(Self { hosts, rules, agent })
    }

    /// The file at an address, of at most `bytes`.
    ///
    /// # Errors
    /// The address is not allowed, or there is no such file, or not in time.
    pub fn fetch(&self, address: &str, bytes: usize) -> Result<Vec<u8>, FetchError> {
        let since = Instant::now();
        let mut address = address.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.request(&address, since)?;
            let status = response.status().as_u16();
            let location = response.headers().get("location").and_then(|value| value.to_str().ok());
            match (status, location) {
                (200, _) => return self.contents(response, bytes),
                (301 | 302 | 303 | 307 | 308, Some(location)) => {
                    address = joined(&address, location);
                }
                _ => return Err(FetchError::Status { status }),
            }
        }
        Err(FetchError::Redirects)
    }

    fn request(&self, address: &str, since: Instant) -> Result<Response<Body>, FetchError> {
        let FetchRules { scheme, port, time, .. } = self.rules;
        let uri: Uri = address.parse().map_err(|_| FetchError::Address)?;
        let authority = uri.authority().ok_or(FetchError::Address)?.as_str();
        let host = authority.strip_suffix(&format!(":{port}")).unwrap_or(authority);
        if uri.scheme_str() != Some(scheme) || host.contains(['@', ':']) {
            return Err(FetchError::Address);
        }
        if !self.hosts.iter().any(|PublicHost(name)| name.eq_ignore_ascii_case(host)) {
            return Err(FetchError::Host);
        }
        let left = time.checked_sub(since.elapsed()).ok_or(FetchError::TooSlow { time })?;
        let request = self.agent.get(uri).config().timeout_global(Some(left)).build();
        request.call().map_err(|error| self.failed(error))
    }

    fn contents(&self, response: Response<Body>, bytes: usize) -> Result<Vec<u8>, FetchError> {
        let encoding = response.headers().get("content-encoding");
        if encoding.is_some_and(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
            return Err(FetchError::Encoding);
        }
        let too_long = FetchError::TooLong { bytes };
        let announced = response.body().content_length();
        let announced = announced.map_or(Ok(bytes), usize::try_from);
        let Some(length) = announced.ok().filter(|&length| length <= bytes) else {
            return Err(too_long);
        };
        // One byte more tells a file that is too long.
        let mut file = Vec::with_capacity(length.saturating_add(1));
        let mut contents =
            response.into_body().into_reader().take((bytes as u64).saturating_add(1));
        contents.read_to_end(&mut file).map_err(|error| self.failed(error.into()))?;
        if file.len() > bytes {
            return Err(too_long);
        }
        file.shrink_to_fit();
        Ok(file)
    }

    fn failed(&self, error: ureq::Error) -> FetchError {
        match error {
            ureq::Error::Timeout(_) => FetchError::TooSlow { time: self.rules.time },
            ureq::Error::HostNotFound => FetchError::Unknown,
            ureq::Error::Other(cause) if cause.is::<FetchError>() => FetchError::NotPublic,
            _ => FetchError::Connection,
        }
    }
}

/// Resolves hosts whose addresses all fulfil a rule.
#[derive(Debug)]
struct PublicResolver(fn(IpAddr) -> bool);

impl Resolver for PublicResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let resolved = DefaultResolver::default().resolve(uri, config, timeout);
        let resolved = resolved.map_err(|error| match error {
            ureq::Error::Io(_) => ureq::Error::HostNotFound,
            other => other,
        })?;
        match resolved.iter().all(|address| (self.0)(address.ip())) {
            true => Ok(resolved),
            false => Err(ureq::Error::Other(Box::new(FetchError::NotPublic))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
        thread,
    };

    use super::*;

    /// Maximum bytes of a file in these tests.
    const BYTES: usize = 10;

    fn hosts(names: &[&str]) -> Vec<PublicHost> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    /// Answers requests in plain HTTP by their path. It ends with the process.
    fn serve() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || answer(stream, address.port()));
            }
        });
        address
    }

    fn answer(mut stream: TcpStream, port: u16) {
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let lines: Vec<String> =
            lines.map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
        let path = lines[0].split(' ').nth(1).unwrap();
        let redirect = |to: &str| format!("307 x\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n");
        let text = match path {
            "/file" => "200 OK\r\ncontent-length: 4\r\n\r\nfile".to_owned(),
            "/header" => {
                let is_it = |line: &&String| line.eq_ignore_ascii_case("accept-encoding: identity");
                format!("200 OK\r\n\r\n{}", lines.iter().filter(is_it).count())
            }
            "/4" => redirect("/3"),
            "/3" => redirect(&format!("http://127.0.0.1:{port}/2")),
            "/2" => redirect("1"),
            "/1" => redirect("/file"),
            "/host" => redirect(&format!("http://other.example:{port}/file")),
            "/inside" => redirect(&format!("http://127.0.0.2:{port}/file")),
            "/user" => redirect(&format!("http://user@127.0.0.1:{port}/file")),
            "/tls" => redirect(&format!("https://127.0.0.1:{port}/file")),
            "/disk" => redirect("file:///file"),
            "/nowhere" => "302 x\r\ncontent-length: 0\r\n\r\n".to_owned(),
            "/missing" => "404 secret\r\ncontent-length: 6\r\n\r\nsecret".to_owned(),
            "/zip" => "200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx".to_owned(),
            // Its contents never come.
            "/announced" => "200 OK\r\ncontent-length: 11\r\n\r\n".to_owned(),
            "/longer" => format!("200 OK\r\n\r\n{}", "x".repeat(BYTES + 1)),
            "/longest" => format!("200 OK\r\n\r\n{}", "x".repeat(BYTES)),
            "/cut" => "200 OK\r\ncontent-length: 4\r\n\r\nfil".to_owned(),
            "/drip" => "200 OK\r\ncontent-length: 10\r\n\r\n".to_owned(),
            path => panic!("{path}"),
        };
        stream.write_all(format!("HTTP/1.1 {text}").as_bytes()).unwrap();
        let waits = match path {
            "/announced" => 1000,
            "/drip" => 9,
            _ => 0,
        };
        for _ in 0..waits {
            thread::sleep(Duration::from_millis(20));
            if stream.write_all(b"x").is_err() {
                break;
            }
        }
    }

    /// Fetches from the server over plain HTTP, where one address of the machine is public.
    fn fetch(server: SocketAddr, path: &str, time: Duration) -> Result<Vec<u8>, FetchError> {
        let is_public = |address| address == Ipv4Addr::LOCALHOST;
        let rules = FetchRules { scheme: "http", port: server.port(), is_public, time };
        let hosts = hosts(&["127.0.0.1", "127.0.0.2"]);
        let fetcher = PublicFetcher::with_rules(hosts, rules).unwrap();
        fetcher.fetch(&format!("http://{server}{path}"), BYTES)
    }

    #[test]
    fn each_redirect_is_checked_as_the_address() {
        let server = serve();
        for (path, expected) in [
            ("/file", Ok(&b"file"[..])),
            ("/3", Ok(b"file")),
            ("/4", Err(FetchError::Redirects)),
            ("/host", Err(FetchError::Host)),
            ("/inside", Err(FetchError::NotPublic)),
            ("/user", Err(FetchError::Address)),
            ("/tls", Err(FetchError::Address)),
            ("/disk", Err(FetchError::Address)),
            ("/nowhere", Err(FetchError::Status { status: 302 })),
            ("/missing", Err(FetchError::Status { status: 404 })),
        ] {
            assert_eq!(fetch(server, path, TIME), expected.map(<[u8]>::to_vec), "{path}");
        }
    }

    #[test]
    fn a_file_is_whole_and_within_its_limits() {
        let server = serve();
        let too_long = FetchError::TooLong { bytes: BYTES };
        for (path, expected) in [
            ("/header", Ok(&b"1"[..])),
            ("/longest", Ok(&[b'x'; BYTES])),
            ("/longer", Err(too_long.clone())),
            ("/announced", Err(too_long)),
            ("/zip", Err(FetchError::Encoding)),
            ("/cut", Err(FetchError::Connection)),
        ] {
            assert_eq!(fetch(server, path, TIME), expected.map(<[u8]>::to_vec), "{path}");
        }
        // Each byte comes in time, but not all of them.
        let time = Duration::from_millis(100);
        let error = fetch(server, "/drip", time).unwrap_err();
        assert_eq!(error, FetchError::TooSlow { time });
        assert_eq!(error.to_string(), "it took longer than 0.1 s");
    }

    #[test]
    fn other_addresses_are_not_asked() {
        let fetcher = PublicFetcher::new(hosts(&["Files.example", "127.0.0.1", "169.254.169.254"]));
        let fetcher = fetcher.unwrap();
        for (address, expected) in [
            ("http://files.example/x", FetchError::Address),
            ("ftp://files.example/x", FetchError::Address),
            ("file:///etc/passwd", FetchError::Address),
            ("files.example/x", FetchError::Address),
            ("https://", FetchError::Address),
            ("https://user:word@files.example/x", FetchError::Address),
            ("https://files.example@127.0.0.1/x", FetchError::Address),
            ("https://files.example:444/x", FetchError::Address),
            ("https://files.example:99999/x", FetchError::Address),
            ("https://[::1]/x", FetchError::Address),
            ("https://files.example\\@evil.example/x", FetchError::Address),
            ("https://files.example./x", FetchError::Host),
            ("https://files.example.evil/x", FetchError::Host),
            ("https://localhost/x", FetchError::Host),
            ("https://127.1/x", FetchError::Host),
            ("https://127.0.0.1/x", FetchError::NotPublic),
            ("HTTPS://127.0.0.1:443/x", FetchError::NotPublic),
            ("https://169.254.169.254/latest/meta-data", FetchError::NotPublic),
        ] {
            assert_eq!(fetcher.fetch(address, BYTES), Err(expected), "{address}");
        }
    }

    #[test]
    fn hosts_are_exact_names() {
        for (text, name) in [("Files.Example", "files.example"), ("a-b.c_d:443", "a-b.c_d")] {
            assert_eq!(text.parse::<PublicHost>().unwrap(), PublicHost(name.to_owned()));
        }
        for text in ["", "*.example", "a..b", "a.", "a:80", "https://a", "a/b", "u@a", "[::1]"] {
            let error = text.parse::<PublicHost>().unwrap_err().to_string();
            assert!(error.ends_with(&format!("got {text:?}")), "{error}");
        }
    }
}
