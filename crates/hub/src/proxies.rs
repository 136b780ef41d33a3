//! Proxies that the environment names, and plain HTTP through them.
//!
//! An encrypted connection goes through a proxy by CONNECT, which the HTTP library does. Most
//! proxies refuse that for plain HTTP: they take the request itself, with the whole address.

use std::fmt;

use base64::{Engine, prelude::BASE64_STANDARD};
use ureq::{
    Error, Proxy, ProxyProtocol,
    http::Uri,
    unversioned::transport::{
        Buffers, ConnectionDetails, Connector, DefaultConnector, NextTimeout, TcpConnector,
        Transport,
    },
};

use crate::error::HubError;

/// Proxies by the variables of other programs, and the hosts that need none. Nothing is checked
/// before a server is asked.
#[derive(Clone, Default)]
pub struct Proxies {
    http: Option<Named>,
    https: Option<Named>,
    exempt: String,
}

/// The value of a variable.
#[derive(Clone)]
struct Named {
    variable: &'static str,
    value: String,
}

/// Proxy of a request.
pub(crate) struct NamedProxy {
    variable: &'static str,
    pub(crate) proxy: Proxy,
}

impl Proxies {
    /// Proxies by the values of `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, each also
    /// in lower case.
    pub fn new(value: impl Fn(&str) -> Option<String>) -> Self {
        let value = |name: &str| Some(value(name)?.trim().to_owned()).filter(|v| !v.is_empty());
        let first = |names: [&'static str; 4]| {
            names.iter().find_map(|&variable| Some(Named { variable, value: value(variable)? }))
        };
        Self {
            http: first(["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"]),
            https: first(["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]),
            exempt: value("no_proxy").or_else(|| value("NO_PROXY")).unwrap_or_default(),
        }
    }

    /// The proxy for an address, if it needs one.
    ///
    /// # Errors
    /// The variable names no proxy that can be used.
    pub(crate) fn find(&self, address: &Uri) -> Result<Option<NamedProxy>, HubError> {
        let is_plain = address.scheme_str() == Some("http");
        let named = if is_plain { &self.http } else { &self.https };
        let Some(Named { variable, value }) = named.as_ref().filter(|_| !self.is_exempt(address))
        else {
            return Ok(None);
        };
        let wrong = |problem| HubError::Setting {
            variable,
            // Without a name and a password.
            value: value.rsplit('@').next().unwrap_or_default().to_owned(),
            problem,
        };
        let proxy = Proxy::new(value).map_err(|_| wrong("a proxy is http://HOST:PORT"))?;
        match proxy.protocol() {
            ProxyProtocol::Http | ProxyProtocol::Https => Ok(Some(NamedProxy { variable, proxy })),
            _ => Err(wrong("SOCKS cannot be used: name a proxy http://HOST:PORT")),
        }
    }

    /// Whether `NO_PROXY` has a host, or a domain above it.
    fn is_exempt(&self, address: &Uri) -> bool {
        let host = address.host().unwrap_or_default().to_ascii_lowercase();
        let port = address.port().map_or(String::new(), |port| format!(":{port}"));
        self.exempt.split([',', ' ']).filter(|entry| !entry.is_empty()).any(|entry| {
            let entry = entry.to_ascii_lowercase();
            let entry = entry.strip_suffix(&port).unwrap_or(&entry);
            let entry = entry.trim_start_matches('*').trim_start_matches('.');
            let above = host.strip_suffix(entry);
            entry.is_empty() || above.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })
    }
}

impl NamedProxy {
    /// Header with the name and the password, if the proxy takes the request itself.
    pub(crate) fn authorization(&self, address: &Uri) -> Option<String> {
        let name = self.proxy.username().filter(|_| takes_request(&self.proxy, address))?;
        let password = self.proxy.password().unwrap_or_default();
        Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{name}:{password}"))))
    }
}

impl fmt::Display for NamedProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} of {}", self.proxy.host(), self.proxy.port(), self.variable)
    }
}

/// Whether a proxy gets the request for an address, and no tunnel.
fn takes_request(proxy: &Proxy, address: &Uri) -> bool {
    address.scheme_str() == Some("http") && proxy.protocol() == ProxyProtocol::Http
}

/// Connections to servers and proxies.
#[derive(Debug, Default)]
pub(crate) struct ProxyConnector(DefaultConnector);

impl Connector for ProxyConnector {
    type Out = Box<dyn Transport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<()>,
    ) -> Result<Option<Self::Out>, Error> {
        let proxy = details.config.proxy().filter(|proxy| takes_request(proxy, details.uri));
        let Some(proxy) = proxy else { return self.0.connect(details, chained) };
        let to_proxy = ConnectionDetails {
            uri: proxy.uri(),
            addrs: details.resolver.resolve(proxy.uri(), details.config, details.timeout)?,
            current_time: details.current_time.clone(),
            run_connector: details.run_connector.clone(),
            register_shutdown: details.register_shutdown.clone(),
            ..*details
        };
        let Some(connection) = TcpConnector::default().connect(&to_proxy, None::<()>)? else {
            return Ok(None);
        };
        let host = details.uri.authority().map_or("", |authority| authority.as_str());
        let origin = format!("http://{host}").into_bytes();
        Ok(Some(Box::new(ToProxy { connection, origin })))
    }
}

/// Connection that puts the origin before the path of each request.
#[derive(Debug)]
struct ToProxy<T> {
    connection: T,
    origin: Vec<u8>,
}

impl<T: Transport> Transport for ToProxy<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.connection.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let output = self.connection.buffers().output();
        // Requests have no bodies: other output is headers that did not fit, each with a colon.
        let mut methods = ["GET /", "HEAD /"].iter();
        let Some(method) = methods.find(|method| output[..amount].starts_with(method.as_bytes()))
        else {
            return self.connection.transmit_output(amount, timeout);
        };
        let (at, longer) = (method.len() - 1, amount + self.origin.len());
        if longer > output.len() {
            return Err(Error::Other("the request is too long for a proxy".into()));
        }
        output.copy_within(at..amount, at + self.origin.len());
        output[at..at + self.origin.len()].copy_from_slice(&self.origin);
        self.connection.transmit_output(longer, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.connection.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.connection.is_open()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)], address: &str) -> Result<Option<String>, HubError> {
        let value = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let found = Proxies::new(value).find(&address.parse().unwrap())?;
        Ok(found.map(|proxy| proxy.to_string()))
    }

    #[test]
    fn a_proxy_is_that_of_the_scheme_unless_the_host_needs_none() {
        let variables = [
            ("HTTP_PROXY", "http://user:secret@plain:3128"),
            ("https_proxy", "tls:3129"),
            ("NO_PROXY", "local, .inner.example,*.wild.example,10.0.0.1:80"),
        ];
        for (address, proxy) in [
            ("http://hub.example/a", Some("plain:3128 of HTTP_PROXY")),
            ("https://hub.example/a", Some("tls:3129 of https_proxy")),
            ("http://10.0.0.1:8080/a", Some("plain:3128 of HTTP_PROXY")),
            ("http://notlocal/a", Some("plain:3128 of HTTP_PROXY")),
            ("http://Local:80/a", None),
            ("http://sub.local/a", None),
            ("http://a.inner.example/a", None),
            ("https://b.wild.example/a", None),
            ("http://10.0.0.1:80/a", None),
        ] {
            assert_eq!(found(&variables, address).unwrap().as_deref(), proxy, "{address}");
        }
        let all = [("ALL_PROXY", "http://all")];
        assert_eq!(found(&all, "https://x").unwrap().unwrap(), "all:80 of ALL_PROXY");
        let none = [("ALL_PROXY", "http://all"), ("no_proxy", "*")];
        assert_eq!(found(&none, "https://x").unwrap(), None);
    }

    #[test]
    fn a_variable_without_a_usable_proxy_is_named_without_its_password() {
        for value in ["socks5://user:secret@host:1080", "http://user:secret@", "user:secret@a b"] {
            let error = found(&[("ALL_PROXY", value)], "https://x").unwrap_err().to_string();
            assert!(error.contains("ALL_PROXY") && error.contains("http://HOST:PORT"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
