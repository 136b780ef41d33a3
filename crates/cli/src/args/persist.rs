//! Options for state that outlives a run: sessions and prompts on disk.

use std::path::PathBuf;

use clap::Args;
use moeflux::{Error, runtime::KvFormat, session::SnapshotFolder};

use super::values::{kv_format, parse_size, path};

const PERSIST: &str = "Sessions and prefix cache";

/// Default maximum size of a prefix cache on disk.
const PREFIX_CACHE_SIZE: u64 = 4 << 30;

/// Most bytes of a server's answers in the folder, and their share of a small one.
const ANSWERS_SIZE: u64 = 256 << 20;
const ANSWERS_SHARE: u64 = 4;

/// Session file and prefix cache.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = PERSIST)]
pub(crate) struct PersistArgs {
    /// Continue the session in FILE, and save it there after the answer
    ///
    /// A missing FILE is created. Nothing in it is computed again. It contains the exact tokens of
    /// the conversation, thoughts included, so it continues as if it had never been interrupted.
    /// Anyone who can read FILE can read the conversation. FILE is replaced atomically: after an
    /// error, or Ctrl-C before an answer, it is unchanged. It requires the model it was saved with,
    /// and the same --exact and --kv.
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) session: Option<PathBuf>,
    /// Format of the KV cache in FILE: q8, f16 or f32 [default: as --kv, lossless]
    ///
    /// No wider than --kv. q8 makes FILE smaller, down to slightly more than half of f16 for models
    /// with attention in all layers. A session restored from it is close to the original, not
    /// identical; FILE and the runs that continue from it say so. It does not change --kv.
    #[arg(long, value_name = "FORMAT", value_parser = kv_format(), hide_possible_values = true, alias = "session-keys",
        requires = "session")]
    pub(crate) session_kv: Option<KvFormat>,
    /// Also save in FILE which experts are in memory, and load them when the session is restored
    ///
    /// Only their ids are saved. A run that restores FILE reads these experts before prefill, as
    /// far as it has slots: up to the bytes of all slots, at the speed of the disk. Prompt and
    /// answer then read fewer experts, but the first token of a short prompt comes later. No effect
    /// on a model that fits in memory.
    #[arg(long, requires = "session")]
    pub(crate) session_experts: bool,
    #[command(flatten)]
    pub(crate) cache: PrefixCacheArgs,
}

/// Prefix cache on disk.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = PERSIST)]
pub(crate) struct PrefixCacheArgs {
    /// Cache computed prompts in DIR, and reuse them for prompts with the same prefix
    ///
    /// For long texts that are used in many prompts. The reusable part depends on the model: with
    /// attention in all layers, the longest common prefix; with recurrent or sliding-window layers,
    /// only a whole cached prompt. Several processes may share DIR. Anyone who can read it can read
    /// the prompts.
    #[arg(long, value_parser = path(), value_name = "DIR")]
    pub(crate) prefix_cache: Option<PathBuf>,
    /// Maximum size of --prefix-cache; the least recently used prompts are evicted [default: 4GiB]
    ///
    /// In blocks of the disk. With `serve` it includes the remembered answers, which have at most a
    /// quarter and 256 MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "prefix_cache")]
    pub(crate) prefix_cache_size: Option<u64>,
}

impl PrefixCacheArgs {
    /// Opens the folder, and creates it if it does not exist; `None` if none is given.
    ///
    /// # Errors
    /// It cannot be created.
    pub(crate) fn open(&self) -> Result<Option<SnapshotFolder>, Error> {
        self.open_beside(0)
    }

    /// Opens the folder for a server, whose answers take [a part](Self::answers_size) of its size.
    ///
    /// # Errors
    /// It cannot be created.
    pub(crate) fn open_for_server(&self) -> Result<Option<SnapshotFolder>, Error> {
        self.open_beside(self.answers_size())
    }

    /// Most bytes of a server's answers in the folder.
    pub(crate) fn answers_size(&self) -> u64 {
        (self.size() / ANSWERS_SHARE).min(ANSWERS_SIZE)
    }

    fn size(&self) -> u64 {
        self.prefix_cache_size.unwrap_or(PREFIX_CACHE_SIZE)
    }

    fn open_beside(&self, other_bytes: u64) -> Result<Option<SnapshotFolder>, Error> {
        let open = |path| SnapshotFolder::open(path, self.size() - other_bytes);
        self.prefix_cache.as_ref().map(open).transpose()
    }
}
