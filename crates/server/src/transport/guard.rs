//! Who may send requests: hosts, origins and keys. Which pages may read responses: CORS.

use std::{hint::black_box, net::IpAddr};

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};

use super::{
    allowed::{AllowedHost, AllowedOrigin},
    error::ApiError,
    server_error::ServerError,
};

/// Names of the local machine in the headers Host and Origin.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Header with a key, beside `Authorization: Bearer`.
const KEY_HEADER: &str = "x-api-key";

/// Headers of responses that pages may read.
const EXPOSED: &str =
    "x-request-id, request-id, retry-after, x-moeflux-notes, x-moeflux-dropped-messages";

/// Headers of all responses to pages that are allowed. Further ones depend on the request.
const CORS: [(HeaderName, &str); 4] = [
    (header::VARY, "origin"),
    (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, HEAD, POST, DELETE"),
    (header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED),
    (header::ACCESS_CONTROL_MAX_AGE, "600"),
];

/// Questions of browsers before a page of another network may send a request, and their answers.
const PRIVATE_NETWORKS: [[HeaderName; 2]; 2] = [
    [
        HeaderName::from_static("access-control-request-private-network"),
        HeaderName::from_static("access-control-allow-private-network"),
    ],
    [
        HeaderName::from_static("access-control-request-local-network"),
        HeaderName::from_static("access-control-allow-local-network"),
    ],
];

/// API keys. Never shown.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// Keys of a file: one per line. Empty lines and lines that start with `#` are skipped.
    pub fn from_lines(text: &str) -> Self {
        let lines = text.lines().map(str::trim);
        Self(lines.filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_owned).collect())
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `given` is one of the keys. The time depends on the lengths only.
    fn contains(&self, given: &str) -> bool {
        self.0.iter().fold(false, |found, key| found | is_equal(key.as_bytes(), given.as_bytes()))
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// Compares in a time that does not depend on where the texts differ.
fn is_equal(key: &[u8], given: &[u8]) -> bool {
    let differences =
        key.iter().zip(given).fold(0, |all, (a, b)| black_box(black_box(all) | (a ^ b)));
    key.len() == given.len() && differences == 0
}

/// Checks of a request's headers.
#[derive(Debug)]
pub(crate) struct Guard {
    keys: ApiKeys,
    /// Whether the header Host must name the local machine or one of `hosts`.
    checks_host: bool,
    /// Further hosts that are allowed.
    hosts: Vec<AllowedHost>,
    /// Origins that are allowed beside the origins of these hosts.
    origins: Vec<AllowedOrigin>,
    /// Whether a path needs no key.
    is_open: fn(&str) -> bool,
}

impl Guard {
    /// Checks for a server at `address`.
    ///
    /// # Errors
    /// The address is open to other machines, without a key and without `no_key`.
    pub(crate) fn new(
        address: IpAddr,
        keys: ApiKeys,
        no_key: bool,
        hosts: &[AllowedHost],
    ) -> Result<Self, ServerError> {
        let is_local = address.is_loopback();
        if !is_local && keys.is_empty() && !no_key {
            return Err(ServerError::OpenWithoutKey { address });
        }
        let checks_host = is_local && keys.is_empty();
        let hosts = hosts.to_vec();
        Ok(Self { keys, checks_host, hosts, origins: Vec::new(), is_open: |_| false })
    }

    /// The checks with further origins that are allowed.
    ///
    /// # Errors
    /// Pages of anybody have one of them, and there is no key.
    pub(crate) fn origins(self, origins: &[AllowedOrigin]) -> Result<Self, ServerError> {
        let anybodys = origins.iter().find(|origin| origin.is_anybodys());
        if let Some(origin) = anybodys.filter(|_| self.keys.is_empty()) {
            return Err(ServerError::OriginWithoutKey { origin: origin.clone() });
        }
        Ok(Self { origins: origins.to_vec(), ..self })
    }

    /// The checks with paths that need no key.
    pub(crate) fn open_paths(self, is_open: fn(&str) -> bool) -> Self {
        Self { is_open, ..self }
    }

    /// Checks a request before its body is read.
    ///
    /// # Errors
    /// The host, the origin or the key is not allowed, or there are several hosts.
    pub(crate) fn check(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<(), ApiError> {
        if headers.get_all(header::HOST).iter().nth(1).is_some() {
            return Err(ApiError::not_http("there are several headers Host"));
        }
        // A name that resolves to the local machine reaches it from any page of a browser.
        if self.checks_host && !self.knows_host(text(headers, header::HOST.as_str())) {
            let message = "the header Host names another machine: --allow-host NAME allows it";
            return Err(ApiError::forbidden(message));
        }
        // A browser that asks first goes by the headers of the answer, of which it gets none.
        let changes_nothing = [Method::GET, Method::HEAD, Method::OPTIONS].contains(method);
        if !changes_nothing && headers.contains_key(header::ORIGIN) && !self.knows_origin(headers) {
            return Err(ApiError::forbidden(foreign(text(headers, header::ORIGIN.as_str()))));
        }
        let needs_key = method != Method::OPTIONS && !(self.is_open)(path);
        match !needs_key || self.keys.is_empty() || self.has_key(headers) {
            true => Ok(()),
            false => Err(ApiError::unauthorized()),
        }
    }

    /// Headers that let the page of a request read the response, if it is allowed.
    pub(crate) fn cors(&self, headers: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Vec::new() };
        if !self.knows_origin(headers) {
            return Vec::new();
        }
        let fixed = CORS.into_iter().map(|(name, value)| (name, HeaderValue::from_static(value)));
        let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
        let asked = asked.map(|names| (header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone()));
        let network = PRIVATE_NETWORKS.into_iter().filter_map(|[question, answer]| {
            let asks = headers.get(question)?.as_bytes() == b"true";
            asks.then_some((answer, HeaderValue::from_static("true")))
        });
        let origin = (header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        fixed.chain([origin]).chain(asked).chain(network).collect()
    }

    /// Whether the page that sent a request is allowed.
    fn knows_origin(&self, headers: &HeaderMap) -> bool {
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let (Some(origin), None) = (origins.next(), origins.next()) else { return false };
        let Ok(origin) = origin.to_str() else { return false };
        self.origins.iter().any(|known| known.allows(origin))
            || self.knows_host(origin.split_once("://").map(|(_, host)| host))
    }

    /// Whether `host`, with or without a port, is allowed.
    fn knows_host(&self, host: Option<&str>) -> bool {
        let Some(host) = host.map(str::to_ascii_lowercase) else { return false };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host.as_str(),
        };
        LOCAL_HOSTS.contains(&name) || self.hosts.iter().any(|known| known.name() == name)
    }

    fn has_key(&self, headers: &HeaderMap) -> bool {
        let bearer = text(headers, header::AUTHORIZATION.as_str()).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let keys = [bearer, text(headers, KEY_HEADER)];
        keys.into_iter().flatten().any(|key| self.keys.contains(key))
    }
}

/// Reason for which a page is refused, with the option that allows it.
fn foreign(origin: Option<&str>) -> String {
    let option = match origin.map(str::parse::<AllowedOrigin>) {
        Some(Ok(origin)) if origin.is_anybodys() => {
            format!("--allow-origin {origin} allows it, together with --api-key-file FILE")
        }
        Some(Ok(origin)) => format!("--allow-origin {origin} allows it"),
        _ => "it is no valid origin".to_owned(),
    };
    format!("the header Origin names a foreign page: {option}")
}

/// A header as text.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(guard: &Guard, method: Method, headers: &[(&'static str, &str)]) -> bool {
        let headers = headers
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()));
        guard.check(&method, "/models", &headers.collect()).is_ok()
    }

    /// Checks of a local server that allows `box.lan` and these origins.
    fn local(keys: &str, origins: &[&str]) -> Result<Guard, ServerError> {
        let origins: Vec<_> = origins.iter().map(|origin| origin.parse().unwrap()).collect();
        let (keys, hosts) = (ApiKeys::from_lines(keys), ["Box.lan".parse().unwrap()]);
        Guard::new([127, 0, 0, 1].into(), keys, false, &hosts)?.origins(&origins)
    }

    #[test]
    fn hosts_and_origins_are_local_or_allowed() {
        let guard = local("", &[]).unwrap();
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "[::1]:8080", "box.lan:1"] {
            assert!(check(&guard, Method::GET, &[("host", host)]), "{host}");
            let origin = format!("http://{host}");
            let headers = [("host", "localhost"), ("origin", origin.as_str())];
            assert!(check(&guard, Method::POST, &headers), "{origin}");
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "::1"] {
            assert!(!check(&guard, Method::GET, &[("host", host)]), "{host}");
            let origin = format!("https://{host}");
            let headers = [("host", "localhost"), ("origin", origin.as_str())];
            assert!(!check(&guard, Method::POST, &headers), "{origin}");
            assert!(check(&guard, Method::GET, &headers), "{origin}");
            assert!(check(&guard, Method::OPTIONS, &headers), "{origin}");
        }
        assert!(!check(&guard, Method::POST, &[("host", "localhost"), ("origin", "null")]));
        assert!(!check(&guard, Method::GET, &[]));
    }

    #[test]
    fn pages_of_known_hosts_may_read_responses() {
        let guard = local("", &["https://good.example", "vscode-webview://0a1b"]).unwrap();
        for (origin, is_known) in [
            ("http://localhost:3000", true),
            ("https://box.lan", true),
            ("https://good.example", true),
            ("https://GOOD.example", true),
            ("vscode-webview://0a1b", true),
            ("http://good.example", false),
            ("https://good.example:8443", false),
            ("https://good.example.evil.example", false),
            ("https://good.example/", false),
            ("https://me@good.example", false),
            ("vscode-webview://0a1b2", false),
            ("http://evil.example", false),
            ("file://", false),
            ("null", false),
        ] {
            let sent = [("host", "localhost"), ("origin", origin)];
            assert_eq!(check(&guard, Method::POST, &sent), is_known, "{origin}");
            assert_eq!(check(&guard, Method::DELETE, &sent), is_known, "{origin}");
            let headers = [
                (header::ORIGIN, origin),
                (header::ACCESS_CONTROL_REQUEST_HEADERS, "authorization, x-other"),
            ];
            let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
            let cors: HeaderMap = guard.cors(&headers.into_iter().collect()).into_iter().collect();
            let allowed = cors.get(header::ACCESS_CONTROL_ALLOW_ORIGIN);
            assert_eq!(allowed.map(|value| value.to_str().unwrap()), is_known.then_some(origin));
            let names = cors.get(header::ACCESS_CONTROL_ALLOW_HEADERS);
            assert_eq!(names.is_some(), is_known);
            assert!(!cors.contains_key(header::ACCESS_CONTROL_ALLOW_CREDENTIALS));
            for (name, words) in [
                (header::ACCESS_CONTROL_ALLOW_METHODS, &["GET", "POST", "DELETE"][..]),
                (
                    header::ACCESS_CONTROL_EXPOSE_HEADERS,
                    &["x-request-id", "x-moeflux-notes", "x-moeflux-dropped-messages"],
                ),
            ] {
                let value = cors.get(name).map(|value| value.to_str().unwrap().to_owned());
                let has_all = |value: String| words.iter().all(|word| value.contains(word));
                assert_eq!(value.map(has_all), is_known.then_some(true));
            }
        }
        assert!(guard.cors(&HeaderMap::new()).is_empty());
    }

    #[test]
    fn pages_of_other_networks_may_ask_in_both_forms() {
        let guard = local("", &["https://good.example"]).unwrap();
        for form in ["private", "local"] {
            let question = format!("access-control-request-{form}-network");
            let answer = format!("access-control-allow-{form}-network");
            let ask = |origin: &str, value: &str| {
                let headers: [(HeaderName, HeaderValue); 2] = [
                    (header::ORIGIN, origin.parse().unwrap()),
                    (question.parse().unwrap(), value.parse().unwrap()),
                ];
                let cors: HeaderMap =
                    guard.cors(&headers.into_iter().collect()).into_iter().collect();
                cors.get(&answer).map(|value| value.to_str().unwrap().to_owned())
            };
            assert_eq!(ask("https://good.example", "true").as_deref(), Some("true"));
            assert_eq!(ask("https://good.example", "false"), None);
            assert_eq!(ask("https://evil.example", "true"), None);
        }
    }

    #[test]
    fn origins_of_anybody_need_a_key() {
        for origin in ["*", "null", "file://"] {
            let problem = local("", &["https://good.example", origin]).unwrap_err().to_string();
            assert!(problem.contains("--api-key-file") && problem.contains(origin), "{problem}");
            let guard = local("secret", &[origin]).unwrap();
            let allows = |sent: &str| {
                check(&guard, Method::POST, &[("origin", sent), ("x-api-key", "secret")])
            };
            let sent = if origin == "*" { "https://any.example" } else { origin };
            assert!(allows(sent), "{origin}");
            assert_eq!(allows("https://evil.example"), origin == "*");
        }
    }

    #[test]
    fn a_refused_page_is_told_what_allows_it() {
        for (origin, words) in [
            (Some("https://good.example"), "--allow-origin https://good.example allows it"),
            (Some("null"), "--allow-origin null allows it, together with --api-key-file"),
            (Some("https://good.example/\"x"), "no valid origin"),
            (None, "no valid origin"),
        ] {
            assert!(foreign(origin).contains(words), "{}", foreign(origin));
        }
        let guard = local("", &["https://good.example"]).unwrap();
        let both = [("host", "localhost"), ("origin", "https://good.example")];
        assert!(check(&guard, Method::POST, &both));
        let twice = [both[0], both[1], ("origin", "https://evil.example")];
        let twice = twice.map(|(name, value)| (HeaderName::from_static(name), value));
        let mut headers = HeaderMap::new();
        for (name, value) in twice {
            headers.append(name, value.parse().unwrap());
        }
        assert!(guard.check(&Method::POST, "/models", &headers).is_err());
        headers.append(header::HOST, "evil.example".parse().unwrap());
        assert!(guard.check(&Method::GET, "/models", &headers).is_err());
    }

    #[test]
    fn one_of_the_keys_opens_and_an_open_address_needs_one() {
        let open = "0.0.0.0".parse().unwrap();
        let keys = ApiKeys::from_lines("# team\nfirst\n\n  second \n");
        let guard = Guard::new(open, keys.clone(), false, &[]).unwrap();
        for headers in [
            [("authorization", "Bearer first")],
            [("authorization", "bearer second")],
            [("x-api-key", "second")],
        ] {
            assert!(check(&guard, Method::POST, &headers), "{headers:?}");
        }
        for headers in [
            [("authorization", "Bearer firs")],
            [("authorization", "Bearer first1")],
            [("authorization", "Basic first")],
            [("x-api-key", "")],
            [("x-api-key", "# team")],
        ] {
            assert!(!check(&guard, Method::POST, &headers), "{headers:?}");
        }
        assert!(!format!("{keys:?}{guard:?}").contains("first"));
        assert!(Guard::new(open, ApiKeys::default(), false, &[]).is_err());
        assert!(Guard::new(open, ApiKeys::default(), true, &[]).is_ok());
    }
}
