//! Arguments of `serve`.

use std::{net::IpAddr, num::NonZeroUsize, path::PathBuf};

use clap::{Args, ValueEnum};
use moeflux_hub::PublicHost;
use moeflux_server::{AllowedHost, AllowedOrigin, KeepAlive, Overflow};

use super::{engine::EngineArgs, images::ImageArgs, persist::PrefixCacheArgs, values::path};

const SERVE_EXAMPLES: &str = "\
Examples:
  moeflux serve --model ~/models/Qwen3-30B-A3B-4bit
  moeflux serve --port 9000 --sessions 2 --memory 8GiB
  moeflux serve --models ~/models --ttl 30m
  moeflux serve --host 0.0.0.0 --api-key-file ~/.config/moeflux.keys
  moeflux serve --allow-origin https://app.example --allow-origin app://obsidian.md

Ctrl-C and SIGTERM end the server once running answers are complete, after at most 30 seconds.
Connections without one end at once, and all with a second Ctrl-C.";

/// Rule for conversations over the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OverflowRule {
    /// The request is refused.
    Error,
    /// The oldest turns behind the system message are dropped, calls with their results.
    DropOldestTurns,
}

impl From<OverflowRule> for Overflow {
    fn from(rule: OverflowRule) -> Self {
        match rule {
            OverflowRule::Error => Self::Error,
            OverflowRule::DropOldestTurns => Self::DropOldestTurns,
        }
    }
}

/// Serve the APIs of OpenAI and Anthropic over HTTP
///
/// Clients of OpenAI's API take the printed URL as their base URL, those of Anthropic's the same
/// without /v1. Requests share steps and expert reads, up to --sessions at once; further ones wait.
/// Each request has a line on stderr, unless --quiet is given. Prompts and keys are never logged.
#[derive(Clone, Debug, Args)]
#[command(after_help = SERVE_EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Folder of models, of which each request names one
    ///
    /// Each folder in DIR with a checkpoint is a model of that name, and so is each GGUF file. One
    /// model is loaded at a time: when a request names another one, it is loaded once the running
    /// requests have ended. DIR/moeflux.toml may have settings for each model; options given here
    /// override them.
    #[arg(long, value_parser = path(), value_name = "DIR", conflicts_with_all = ["model", "mirror"])]
    pub(crate) models: Option<PathBuf>,
    /// Unload a model after this time without requests, such as 10m [default: it stays loaded]
    #[arg(long, value_name = "TIME", value_parser = str::parse::<KeepAlive>, requires = "models", allow_hyphen_values = true)]
    pub(crate) ttl: Option<KeepAlive>,
    /// IP address to listen at
    ///
    /// An address that other machines reach, such as 0.0.0.0, requires --api-key-file or --no-key.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port; 0 is any free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub(crate) port: u16,
    /// Requests that are answered at once; each has the context of --ctx [default: 4]
    #[arg(long, value_name = "N")]
    pub(crate) sessions: Option<NonZeroUsize>,
    /// Requests that may wait; further ones are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) waiting: usize,
    /// File of API keys, one per line; a request must have one of them
    ///
    /// As `Authorization: Bearer KEY` or `x-api-key: KEY`. Lines that start with # are skipped.
    #[arg(long, value_name = "FILE", conflicts_with = "no_key")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Let other machines send requests without a key
    #[arg(long)]
    pub(crate) no_key: bool,
    /// Allow this name in the headers Host and Origin, beside localhost; may be repeated
    ///
    /// A name or an address without a port, such as box.lan, 10.0.0.5 or [fd00::5].
    #[arg(long, value_name = "NAME", value_parser = str::parse::<AllowedHost>)]
    pub(crate) allow_host: Vec<AllowedHost>,
    /// Allow pages and apps of this origin to send requests and read answers; may be repeated
    ///
    /// Scheme, host and port must be the same, as in https://app.example, http://10.0.0.5:3000,
    /// app://obsidian.md or vscode-webview://ID. `null`, `file://` and `*` are what pages of
    /// anybody have: they require --api-key-file.
    #[arg(long, value_name = "ORIGIN", value_parser = str::parse::<AllowedOrigin>)]
    pub(crate) allow_origin: Vec<AllowedOrigin>,
    /// Rule for a conversation over the context
    ///
    /// By default it is an error, which agents know: they shorten the conversation themselves. A
    /// request with `truncation` overrides this. Dropped messages are counted in the header
    /// x-moeflux-dropped-messages and in /metrics.
    #[arg(long, value_name = "RULE", value_enum, default_value_t = OverflowRule::Error)]
    pub(crate) overflow: OverflowRule,
    /// Leave out keywords of JSON schemas that cannot be enforced
    ///
    /// By default such a schema is an error that names the keyword, unless the request says
    /// `strict: false`. The keyword is named in the header x-moeflux-notes and in the
    /// request's line on stderr.
    #[arg(long)]
    pub(crate) lenient_schemas: bool,
    /// Let objects have properties that their schema does not list
    ///
    /// The specification allows them where a schema says nothing of them. By default an object
    /// that lists its properties has no others.
    #[arg(long)]
    pub(crate) open_objects: bool,
    /// Fetch images at https addresses of these hosts; by default requests contain their images
    ///
    /// Exact names, such as images.example.com. A host that has an address on a local network is
    /// refused, and so are redirects to other hosts. A file has at most 20 MiB, and 10 seconds to
    /// arrive. No proxy is asked.
    #[arg(long, value_name = "HOST,...", value_delimiter = ',', value_parser = str::parse::<PublicHost>)]
    pub(crate) image_urls: Vec<PublicHost>,
    #[command(flatten)]
    pub(crate) cache: PrefixCacheArgs,
    #[command(flatten)]
    pub(crate) images: ImageArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
