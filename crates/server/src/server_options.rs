//! Options of a server, and the memory that it takes.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use moeflux::text::MaskSource;

use crate::{
    apis::responses::RESPONSES_BYTES,
    requests::{answered_turn::TURNS_BYTES, image_fetches::ImageFetcher, overflow::Overflow},
    transport::{
        access::RequestLog,
        allowed::{AllowedHost, AllowedOrigin},
        guard::ApiKeys,
        timeouts::Timeouts,
    },
};

/// Bytes for requests that are being read: their bodies, fields and prompts. A sixteenth of the
/// budget within these bounds.
const REQUEST_BYTES: (u64, u64) = (80 << 20, 1 << 30);
const REQUEST_SHARE: u64 = 16;

/// Default connections at once.
const CONNECTIONS: usize = 512;

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

/// Options of a [`Server`](crate::Server).
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
    /// Origins of pages and apps that may send requests and read responses, beside the origins
    /// of these hosts. Origins of anybody's pages, such as `null`, need keys.
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
    /// Fetches images that have addresses. Default: such images are refused.
    pub images: ImageFetcher,
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
            images: ImageFetcher::default(),
            timeouts: Timeouts::default(),
            request_memory: REQUEST_BYTES.0,
            give_back: || {},
            connections: CONNECTIONS,
        }
    }
}
