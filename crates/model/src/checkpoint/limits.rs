//! Limits on the sizes of a model's small files, and their names.

/// Maximum size of a file of ours with a JSON header, and of an index of shards, in bytes.
pub(super) const MAX_JSON: u64 = 64 << 20;

/// Maximum size of a small file in bytes. Parsed JSON takes up to 30 times the bytes of its text,
/// and the largest published configs have a few megabytes.
pub(super) const fn max_small(name: &str) -> u64 {
    match name.as_bytes() {
        b"tiktoken.model" => 32 << 20,
        b"tokenizer_config.json" => 8 << 20,
        _ => 4 << 20,
    }
}

/// Name of the small file that is read as a stream.
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// Names of the small files that are read whole, where they exist.
pub const TEXT_FILES: [&str; 8] = [
    "config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];
