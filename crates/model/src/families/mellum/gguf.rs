//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    heads::{ROPE_BY_TYPE, WINDOWS_BEFORE_FULL},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "mellum",
    models: "Mellum2",
    model_types: &["mellum"],
    keys: &[MODEL, HEADS, SOFTMAX_EXPERTS, WINDOWS_BEFORE_FULL, &[ROPE_BY_TYPE]],
    ..PLAIN
}];
