//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{heads::ROTATED_SHARE, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "glm4moe",
    models: "GLM-4.5 to 4.7, Solar-Open",
    model_types: &["glm4_moe", "solar_open"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, &[ROTATED_SHARE]],
    names: &[POST_ATTENTION_NORM, SHARED_EXPERTS],
    ..PLAIN
}];
