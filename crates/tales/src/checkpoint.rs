//! Files of the checkpoint.

/// Name of the folder of an unpacked copy: the model's name, and the start of the SHA-256 digest of
/// its weights.
pub const FOLDER: &str = "tales-18m-1e4014eb5f179e50";

macro_rules! files {
    ($($name:literal),*) => { [$(($name, include_bytes!(concat!("../model/", $name)))),*] };
}

/// Names and contents of the files.
// A static, as a constant would be copied at each use.
pub static FILES: [(&str, &[u8]); 6] = files![
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors"
];
