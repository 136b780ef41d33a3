//! Keys of a GGUF file that is written, in their order.

use serde_json::Value;

use crate::blueprint::{Blueprint, GqaBlueprint, MixerBlueprint};

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum KeyValue {
    /// An unsigned integer.
    U32(u32),
    /// A number.
    F32(f32),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Signed integers.
    I32s(Vec<i32>),
    /// Unsigned integers.
    U64s(Vec<u64>),
    /// Numbers.
    F32s(Vec<f32>),
    /// True or false for each layer.
    Bools(Vec<bool>),
}

/// Keys and values in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyList(pub Vec<(String, KeyValue)>);

impl KeyList {
    /// Appends a key.
    pub fn push(&mut self, key: impl Into<String>, value: KeyValue) {
        self.0.push((key.into(), value));
    }
}

/// Part of the file that a key is in. Keys of a part are in the order of [`ORDER`], then in the
/// order of the rows: a model has the same bytes from one release to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Sizes,
    Factors,
    Rope,
    Heads,
    Recurrent,
    Routers,
    Layers,
    Memory,
}

/// Order of the keys of sizes and factors. Others follow.
const ORDER: [&str; 45] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "leading_dense_block_count",
    "interleave_moe_layer_step",
    "attention.sliding_window",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "attention.indexer.kpool",
    "moe_latent_size",
    "attention.output_group_count",
    "attention.output_lora_rank",
    "hyper_connection.count",
    "hyper_connection.low_rank",
    "hyper_connection.sinkhorn_iterations",
    "hash_layer_count",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "full_attention_interval",
    "shortconv.l_cache",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "logit_scale",
    "embedding_scale",
    "attention.scale",
    "residual_scale",
    "final_logit_softcapping",
    "attention.value_scale",
    "hyper_connection.epsilon",
    "attention.compress_rope_freq_base",
];

/// A key of a file, and its place.
struct PlacedKey {
    place: Place,
    name: &'static str,
    value: KeyValue,
}

/// Writer of an architecture's keys.
pub(crate) struct KeyWriter<'a> {
    /// Config of the language model. Keys of several names have all of them.
    pub(crate) config: Value,
    pub(crate) blueprint: &'a Blueprint,
    /// Place of the next keys.
    pub(crate) place: Place,
    keys: Vec<PlacedKey>,
}

impl<'a> KeyWriter<'a> {
    pub(super) const fn new(config: Value, blueprint: &'a Blueprint) -> Self {
        Self { config, blueprint, place: Place::Sizes, keys: Vec::new() }
    }

    /// All keys, with the prefix of the architecture.
    pub(super) fn finish(mut self, prefix: &str) -> KeyList {
        let rank = |name| ORDER.iter().position(|known| *known == name).unwrap_or(ORDER.len());
        self.keys.sort_by_key(|key| match key.place {
            place @ (Place::Sizes | Place::Factors) => (place, rank(key.name)),
            place => (place, 0),
        });
        let keys = self.keys.into_iter();
        KeyList(keys.map(|key| (format!("{prefix}.{}", key.name), key.value)).collect())
    }

    /// Writes a key, in place of its former value.
    pub(crate) fn push(&mut self, name: &'static str, value: KeyValue) {
        self.keys.retain(|key| key.name != name);
        self.keys.push(PlacedKey { place: self.place, name, value });
    }

    pub(crate) fn push_integer(&mut self, name: &'static str, value: usize) {
        self.push(name, KeyValue::U32(value as u32));
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key.name == name)
    }

    /// An integer of the config, or the one that all layers have.
    pub(crate) fn integer(&self, name: &str) -> Option<u32> {
        let all = match &self.config[name] {
            Value::Array(all) => all.as_slice(),
            one => std::slice::from_ref(one),
        };
        let first = all.first().filter(|first| all.iter().all(|n| n == *first))?;
        u32::try_from(first.as_u64()?).ok()
    }

    /// An integer of the config, or 0.
    pub(crate) fn size(&self, name: &str) -> u32 {
        self.integer(name).unwrap_or(0)
    }

    /// Whether each layer is of a kind, by a list of the config.
    pub(crate) fn layer_flags(&self, list: &str, kind: &str) -> Option<Vec<bool>> {
        let kinds = self.config[list].as_array()?;
        Some(kinds.iter().map(|name| name == kind).collect())
    }

    /// The mixer of each layer.
    pub(crate) fn mixers(&self) -> impl Iterator<Item = Option<&'a MixerBlueprint>> + use<'a> {
        self.blueprint.layers.iter().map(|layer| layer.mixer())
    }

    /// Grouped-query attention of each layer that has it.
    pub(crate) fn attentions(&self) -> impl Iterator<Item = &'a GqaBlueprint> + use<'a> {
        self.mixers().filter_map(|mixer| match mixer {
            Some(MixerBlueprint::Gqa(gqa)) => Some(&**gqa),
            _ => None,
        })
    }
}
