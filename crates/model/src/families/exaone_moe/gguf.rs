//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{heads::WINDOWS_BEFORE_FULL, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "exaone-moe",
    models: "K-EXAONE",
    model_types: &["exaone_moe"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, WINDOWS_BEFORE_FULL],
    names: &[NAMES, SHARED_EXPERTS],
    ..PLAIN
}];

const NAMES: &[NameRow] = &[row("exp_probs_b.bias", "mlp.e_score_correction_bias")];
