//! Metadata of a GGUF file, from the config that the Hub has.

use serde_json::Value;

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::tools::synth) enum KeyValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
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
const NUMBERS: [NumberRow; 25] = [
    number(&["num_hidden_layers"], "block_count"),
    number(&["max_position_embeddings"], "context_length"),
    number(&["hidden_size"], "embedding_length"),
    number(&["intermediate_size"], "feed_forward_length"),
    number(&["vocab_size"], "vocab_size"),
    number(&["num_attention_heads"], "attention.head_count"),
    number(&["num_experts", "n_routed_experts", "num_local_experts"], "expert_count"),
    number(&["num_experts_per_tok", "top_k_experts"], "expert_used_count"),
    number(&["moe_intermediate_size", "intermediate_size"], "expert_feed_forward_length"),
    number(&["shared_expert_intermediate_size"], "expert_shared_feed_forward_length"),
    number(&["n_shared_experts"], "expert_shared_count"),
    number(&["n_group"], "expert_group_count"),
    number(&["topk_group"], "expert_group_used_count"),
    number(&["first_k_dense_replace"], "leading_dense_block_count"),
    number(&["sliding_window"], "attention.sliding_window"),
    number(&["q_lora_rank"], "attention.q_lora_rank"),
    number(&["kv_lora_rank"], "attention.kv_lora_rank"),
    number(&["index_n_heads"], "attention.indexer.head_count"),
    number(&["index_head_dim"], "attention.indexer.key_length"),
    number(&["index_topk"], "attention.indexer.top_k"),
    number(&["linear_conv_kernel_dim"], "ssm.conv_kernel"),
    number(&["linear_key_head_dim"], "ssm.state_size"),
    number(&["linear_num_key_heads"], "ssm.group_count"),
    number(&["linear_num_value_heads"], "ssm.time_step_rank"),
    number(&["full_attention_interval"], "full_attention_interval"),
];

/// The code of `expert_gating_func` for sigmoid.
const SIGMOID: u32 = 2;

/// Writer of an architecture's keys.
struct ModelKeys<'a> {
    prefix: &'a str,
    config: &'a Value,
    list: KeyList,
}

/// Keys of the model: `config` is the language model's part.
pub(super) fn model_keys(prefix: &str, config: &Value) -> KeyList {
    let mut keys = ModelKeys { prefix, config, list: KeyList::default() };
    for NumberRow { config, gguf } in &NUMBERS {
        if let Some(n) = config.iter().find_map(|name| keys.integer(name)) {
            keys.push(gguf, KeyValue::U32(n));
        }
    }
    keys.float("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    keys.float("final_logit_softcapping", "final_logit_softcapping");
    keys.rope();
    if keys.integer("kv_lora_rank").is_some() {
        keys.latent();
    } else {
        keys.heads();
    }
    keys.routers();
    keys.layer_kinds();
    keys.list
}

impl ModelKeys<'_> {
    fn push(&mut self, key: &str, value: KeyValue) {
        self.list.push(format!("{}.{key}", self.prefix), value);
    }

    fn integer(&self, name: &str) -> Option<u32> {
        u32::try_from(self.config[name].as_u64()?).ok()
    }

    /// An integer, or 0.
    fn size(&self, name: &str) -> u32 {
        self.integer(name).unwrap_or(0)
    }

    fn float(&mut self, name: &str, key: &str) {
        if let Some(x) = self.config[name].as_f64() {
            self.push(key, KeyValue::F32(x as f32));
        }
    }

    fn is(&self, architectures: &[&str]) -> bool {
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
        let base = base.unwrap_or(10_000.0) as f32;
        let swa = parameters["sliding_attention"]["rope_theta"].as_f64();
        let sections = parameters["mrope_section"].as_array().cloned();
        self.push("rope.freq_base", KeyValue::F32(base));
        if let Some(base) = swa {
            self.push("rope.freq_base_swa", KeyValue::F32(base as f32));
        }
        if let Some(sections) = sections {
            let section = |n: &Value| n.as_i64().unwrap_or(0) as i32;
            let sections = sections.iter().map(section).chain([0]).collect();
            self.push("rope.dimension_sections", KeyValue::I32s(sections));
        }
        let scaling = &self.config["rope_scaling"];
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
        let Some(kind) = kind.and_then(Value::as_str).filter(|kind| *kind != "default") else {
            return;
        };
        let get = |name: &str| scaling[name].as_f64().map(|x| x as f32);
        let numbers = [
            ("factor", "rope.scaling.factor"),
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
        let share = self.config["partial_rotary_factor"]
            .as_f64()
            .or(self.config["rope_parameters"]["partial_rotary_factor"].as_f64());
        let rotated = share.map(|share| (f64::from(width) * share) as u32);
        let rotated = self.integer("rotary_dim").or(rotated).unwrap_or(width);
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

    fn routers(&mut self) {
        if self.is(&["deepseek2", "deepseek32", "glm-dsa", "glm4moe", "minimax-m2"]) {
            self.push("expert_gating_func", KeyValue::U32(SIGMOID));
        }
        if let Some(normed) = self.config["norm_topk_prob"].as_bool() {
            self.push("expert_weights_norm", KeyValue::Bool(normed));
        }
        self.float("routed_scaling_factor", "expert_weights_scale");
    }

    /// Lists with an entry for each layer.
    fn layer_kinds(&mut self) {
        let recurrent = self.layer_flags("layer_types", "linear_attention");
        if let Some(recurrent) = recurrent.filter(|_| self.is(&["qwen35moe", "qwen3next"])) {
            self.push("attention.recurrent_layers", KeyValue::Bools(recurrent));
        }
        if let Some(full) = self.layer_flags("indexer_types", "full") {
            self.push("attention.indexer.types", KeyValue::Bools(full));
        }
    }
}
