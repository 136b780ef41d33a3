//! What outlasts a run.

use std::path::PathBuf;

use clap::Args;
use moeflux::KvFormat;

use super::kv_format;
use crate::units::parse_size;

const KEEP: &str = "Keeping what was computed";

/// What is gone on from, and what is left for later runs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = KEEP)]
pub(crate) struct KeepArgs {
    /// Go on with the session in FILE, and save it there again after the answer
    ///
    /// If there is no such file, a new session is saved there. Nothing of what is in it is computed again. It holds the tokens
    /// as the model saw and made them, thoughts included, so a conversation goes on word for word as if it had never been
    /// interrupted; anybody who can read the file can read the conversation. It takes the place of an older one only when it is whole: after an error, or
    /// Ctrl-C before there is an answer, FILE is as it was. It fits the model it was saved with, with the same --exact and --kv.
    #[arg(long, value_name = "FILE")]
    pub(crate) session: Option<PathBuf>,
    /// What keys and values are saved as in FILE: q8, f16 or f32 [default: as --kv, every bit]
    ///
    /// No more bits than --kv has. q8 makes FILE smaller, for a model whose layers all have keys and values to little more than half
    /// of f16's. What goes on from it is then close to what it would have been, but not word for word; FILE says so, and so
    /// do the runs that go on from it. What --kv is stays as it is.
    #[arg(long, value_name = "FORMAT", value_parser = kv_format(), hide_possible_values = true, alias = "session-keys",
        requires = "session")]
    pub(crate) session_kv: Option<KvFormat>,
    /// Save in FILE too which experts are in memory, so that the next run has them there before it begins
    ///
    /// Only their numbers are saved. Whoever goes on from FILE reads them, as far as there are slots for them, before the prompt is
    /// computed: up to as many bytes as all slots hold, at the speed of the disk. What the prompt and the answer need of them is not
    /// read then; but a short prompt does not need all, and its first token comes later. Without effect on a model that memory
    /// holds.
    #[arg(long, requires = "session")]
    pub(crate) session_experts: bool,
    /// Keep computed prompts in DIR, and go on from there when a prompt begins like one of them
    ///
    /// For long texts that are asked about again and again. How much of a kept prompt can be used depends on the model: one
    /// whose layers all have keys and values goes on from where two prompts part; one with recurrent or sliding-window layers
    /// needs a prompt that begins with the whole of a kept one. Several processes may share DIR. Anybody who can read it can
    /// read the prompts.
    #[arg(long, value_name = "DIR")]
    pub(crate) prefix_cache: Option<PathBuf>,
    /// Most bytes that --prefix-cache keeps; what was not used for the longest time goes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "4GiB", requires = "prefix_cache")]
    pub(crate) prefix_cache_size: u64,
}
