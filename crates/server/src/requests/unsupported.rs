//! Fields of other servers that would change an answer, and are not supported.
//!
//! Such a field is refused by name, unless its value changes nothing. Fields that change no answer,
//! such as those of speed, are ignored like unknown ones and stand in no list.

use crate::transport::{
    error::ApiError,
    json::{Fields, Json},
};

/// A field that is refused unless its value is neutral.
pub(crate) struct Unsupported {
    name: &'static str,
    neutral: Neutral,
}

/// Values of a field that change nothing, beside `null`.
#[derive(Clone, Copy, Debug)]
enum Neutral {
    /// No other.
    Null,
    Flag(bool),
    Number(f64),
    /// Numbers up to this one.
    UpTo(f64),
    /// Empty texts, lists and objects.
    Empty,
    /// These texts, and lists of them.
    Texts(&'static [&'static str]),
}

const fn field(name: &'static str, neutral: Neutral) -> Unsupported {
    Unsupported { name, neutral }
}

/// Samplers of llama.cpp, Ollama and others. Their further parameters have no effect without them.
pub(crate) const SAMPLERS: [Unsupported; 14] = [
    field("mirostat", Neutral::Number(0.0)),
    field("mirostat_mode", Neutral::Number(0.0)),
    field("typical_p", Neutral::Number(1.0)),
    field("typ_p", Neutral::Number(1.0)),
    field("tfs_z", Neutral::Number(1.0)),
    field("tfs", Neutral::Number(1.0)),
    field("top_a", Neutral::Number(0.0)),
    field("top_n_sigma", Neutral::UpTo(0.0)),
    field("xtc_probability", Neutral::Number(0.0)),
    field("dry_multiplier", Neutral::Number(0.0)),
    field("dynatemp_range", Neutral::Number(0.0)),
    field("smoothing_factor", Neutral::Number(0.0)),
    field("no_repeat_ngram_size", Neutral::Number(0.0)),
    field("min_keep", Neutral::UpTo(1.0)),
];

/// Fields of vLLM and SGLang in the paths of OpenAI's API.
pub(crate) const SERVERS: [Unsupported; 30] = [
    field("use_beam_search", Neutral::Flag(false)),
    field("length_penalty", Neutral::Number(1.0)),
    field("best_of", Neutral::Number(1.0)),
    field("skip_special_tokens", Neutral::Flag(true)),
    field("truncate_prompt_tokens", Neutral::Null),
    field("prompt_logprobs", Neutral::Null),
    field("allowed_token_ids", Neutral::Empty),
    field("logits_processors", Neutral::Empty),
    field("custom_logit_processor", Neutral::Empty),
    field("return_tokens_as_token_ids", Neutral::Flag(false)),
    field("return_token_ids", Neutral::Flag(false)),
    field("return_hidden_states", Neutral::Flag(false)),
    field("prompt_embeds", Neutral::Empty),
    field("input_ids", Neutral::Empty),
    field("input_embeds", Neutral::Empty),
    field("chat_template", Neutral::Empty),
    field("documents", Neutral::Empty),
    field("guided_whitespace_pattern", Neutral::Empty),
    field("regex", Neutral::Empty),
    field("ebnf", Neutral::Empty),
    field("stop_regex", Neutral::Empty),
    field("include_reasoning", Neutral::Flag(true)),
    field("separate_reasoning", Neutral::Flag(true)),
    field("vllm_xargs", Neutral::Empty),
    field("lora", Neutral::Empty),
    field("lora_path", Neutral::Empty),
    field("session_params", Neutral::Empty),
    field("post_sampling_probs", Neutral::Flag(false)),
    field("reasoning_format", Neutral::Texts(&["auto", "deepseek"])),
    field("parse_tool_calls", Neutral::Flag(true)),
];

/// Fields of OpenAI's chat completions.
pub(crate) const CHAT: [Unsupported; 6] = [
    field("audio", Neutral::Null),
    field("modalities", Neutral::Texts(&["text"])),
    field("web_search_options", Neutral::Null),
    field("function_call", Neutral::Texts(&["none", "auto"])),
    field("echo", Neutral::Flag(false)),
    field("add_special_tokens", Neutral::Flag(false)),
];

/// Fields of completions.
pub(crate) const COMPLETIONS: [Unsupported; 1] = [field("add_special_tokens", Neutral::Flag(true))];

/// Fields of OpenAI's responses.
pub(crate) const RESPONSES: [Unsupported; 5] = [
    field("background", Neutral::Flag(false)),
    field("conversation", Neutral::Null),
    field("prompt", Neutral::Null),
    field("context_management", Neutral::Empty),
    field("n", Neutral::Number(1.0)),
];

/// Fields of Anthropic's messages.
pub(crate) const MESSAGES: [Unsupported; 2] =
    [field("container", Neutral::Null), field("mcp_servers", Neutral::Empty)];

/// Fields of llama.cpp's completions.
pub(crate) const NATIVE: [Unsupported; 7] = [
    field("image_data", Neutral::Empty),
    field("multimodal_data", Neutral::Empty),
    field("lora", Neutral::Empty),
    field("post_sampling_probs", Neutral::Flag(false)),
    field("penalty_prompt", Neutral::Empty),
    field("grammar_lazy", Neutral::Flag(false)),
    field("grammar_triggers", Neutral::Empty),
];

/// Fields of Ollama's API.
pub(crate) const OLLAMA: [Unsupported; 4] = [
    field("_debug_render_only", Neutral::Flag(false)),
    field("width", Neutral::Number(0.0)),
    field("height", Neutral::Number(0.0)),
    field("steps", Neutral::Number(0.0)),
];

/// Fields of `options` in Ollama's API.
pub(crate) const OLLAMA_OPTIONS: [Unsupported; 4] = [
    field("rope_frequency_base", Neutral::Number(0.0)),
    field("rope_frequency_scale", Neutral::Number(0.0)),
    field("vocab_only", Neutral::Flag(false)),
    field("embedding_only", Neutral::Flag(false)),
];

/// Fields of requests for embeddings.
pub(crate) const EMBEDDINGS: [Unsupported; 5] = [
    field("truncate_prompt_tokens", Neutral::Null),
    field("normalize", Neutral::Flag(true)),
    field("embd_normalize", Neutral::Number(2.0)),
    field("add_special_tokens", Neutral::Flag(true)),
    field("image", Neutral::Empty),
];

impl Neutral {
    fn has(self, value: Json<'_>) -> bool {
        let is_listed = |texts: &[&str], value: Json<'_>| {
            value.as_str().is_some_and(|text| texts.contains(&&*text))
        };
        match self {
            Self::Null => false,
            Self::Flag(flag) => value.as_bool() == Some(flag),
            Self::Number(number) => value.as_f64() == Some(number),
            Self::UpTo(limit) => value.as_f64().is_some_and(|number| number <= limit),
            Self::Empty => ["\"\"", "[]", "{}"].contains(&&*value.compact()),
            Self::Texts(texts) => match value.as_list() {
                Some(list) => list.iter().all(|value| is_listed(texts, value)),
                None => is_listed(texts, value),
            },
        }
    }

    /// The values in words.
    fn describe(self) -> String {
        match self {
            Self::Null => "leave it out".to_owned(),
            Self::Flag(flag) => format!("leave it out, or send {flag}"),
            Self::Number(number) => format!("leave it out, or send {number}"),
            Self::UpTo(limit) => format!("leave it out, or send a number up to {limit}"),
            Self::Empty => "leave it out, or empty".to_owned(),
            Self::Texts(texts) => format!("leave it out, or send {}", texts.join(" or ")),
        }
    }
}

/// Refuses the fields of some lists, unless their values are neutral.
///
/// # Errors
/// A field has another value.
pub(crate) fn refuse(fields: &Fields<'_>, lists: &[&[Unsupported]]) -> Result<(), ApiError> {
    for Unsupported { name, neutral } in lists.iter().copied().flatten() {
        if fields.get(name).is_some_and(|value| !neutral.has(value)) {
            let path = fields.path(name);
            let message = format!("{path}: this value is not supported: {}", neutral.describe());
            return Err(ApiError::invalid(path, message));
        }
    }
    Ok(())
}
