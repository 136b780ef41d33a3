//! Keys and names of tensors in GGUF.

use super::super::deepseek_v32::gguf::SPARSE;
use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "glm-dsa",
    models: "GLM-5",
    model_types: &["glm_moe_dsa"],
    ..SPARSE
}];
