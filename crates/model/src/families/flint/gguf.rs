//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{DENSE_LAYERS, ONE_SHARED, ROUTER_NORMALIZES},
    heads::WINDOWS_BEFORE_FULL,
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "flint",
    models: "Flint",
    model_types: &["flint"],
    keys: &[
        MODEL,
        HEADS,
        GROUPED_SIZES,
        SIGMOID_ROUTER,
        &[ROUTER_NORMALIZES, DENSE_LAYERS, ROTATED_LAYERS],
        ONE_SHARED,
        WINDOWS_BEFORE_FULL,
    ],
    names: &[NAMES, SHARED_EXPERT],
    ..PLAIN
}];

const NAMES: &[NameRow] = &[
    row("attn_sinks.weight", "self_attn.softmax_offset"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
];

/// Whether each layer has RoPE: the layers with windows.
const ROTATED_LAYERS: KeyRow = group(Place::Layers, read_rotated, |keys| {
    let rotated = keys.attentions().map(|gqa| gqa.shape.window.is_some()).collect();
    keys.push(ROTATED, KeyValue::Bools(rotated));
});

const ROTATED: &str = "attention.rope_pattern";

fn read_rotated(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    if let Some(rotated) = keys.per_layer(ROTATED)? {
        let others = (0..rotated.len()).filter(|layer| rotated[*layer] == 0);
        add(config, json!({"no_rope_layer_indices": others.collect::<Vec<_>>()}));
    }
    Ok(())
}
