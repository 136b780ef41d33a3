//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    delta_net::{DELTA_NET, DELTA_NETS},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "qwen3next",
    models: "Qwen3-Next",
    model_types: &["qwen3_next"],
    keys: &[MODEL, HEADS, SOFTMAX_EXPERTS, DELTA_NETS],
    names: &[DELTA_NET, POST_ATTENTION_NORM, SHARED_EXPERT],
    ..PLAIN
}];
