//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "dots1",
    models: "dots.llm1",
    model_types: &["dots1"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER],
    names: &[EXPERTS, SHARED_EXPERTS],
    ..PLAIN
}];
