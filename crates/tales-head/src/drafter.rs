//! Files of the head.

/// Name of the folder of an unpacked copy: the model's name, and the start of the SHA-256 digest of
/// the weights.
pub const FOLDER: &str = "tales-18m-head-c1e92b250fe65cbd";

/// Names and contents of the files of the head, as mlx-vlm splits it from a checkpoint.
// A static, as a constant would be copied at each use.
pub static FILES: [(&str, &[u8]); 2] = [
    ("config.json", include_bytes!("../model/config.json")),
    ("model.safetensors", include_bytes!("../model/model.safetensors")),
];
