//! An architecture of GGUF: its keys and its names of tensors.

use moeflux_base::Error;

use super::{
    super::{
        config::{Config, Keys},
        metadata::Metadata,
        names::{self, NameRow, row},
    },
    registry::all,
    uniform,
};
use crate::checkpoint::data_file::DataFile;

/// An architecture as llama.cpp names it.
pub struct GgufArchitecture {
    /// `general.architecture`, and the prefix of its keys.
    pub name: &'static str,
    /// `model_type` of the Hub's configs that become it, and that `synth` writes.
    pub(super) model_types: &'static [&'static str],
    /// Names of tensors besides the common ones.
    pub(in crate::checkpoint::gguf) rows: &'static [&'static [NameRow]],
    /// Whether value heads of delta-nets are dealt out to the key heads in turn.
    pub value_heads_dealt: bool,
    /// Whether rows of queries and keys are reordered, so that RoPE's pairs are neighbours.
    pub pairs_adjacent: bool,
    /// Config as the Hub has it.
    pub(in crate::checkpoint::gguf) config: fn(&Keys<'_>) -> Result<Config, Error>,
}

/// Entry of an architecture without names besides the common ones.
pub(super) const PLAIN: GgufArchitecture = GgufArchitecture {
    name: "",
    model_types: &[],
    rows: &[],
    value_heads_dealt: false,
    pairs_adjacent: false,
    config: uniform::qwen3_moe,
};

/// Shared experts without a gate.
pub(super) const SHARED_EXPERTS: &[NameRow] = &[
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// A shared expert, mostly with a gate.
pub(super) const SHARED_EXPERT: &[NameRow] = &[
    row("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    row("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// A shared expert as Tencent names it.
pub(super) const SHARED_MLP: &[NameRow] = &[
    row("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    row("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
];

/// Stacked experts under their names on the Hub.
pub(super) const EXPERTS: &[NameRow] = &[
    row("ffn_gate_exps", "mlp.experts.gate_proj"),
    row("ffn_up_exps", "mlp.experts.up_proj"),
    row("ffn_down_exps", "mlp.experts.down_proj"),
];

/// Experts of Mixtral's block.
pub(super) const BLOCK_SPARSE: &[NameRow] = &[
    row("ffn_gate_inp", "block_sparse_moe.gate"),
    row("ffn_gate_exps", "block_sparse_moe.switch_mlp.gate_proj"),
    row("ffn_up_exps", "block_sparse_moe.switch_mlp.up_proj"),
    row("ffn_down_exps", "block_sparse_moe.switch_mlp.down_proj"),
];

/// The norm before the feed-forward part, where it is named after attention.
pub(super) const POST_ATTENTION_NORM: &[NameRow] =
    &[row("post_attention_norm", "post_attention_layernorm")];

impl GgufArchitecture {
    /// The architecture of a `model_type`, if GGUF files of it are read.
    pub fn for_model_type(model_type: &str) -> Option<&'static Self> {
        let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
        all().find(|known| known.model_types.contains(&plain))
    }

    /// Name in GGUF of a tensor that has this name on the Hub.
    pub fn tensor_name(&self, hub: &str) -> Option<String> {
        names::gguf_name(hub, self.rows)
    }

    /// The architecture of a file.
    ///
    /// # Errors
    /// It is missing or not read.
    pub(in crate::checkpoint::gguf) fn find(
        metadata: &Metadata,
        files: &[DataFile],
    ) -> Result<&'static Self, Error> {
        let key = "general.architecture";
        let name = metadata.text(files, key)?.ok_or_else(|| metadata.missing(key))?;
        if let Some(found) = all().find(|known| known.name == name) {
            return Ok(found);
        }
        let mut read: Vec<_> = all().map(|known| known.name).collect();
        read.sort_unstable();
        let problem = format!("is {name:?}, which is not read; read are: {}", read.join(", "));
        Err(metadata.problem(key, &problem))
    }
}
