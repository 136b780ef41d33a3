//! Options of opening a model.

use moeflux::{
    EngineOptions, MemoryRequest,
    experts::PrefetchMode,
    runtime::{CardBudgets, DeviceOptions, KvFormat},
};
use serde::Deserialize;

use crate::{fault::Fault, host_process::HostProcess};

/// Options with which a model is opened, as in JSON. Defaults are the command line's.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Bytes that moeflux may hold in host memory.
    pub memory: Option<u64>,
    /// `auto`, `cpu`, `gpu`, `gpu:1`, `gpu:0,gpu:1`, `reference`.
    pub device: Option<String>,
    /// Bytes of each card.
    pub device_memory: Vec<u64>,
    /// Positions per session.
    pub context: Option<usize>,
    /// Sequences that compute together.
    pub sessions: Option<usize>,
    /// Bytes of the prefix cache and of marks.
    pub marks: Option<u64>,
    /// Worker threads.
    pub threads: Option<usize>,
    /// Format of the KV cache.
    pub kv_format: Option<String>,
    /// Whether all is computed in f32.
    pub exact: bool,
    /// Whether forms of answers have memory. Default: yes.
    pub grammars: Option<bool>,
    /// Tokens of a prefill chunk.
    pub chunk: Option<usize>,
    /// `auto`, `on` or `off`.
    pub prefetch: Option<String>,
    /// Whether the model is a path or the built-in one: the Hub and its cache are not looked at.
    pub local: bool,
    /// Revision of a model of the Hub.
    pub revision: Option<String>,
    /// Whether files that are missing in the Hub's cache are downloaded. Default: yes.
    pub download: Option<bool>,
}

impl OpenOptions {
    /// # Errors
    /// A value has no meaning.
    pub(crate) fn engine(&self) -> Result<EngineOptions, Fault> {
        let mut memory = MemoryRequest::default()
            .budget(self.memory)
            .beside(HostProcess::resident())
            .context(self.context)
            .chunk(self.chunk)
            .sessions(self.sessions)
            .marks(self.marks)
            .grammars(self.grammars.unwrap_or(true));
        memory = match &self.device_memory[..] {
            [] => memory,
            [one] => memory.device_budget(*one),
            several => memory.card_budgets(CardBudgets::new(several)?),
        };
        let named = |what: &str, name: &str, known: &str| {
            Fault::Invalid(format!("{what} is {name:?}: expected one of {known}"))
        };
        let kv_format = match self.kv_format.as_deref() {
            None => None,
            Some("f32") => Some(KvFormat::F32),
            Some("f16") => Some(KvFormat::F16),
            Some("q8") => Some(KvFormat::Q8),
            Some(other) => return Err(named("kv_format", other, "f32, f16, q8")),
        };
        let prefetch = match self.prefetch.as_deref() {
            None | Some("auto") => PrefetchMode::Auto,
            Some("on") => PrefetchMode::On,
            Some("off") => PrefetchMode::Off,
            Some(other) => return Err(named("prefetch", other, "auto, on, off")),
        };
        let device = DeviceOptions::default()
            .name(self.device.as_deref().unwrap_or("auto"))
            .threads(self.threads)
            .kv_format(kv_format)
            .exact(self.exact);
        Ok(EngineOptions::default().memory(memory).device(device).prefetch(prefetch))
    }
}
