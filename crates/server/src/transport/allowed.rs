//! Hosts and origins that a server is told to allow. Texts that no client can send are errors.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// Form of an origin.
const ORIGIN_FORM: &str = "write SCHEME://HOST or SCHEME://HOST:PORT, such as \
                           https://app.example, http://10.0.0.5:3000 or app://obsidian.md";

/// Form of a host.
const HOST_FORM: &str = "write a name or an address without a port, such as box.lan, 10.0.0.5 or \
                         [fd00::5]";

/// Schemes of pages with the ports that browsers leave out.
const DEFAULT_PORTS: [(&str, u16); 2] = [("http", 80), ("https", 443)];

/// Schemes whose pages have the origin `null`.
const WITHOUT_ORIGIN: [&str; 4] = ["about", "blob", "data", "javascript"];

/// The origin that some apps send for files.
const FILES: &str = "file://";

/// Host that requests may name beside the local machine, in their headers Host and Origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedHost(String);

impl AllowedHost {
    /// The host in lower case.
    pub(crate) fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AllowedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A name such as `box.lan`, an IPv4 address, or an IPv6 address in brackets.
impl FromStr for AllowedHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let after_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
        let alone = after_scheme.split(['/', '?', '#']).next().unwrap_or_default();
        let alone = alone.rsplit('@').next().unwrap_or_default();
        if alone != text {
            return Err(match host(alone) {
                Ok(_) => format!("it is more than a host: write {alone}"),
                Err(_) => format!("it is more than a host: {HOST_FORM}"),
            });
        }
        if let Ok(address) = text.parse::<Ipv6Addr>() {
            return Err(format!("requests name an IPv6 address in brackets: write [{address}]"));
        }
        let HostAndPort { host: name, port } = HostAndPort::split(text);
        let valid = host(name)?;
        match port {
            None => Ok(Self(valid)),
            Some(_) => Err(format!("any port of a host is allowed: write {valid}")),
        }
    }
}

/// Origin of pages or apps that may send requests and read responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedOrigin(OriginRule);

#[derive(Clone, Debug, PartialEq, Eq)]
enum OriginRule {
    /// Every one.
    Any,
    /// That of pages without one.
    Null,
    /// Scheme, host and port as browsers write them.
    Exact(String),
}

impl AllowedOrigin {
    /// Whether the origin of a request is this one.
    pub(crate) fn allows(&self, origin: &str) -> bool {
        match &self.0 {
            OriginRule::Any => true,
            OriginRule::Null => origin == "null",
            OriginRule::Exact(ours) => origin.eq_ignore_ascii_case(ours),
        }
    }

    /// Whether pages of anybody have this origin.
    pub(crate) fn is_anybodys(&self) -> bool {
        match &self.0 {
            OriginRule::Any | OriginRule::Null => true,
            OriginRule::Exact(ours) => ours == FILES,
        }
    }
}

impl fmt::Display for AllowedOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            OriginRule::Any => "*",
            OriginRule::Null => "null",
            OriginRule::Exact(ours) => ours,
        })
    }
}

/// An origin as browsers send it, such as `https://app.example` or `tauri://localhost`; `null`, or
/// `*` for all.
impl FromStr for AllowedOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "*" => return Ok(Self(OriginRule::Any)),
            "null" => return Ok(Self(OriginRule::Null)),
            "" => return Err(format!("it is empty: {ORIGIN_FORM}")),
            _ => {}
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            let HostAndPort { host: name, port } = HostAndPort::split(text);
            return Err(match host(name).and(port.map_or(Ok(0), parse_port)) {
                Ok(_) => format!("it has no scheme: write http://{text} or https://{text}"),
                Err(_) => ORIGIN_FORM.to_owned(),
            });
        };
        let scheme = scheme.to_ascii_lowercase();
        let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
        if !is_scheme {
            return Err(format!("its scheme is not valid: {ORIGIN_FORM}"));
        }
        if WITHOUT_ORIGIN.contains(&&*scheme) {
            return Err(format!("pages of {scheme}: have the origin null: write null"));
        }
        if scheme == "file" {
            return match rest {
                "" => Ok(Self(OriginRule::Exact(FILES.to_owned()))),
                _ => Err("a file has no origin of its own: browsers send null, some apps file://"
                    .to_owned()),
            };
        }
        let default_port = DEFAULT_PORTS.iter().find(|(name, _)| *name == scheme);
        let origin = |authority: &str| {
            let HostAndPort { host: name, port } = HostAndPort::split(authority);
            let name = match default_port {
                Some(_) => host(name)?,
                None => app_host(name)?,
            };
            let port = port.map(parse_port).transpose()?;
            let port = port.filter(|port| default_port.is_none_or(|(_, usual)| usual != port));
            let port = port.map_or_else(String::new, |port| format!(":{port}"));
            Ok::<_, String>(format!("{scheme}://{name}{port}"))
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let alone = authority.rsplit('@').next().unwrap_or_default();
        match (origin(alone), alone == rest) {
            (Ok(origin), true) => Ok(Self(OriginRule::Exact(origin))),
            (Ok(origin), false) => {
                Err(format!("an origin has no user, path or slash at its end: write {origin}"))
            }
            (Err(problem), _) => Err(problem),
        }
    }
}

/// Parts of an authority.
struct HostAndPort<'a> {
    host: &'a str,
    port: Option<&'a str>,
}

impl<'a> HostAndPort<'a> {
    /// Parts of `text`, neither of which is checked.
    fn split(text: &'a str) -> Self {
        match text.rsplit_once(':') {
            // Colons in brackets belong to an address.
            Some((host, port)) if !port.contains(']') => Self { host, port: Some(port) },
            _ => Self { host: text, port: None },
        }
    }
}

/// A port that a page can have.
fn parse_port(text: &str) -> Result<u16, String> {
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let port = text.parse().ok().filter(|port| is_number && *port > 0);
    port.ok_or_else(|| format!("its port is {text:?}: a port is a number from 1 to 65535"))
}

/// A host as browsers write it.
fn host(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err(format!("it has no host: {HOST_FORM}"));
    }
    if text.contains('*') {
        return Err("part of a name cannot be *: give each name".to_owned());
    }
    if !text.is_ascii() {
        return Err(
            "browsers send such names in ASCII: write the form that begins with xn--".to_owned()
        );
    }
    if let Some(inner) = text.strip_prefix('[') {
        let address = inner.strip_suffix(']').and_then(|inner| inner.parse::<Ipv6Addr>().ok());
        let address = address.ok_or_else(|| format!("it is no IPv6 address: {HOST_FORM}"))?;
        return Ok(format!("[{address}]"));
    }
    let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let has_labels =
        text.strip_suffix('.').unwrap_or(text).split('.').all(|label| !label.is_empty());
    if !text.bytes().all(is_name) || !has_labels {
        return Err(HOST_FORM.to_owned());
    }
    if text.bytes().all(|b| b.is_ascii_digit() || b == b'.') && text.parse::<Ipv4Addr>().is_err() {
        return Err("an IPv4 address has four numbers from 0 to 255, such as 10.0.0.5".to_owned());
    }
    Ok(text.to_ascii_lowercase())
}

/// A host of an app's own scheme, which may be any name.
fn app_host(text: &str) -> Result<String, String> {
    if text.starts_with('[') {
        return host(text);
    }
    let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-._~%!$&'()+,;=".contains(&b);
    match text {
        "" => Err(format!("it has no host: {ORIGIN_FORM}")),
        _ if text.contains('*') => Err("part of a name cannot be *: give each name".to_owned()),
        _ if text.bytes().all(is_name) => Ok(text.to_ascii_lowercase()),
        _ => Err(ORIGIN_FORM.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> AllowedOrigin {
        text.parse().unwrap_or_else(|problem| panic!("{text}: {problem}"))
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        for (text, origin_of_page) in [
            ("https://good.example", "https://good.example"),
            ("HTTPS://Good.Example", "https://good.example"),
            ("https://good.example:443", "https://good.example"),
            ("http://good.example:0080", "http://good.example"),
            ("http://good.example:443", "http://good.example:443"),
            ("http://localhost:3000", "http://localhost:3000"),
            ("http://10.0.0.5:3000", "http://10.0.0.5:3000"),
            ("http://[FD00:0::5]:3000", "http://[fd00::5]:3000"),
            ("vscode-webview://0a1b-2c", "vscode-webview://0a1b-2c"),
            ("app://obsidian.md", "app://obsidian.md"),
            ("app://-", "app://-"),
            ("tauri://localhost", "tauri://localhost"),
            ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
            ("file://", "file://"),
            ("null", "null"),
        ] {
            assert!(origin(text).allows(origin_of_page), "{text}");
            assert_eq!(origin(text).to_string(), origin_of_page, "{text}");
        }
        assert!(origin("*").allows("https://any.example") && origin("*").allows("null"));
        assert!(origin("https://good.example").allows("https://GOOD.example"));
        let anybodys = ["*", "null", "file://", "https://good.example", "app://-"];
        assert_eq!(
            anybodys.map(|text| origin(text).is_anybodys()),
            [true, true, true, false, false]
        );
    }

    #[test]
    fn look_alikes_of_an_origin_are_others() {
        let good = origin("https://good.example");
        for other in [
            "https://good.example.evil.example",
            "https://evil.example/https://good.example",
            "https://notgood.example",
            "https://good.exampl",
            "https://good.example.",
            "https://good.example/",
            "https://good.example:8443",
            "https://good.example:",
            "http://good.example",
            "https://user@good.example",
            "https://good.example@evil.example",
            "https://good.example#evil",
            "https://good.example evil",
            " https://good.example",
            "good.example",
            "null",
            "*",
            "",
        ] {
            assert!(!good.allows(other), "{other}");
        }
    }

    #[test]
    fn origins_that_no_page_has_are_errors_with_the_right_form() {
        for (text, words) in [
            ("", "such as https://app.example"),
            ("good.example", "write http://good.example or https://good.example"),
            ("good.example:3000", "http://good.example:3000"),
            ("https://", "has no host"),
            ("app://", "has no host"),
            ("https://good.example/", "write https://good.example"),
            ("https://good.example/app?x=1", "write https://good.example"),
            ("https://user:pw@good.example", "write https://good.example"),
            ("https://good.example:", "from 1 to 65535"),
            ("https://good.example:0", "from 1 to 65535"),
            ("https://good.example:65536", "from 1 to 65535"),
            ("https://good.example:+80", "from 1 to 65535"),
            ("https://good.example:http", "from 1 to 65535"),
            ("https://good example", "box.lan"),
            (" https://good.example", "scheme"),
            ("https://good.example ", "box.lan"),
            ("https://*.example", "give each name"),
            ("vscode-webview://*", "give each name"),
            ("https://b\u{fc}cher.example", "xn--"),
            ("https://good..example", "box.lan"),
            ("https://10.0.0.300", "four numbers"),
            ("https://[fd00::5", "no IPv6 address"),
            ("1https://good.example", "scheme"),
            ("file:///home/me", "null"),
            ("data://x", "write null"),
            ("https:good.example", "such as https://app.example"),
            ("https://a.example,https://b.example", "such as"),
        ] {
            let problem = text.parse::<AllowedOrigin>().unwrap_err();
            assert!(problem.contains(words), "{text:?}: {problem}");
        }
    }

    #[test]
    fn hosts_that_no_request_names_are_errors_with_the_right_form() {
        for (text, name) in [
            ("box.lan", "box.lan"),
            ("Box.LAN", "box.lan"),
            ("box", "box"),
            ("my_box.lan.", "my_box.lan."),
            ("10.0.0.5", "10.0.0.5"),
            ("[fd00::5]", "[fd00::5]"),
            ("[FD00:0:0::5]", "[fd00::5]"),
        ] {
            assert_eq!(text.parse::<AllowedHost>().unwrap().name(), name);
        }
        for (text, words) in [
            ("", "such as box.lan"),
            ("box.lan:8080", "write box.lan"),
            ("box.lan:", "write box.lan"),
            ("http://box.lan", "write box.lan"),
            ("http://box.lan:8080/v1", "more than a host"),
            ("box.lan/", "write box.lan"),
            ("me@box.lan", "write box.lan"),
            ("fd00::5", "write [fd00::5]"),
            ("[fd00::5]:8080", "write [fd00::5]"),
            ("[fd00::5", "no IPv6 address"),
            ("*.lan", "give each name"),
            ("*", "give each name"),
            ("box lan", "such as box.lan"),
            (" box.lan", "such as box.lan"),
            ("b\u{fc}cher.lan", "xn--"),
            ("box..lan", "such as box.lan"),
            ("10.0.0", "four numbers"),
            ("a.lan,b.lan", "such as box.lan"),
        ] {
            let problem = text.parse::<AllowedHost>().unwrap_err();
            assert!(problem.contains(words), "{text:?}: {problem}");
        }
    }
}
