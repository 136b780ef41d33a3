//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    latent::{LATENT, PROJECTIONS},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "mistral4",
    models: "Mistral-Small-4",
    model_types: &["mistral4"],
    keys: &[MODEL, GROUPED_SIZES, SOFTMAX_ROUTER, LATENT, &[reads(temperature)]],
    names: &[PROJECTIONS, SHARED_EXPERTS],
    ..PLAIN
}];

fn temperature(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) {
        // The converter leaves it out; the published model has 0.1.
        let beta = keys.number("attention.temperature_scale")?.unwrap_or(0.1);
        add(scaling, json!({"llama_4_scaling_beta": beta}));
    }
    Ok(())
}
