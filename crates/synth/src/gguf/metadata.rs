//! Metadata of a GGUF file, from the config that the Hub has.

use moeflux_model::blueprint::{Blueprint, GqaBlueprint, GqaShape, MixerBlueprint};
use moeflux_ops::Scoring;
use serde_json::Value;

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum KeyValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    U64s(Vec<u64>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
}

/// Keys and values in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct KeyList(pub(super) Vec<(String, KeyValue)>);

impl KeyList {
    pub(super) fn push(&mut self, key: impl Into<String>, value: KeyValue) {
        self.0.push((key.into(), value));
    }
}

/// A number of a config, and its key in GGUF after the architecture's prefix. Of several names the
/// first that the config has counts.
struct NumberRow {
    config: &'static [&'static str],
    gguf: &'static str,
}

const fn number(config: &'static [&'static str], gguf: &'static str) -> NumberRow {
    NumberRow { config, gguf }
}

/// Numbers that configs name.
const NUMBERS: [NumberRow; 35] = [
    number(&["num_hidden_layers"], "block_count"),
    number(&["max_position_embeddings", "model_max_length"], "context_length"),
    number(&["hidden_size"], "embedding_length"),
    number(&["prefix_dense_intermediate_size", "intermediate_size"], "feed_forward_length"),
    number(&["vocab_size"], "vocab_size"),
    number(&["num_attention_heads"], "attention.head_count"),
    number(EXPERTS, "expert_count"),
    number(TOP_K, "expert_used_count"),
    number(&["moe_intermediate_size", "intermediate_size"], "expert_feed_forward_length"),
    number(SHARED_WIDTH, "expert_shared_feed_forward_length"),
    number(SHARED_EXPERTS, "expert_shared_count"),
    number(&["n_group", "num_expert_group"], "expert_group_count"),
    number(&["topk_group"], "expert_group_used_count"),
    number(DENSE_LAYERS, "leading_dense_block_count"),
    number(&["moe_layer_interval"], "interleave_moe_layer_step"),
    number(&["sliding_window"], "attention.sliding_window"),
    number(&["q_lora_rank"], "attention.q_lora_rank"),
    number(&["kv_lora_rank"], "attention.kv_lora_rank"),
    number(&["index_n_heads", "indexer_n_heads"], "attention.indexer.head_count"),
    number(&["index_head_dim", "indexer_head_dim"], "attention.indexer.key_length"),
    number(&["index_topk", "indexer_budget"], "attention.indexer.top_k"),
    number(&["index_kpool"], "attention.indexer.kpool"),
    number(&["moe_latent_size"], "moe_latent_size"),
    number(&["o_groups"], "attention.output_group_count"),
    number(&["o_lora_rank"], "attention.output_lora_rank"),
    number(&["hc_mult", "hc_count"], "hyper_connection.count"),
    number(&["hc_lowrank"], "hyper_connection.low_rank"),
    number(&["hc_sinkhorn_iters"], "hyper_connection.sinkhorn_iterations"),
    number(&["num_hash_layers"], "hash_layer_count"),
    number(&["linear_conv_kernel_dim"], "ssm.conv_kernel"),
    number(&["linear_key_head_dim"], "ssm.state_size"),
    number(&["linear_num_key_heads"], "ssm.group_count"),
    number(&["linear_num_value_heads"], "ssm.time_step_rank"),
    number(&["full_attention_interval"], "full_attention_interval"),
    number(&["conv_L_cache"], "shortconv.l_cache"),
];

const EXPERTS: &[&str] =
    &["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"];

const TOP_K: &[&str] = &[
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "moe_top_k",
];

const SHARED_EXPERTS: &[&str] =
    &["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"];

/// Size of a shared expert, where configs name it.
const SHARED_WIDTH: &[&str] = &[
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
];

/// Number of dense layers before the first one with experts, where configs name it.
const DENSE_LAYERS: &[&str] =
    &["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"];

/// Codes of `expert_gating_func`.
const SIGMOID: u32 = 2;
const SQRT_SOFTPLUS: u32 = 4;

/// Writer of an architecture's keys.
pub(super) struct ModelKeys<'a> {
    prefix: &'a str,
    pub(super) config: &'a Value,
    pub(super) blueprint: &'a Blueprint,
    list: KeyList,
}

/// Keys of the model: `config` is the language model's part.
pub(super) fn model_keys(prefix: &str, config: &Value, blueprint: &Blueprint) -> KeyList {
    let mut keys = ModelKeys { prefix, config, blueprint, list: KeyList::default() };
    for NumberRow { config, gguf } in &NUMBERS {
        if let Some(n) = keys.first_integer(config) {
            keys.push(gguf, KeyValue::U32(n));
        }
    }
    keys.float(
        &["rms_norm_eps", "layernorm_epsilon", "norm_eps"],
        "attention.layer_norm_rms_epsilon",
    );
    keys.float(&["layer_norm_eps"], "attention.layer_norm_epsilon");
    keys.float(&["logit_scale", "logits_scaling"], "logit_scale");
    keys.float(&["embedding_multiplier"], "embedding_scale");
    keys.float(&["attention_multiplier"], "attention.scale");
    keys.float(&["residual_multiplier"], "residual_scale");
    keys.float(&["final_logit_softcapping"], "final_logit_softcapping");
    keys.float(&["attention_value_scale"], "attention.value_scale");
    keys.float(&["hc_eps"], "hyper_connection.epsilon");
    keys.float(&["compress_rope_theta"], "attention.compress_rope_freq_base");
    keys.rope();
    if keys.integer("kv_lora_rank").is_some() {
        keys.latent();
    } else {
        keys.heads();
    }
    keys.recurrent_layers();
    keys.routers();
    keys.layer_kinds();
    keys.ngram_memory();
    keys.list
}

impl ModelKeys<'_> {
    pub(super) fn push(&mut self, key: &str, value: KeyValue) {
        self.list.push(format!("{}.{key}", self.prefix), value);
    }

    /// Replaces the value of a key.
    pub(super) fn set(&mut self, key: &str, value: KeyValue) {
        let name = format!("{}.{key}", self.prefix);
        self.list.0.retain(|(other, _)| *other != name);
        self.push(key, value);
    }

    /// An integer, or the one that all layers have.
    fn integer(&self, name: &str) -> Option<u32> {
        let all = match &self.config[name] {
            Value::Array(all) => all.as_slice(),
            one => std::slice::from_ref(one),
        };
        let first = all.first().filter(|first| all.iter().all(|n| n == *first))?;
        u32::try_from(first.as_u64()?).ok()
    }

    /// An integer, or 0.
    fn size(&self, name: &str) -> u32 {
        self.integer(name).unwrap_or(0)
    }

    /// The first of some integers that the config has.
    fn first_integer(&self, names: &[&str]) -> Option<u32> {
        names.iter().find_map(|name| self.integer(name))
    }

    /// Writes the first of some numbers that the config has.
    fn float(&mut self, names: &[&str], key: &str) {
        if let Some(x) = names.iter().find_map(|name| self.config[*name].as_f64()) {
            self.push(key, KeyValue::F32(x as f32));
        }
    }

    /// Grouped-query attention of each layer.
    fn attentions(&self) -> impl Iterator<Item = &'_ GqaBlueprint> {
        self.blueprint.layers.iter().filter_map(|layer| match layer.mixer() {
            Some(MixerBlueprint::Gqa(gqa)) => Some(&**gqa),
            _ => None,
        })
    }

    pub(super) fn is(&self, architectures: &[&str]) -> bool {
        architectures.contains(&self.prefix)
    }

    /// Entry of a layer list, or of the list that follows from an interval.
    fn layer_flags(&self, list: &str, kind: &str) -> Option<Vec<bool>> {
        let kinds = self.config[list].as_array()?;
        Some(kinds.iter().map(|name| name == kind).collect())
    }

    fn rope(&mut self) {
        let parameters = &self.config["rope_parameters"];
        let full = parameters.get("full_attention").unwrap_or(parameters);
        let base = self.config["rope_theta"].as_f64().or(full["rope_theta"].as_f64());
        let base = base.or(self.layer_theta(false)).unwrap_or(10_000.0);
        let swa = parameters["sliding_attention"]["rope_theta"].as_f64();
        let swa = swa.or(self.config["swa_rope_theta"].as_f64()).or(self.layer_theta(true));
        let sections = parameters["mrope_section"].as_array().cloned();
        // The converter puts this scaling into the base.
        let width = self.attentions().next().map_or(0.0, |gqa| gqa.shape.head_dim as f64);
        let alpha = self.config["rope_scaling"]["alpha"].as_f64();
        let base = base * alpha.map_or(1.0, |alpha| alpha.powf(width / (width - 2.0)));
        self.push("rope.freq_base", KeyValue::F32(base as f32));
        if let Some(base) = swa {
            self.push("rope.freq_base_swa", KeyValue::F32(base as f32));
        }
        if let Some(sections) = sections {
            let section = |n: &Value| n.as_i64().unwrap_or(0) as i32;
            let sections = sections.iter().map(section).chain([0]).collect();
            self.push("rope.dimension_sections", KeyValue::I32s(sections));
        }
        let scaling = match &self.config["rope_scaling"] {
            Value::Null => full,
            scaling => scaling,
        };
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
        let kind = kind.and_then(Value::as_str);
        let get = |name: &str| scaling[name].as_f64().map(|x| x as f32);
        if let (Some("longrope"), Some(original), Some(positions)) = (
            kind,
            get("original_max_position_embeddings"),
            self.config["max_position_embeddings"].as_f64(),
        ) {
            // The divisors are tensors.
            let factor = (1.0 + (positions as f32 / original).ln() / original.ln()).sqrt();
            let key = "rope.scaling.original_context_length";
            self.push(key, KeyValue::U32(original as u32));
            self.push("rope.scaling.attn_factor", KeyValue::F32(factor));
        }
        let Some(kind) = kind.filter(|kind| ["linear", "yarn"].contains(kind)) else { return };
        let numbers = [
            ("factor", "rope.scaling.factor"),
            ("attention_factor", "rope.scaling.yarn_attn_factor"),
            ("beta_fast", "rope.scaling.yarn_beta_fast"),
            ("beta_slow", "rope.scaling.yarn_beta_slow"),
        ];
        let numbers = numbers.map(|(name, key)| (key, get(name)));
        let original = get("original_max_position_embeddings").map(|n| n as u32);
        let multiplier = get("mscale_all_dim").map(|scale| 0.1 * scale);
        self.push("rope.scaling.type", KeyValue::Text(kind.to_owned()));
        if let Some(positions) = original {
            self.push("rope.scaling.original_context_length", KeyValue::U32(positions));
        }
        for (key, value) in numbers {
            if let Some(value) = value {
                self.push(key, KeyValue::F32(value));
            }
        }
        if let Some(multiplier) = multiplier {
            self.push("rope.scaling.yarn_log_multiplier", KeyValue::F32(multiplier));
        }
    }

    /// RoPE's base of the first layer that has a window or has none, of a list for each layer.
    fn layer_theta(&self, slides: bool) -> Option<f64> {
        let layer = self.attentions().position(|gqa| gqa.shape.window.is_some() == slides)?;
        self.config["rope_theta"].get(layer)?.as_f64()
    }

    /// Widths of latent attention, and of its heads.
    fn latent(&mut self) {
        let [latent, rope, nope, value] =
            ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
                .map(|name| self.size(name));
        for (key, n) in [
            ("attention.head_count_kv", 1),
            ("attention.key_length", latent + rope),
            ("attention.value_length", latent),
            ("attention.key_length_mla", nope + rope),
            ("attention.value_length_mla", value),
            ("rope.dimension_count", rope),
        ] {
            self.push(key, KeyValue::U32(n));
        }
    }

    /// Heads of grouped-query attention and of delta-nets.
    fn heads(&mut self) {
        let heads = self.size("num_attention_heads").max(1);
        let width = self.integer("head_dim").unwrap_or(self.size("hidden_size") / heads);
        let kv = self.integer("num_key_value_heads").unwrap_or(heads);
        if self.is(&["gemma4"]) {
            self.two_kinds_of_heads(width, kv);
            return;
        }
        if self.is(&["laguna", "mimo2", "step35"]) {
            self.heads_by_layer();
            return;
        }
        let share = self.config["partial_rotary_factor"]
            .as_f64()
            .or(self.config["rope_parameters"]["partial_rotary_factor"].as_f64());
        let rotated = share.map(|share| (f64::from(width) * share) as u32);
        let rotated = self.integer("rotary_dim").or(rotated);
        let rotated = rotated.or(self.integer("qk_rope_head_dim")).unwrap_or(width);
        for (key, n) in [
            ("attention.head_count_kv", kv),
            ("attention.key_length", width),
            ("attention.value_length", width),
            ("rope.dimension_count", rotated),
        ] {
            self.push(key, KeyValue::U32(n));
        }
        if let Some(values) = self.integer("linear_num_value_heads") {
            let inner = values * self.size("linear_value_head_dim");
            self.push("ssm.inner_size", KeyValue::U32(inner));
        }
    }

    /// Keys of full layers have no suffix, those of sliding ones `_swa`.
    fn two_kinds_of_heads(&mut self, width: u32, kv: u32) {
        let full = self.integer("global_head_dim").unwrap_or(width);
        let full_kv = self.integer("num_global_key_value_heads").unwrap_or(kv);
        let slides = self.layer_flags("layer_types", "sliding_attention").unwrap_or_default();
        let heads = slides.iter().map(|slides| if *slides { kv } else { full_kv } as i32);
        let heads = heads.collect();
        self.push("attention.head_count_kv", KeyValue::I32s(heads));
        for (key, n) in [
            ("attention.key_length", full),
            ("attention.value_length", full),
            ("attention.key_length_swa", width),
            ("attention.value_length_swa", width),
            ("rope.dimension_count", full),
            ("rope.dimension_count_swa", width),
            ("attention.shared_kv_layers", 0),
            ("embedding_length_per_layer_input", 0),
        ] {
            self.push(key, KeyValue::U32(n));
        }
        self.push("attention.sliding_window_pattern", KeyValue::Bools(slides));
    }

    /// Heads whose numbers and rotated parts differ between layers.
    fn heads_by_layer(&mut self) {
        let layers: Vec<(GqaShape, usize)> =
            self.attentions().map(|gqa| (gqa.shape, 2 * gqa.rope.frequencies.len())).collect();
        let numbers = |of: fn(&GqaShape) -> usize| {
            let all: Vec<i32> = layers.iter().map(|(shape, _)| of(shape) as i32).collect();
            match all.first() {
                Some(first) if all.iter().all(|n| n == first) => KeyValue::U32(*first as u32),
                _ => KeyValue::I32s(all),
            }
        };
        let (heads, kv_heads) = (numbers(|shape| shape.heads), numbers(|shape| shape.kv_heads));
        let widths = [numbers(|shape| shape.head_dim), numbers(|shape| shape.v_head_dim)];
        let rotated = |slides: bool| {
            let of_kind = layers.iter().find(|(shape, _)| shape.window.is_some() == slides);
            of_kind.map(|(_, rotated)| KeyValue::U32(*rotated as u32))
        };
        let rotated = [rotated(false), rotated(true)];
        let [keys, values] = widths;
        self.set("attention.head_count", heads);
        self.push("attention.head_count_kv", kv_heads);
        self.push("attention.key_length", keys);
        self.push("attention.value_length", values);
        // llama.cpp halves the rotated part of Step's full layers itself.
        if self.is(&["step35"]) {
            return;
        }
        for (key, rotated) in
            ["rope.dimension_count", "rope.dimension_count_swa"].into_iter().zip(rotated)
        {
            rotated.into_iter().for_each(|rotated| self.push(key, rotated));
        }
    }

    fn routers(&mut self) {
        let Some((dense, moe)) = self.blueprint.moe_layers().next() else { return };
        let (scoring, normalize) = (moe.router.scoring, moe.router.normalize);
        let shared = moe.shared.as_ref().map(|shared| shared.mlp.up_proj.shape.rows as u32);
        let code = match scoring {
            Scoring::Sigmoid => Some(SIGMOID),
            Scoring::SqrtSoftplus => Some(SQRT_SOFTPLUS),
            _ => None,
        };
        if let Some(code) = code {
            self.push("expert_gating_func", KeyValue::U32(code));
        }
        let is_normed = ["norm_topk_prob", "route_norm", "norm_expert_weight"]
            .iter()
            .find_map(|name| self.config[*name].as_bool())
            .or_else(|| self.is(&["laguna"]).then_some(normalize));
        if let Some(normed) = is_normed {
            self.push("expert_weights_norm", KeyValue::Bool(normed));
        }
        let factors = [
            "routed_scaling_factor",
            "router_scaling_factor",
            "moe_routed_scaling_factor",
            "moe_router_scaling_factor",
            "route_scale",
        ];
        self.float(&factors, "expert_weights_scale");
        let is_split = self.is(&["nemotron_h_moe"]);
        if dense > 0 && !is_split && self.first_integer(DENSE_LAYERS).is_none() {
            self.push("leading_dense_block_count", KeyValue::U32(dense as u32));
        }
        if let Some(width) =
            shared.filter(|_| self.is(&["hy_v3", "hunyuan-moe", "cohere2moe", "step35"]))
        {
            self.push("expert_shared_feed_forward_length", KeyValue::U32(width));
        }
    }

    /// Lists with an entry for each layer.
    fn layer_kinds(&mut self) {
        let recurrent = self.layer_flags("layer_types", "linear_attention");
        if let Some(recurrent) =
            recurrent.filter(|_| self.is(&["qwen35moe", "qwen3next", "qwen4exp"]))
        {
            self.push("attention.recurrent_layers", KeyValue::Bools(recurrent));
        }
        let slides: Vec<bool> = self.attentions().map(|gqa| gqa.shape.window.is_some()).collect();
        if let Some(attention) =
            self.layer_flags("layer_types", "full_attention").filter(|_| self.is(&["lfm2moe"]))
        {
            let heads = self.size("num_key_value_heads") as i32;
            let heads = attention.into_iter().map(|has| if has { heads } else { 0 });
            self.set("attention.head_count_kv", KeyValue::I32s(heads.collect()));
        }
        if slides.contains(&true) && !self.is(&["gemma4", "gpt-oss"]) {
            self.push("attention.sliding_window_pattern", KeyValue::Bools(slides));
        }
        if let Some(full) = self.layer_flags("indexer_types", "full") {
            self.push("attention.indexer.types", KeyValue::Bools(full));
        }
        if let Some(selects) = self.config["index_kpool_always_select_tail"].as_bool() {
            self.push("attention.indexer.kpool_select_tail", KeyValue::Bool(selects));
        }
        if let Some(ratios) = self.config["compress_ratios"].as_array() {
            let ratios = ratios.iter().map(|n| n.as_i64().unwrap_or(0) as i32).collect();
            self.push("attention.compress_ratios", KeyValue::I32s(ratios));
        }
        if let Some(limit) = self.config["swiglu_limit"].as_f64() {
            for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
                let limits = vec![limit as f32; self.blueprint.layers.len()];
                self.push(key, KeyValue::F32s(limits));
            }
        }
        for (list, key) in
            [("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")]
        {
            let Some(limits) = self.config[list].as_array() else { continue };
            let limits = limits.iter().map(|limit| limit.as_f64().unwrap_or(0.0) as f32);
            self.push(key, KeyValue::F32s(limits.collect()));
        }
    }
}
