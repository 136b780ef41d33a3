//! Number and sizes of a layer's experts. A pruned model may have another number in each layer.

use moeflux_base::Error;
use serde_json::Value;

use super::{
    config::{MAX_SIZE, Require, config_error, text_config},
    scope::Scope,
};

/// Config key with a number of experts for each layer, in place of the number for all.
pub(crate) const BY_LAYER: &str = "per_layer_num_experts";

/// Number and sizes of a layer's experts.
#[derive(Clone, Copy)]
pub(crate) struct ExpertSizes {
    pub(crate) count: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
}

/// Config keys of the values that [`ExpertSizes::of_router`] checks, for error messages.
pub(crate) struct ExpertKeys {
    pub(crate) count: &'static str,
    pub(crate) top_k: &'static str,
    pub(crate) intermediate: &'static str,
}

impl ExpertSizes {
    /// The sizes with the number of experts of the matrix `router` of `module`, checked.
    ///
    /// The number is that of the list [`BY_LAYER`], or the rows of the router: tools that prune
    /// experts may leave layers out without a word in the config.
    pub(crate) fn of_router(
        self,
        module: &Scope<'_>,
        router: &str,
        top_k: usize,
        keys: &ExpertKeys,
    ) -> Result<Self, Error> {
        let require = Require(module.source);
        let (count_key, count) = match listed(module)? {
            Some(count) => (BY_LAYER, count),
            None => {
                let rows = module.source.rows(&module.path(&format!("{router}.weight")));
                // The matrix itself is refused if it has none, or too many.
                let rows = rows.filter(|rows| (1..=MAX_SIZE).contains(rows));
                (keys.count, rows.unwrap_or(self.count))
            }
        };
        require.sizes(&[
            (keys.count, self.count),
            (count_key, count),
            (keys.top_k, top_k),
            (keys.intermediate, self.intermediate),
        ])?;
        require.that(top_k <= count, || {
            let module = module.prefix();
            format!("\"{}\" is {top_k}, of {count} experts of {module}", keys.top_k)
        })?;
        Ok(Self { count, ..self })
    }
}

/// Number of a layer's experts in [`BY_LAYER`]. Layers for multi-token prediction are not in it.
fn listed(module: &Scope<'_>) -> Result<Option<usize>, Error> {
    let config = text_config(module.source);
    let list = match config.get(BY_LAYER) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(other) => {
            let problem =
                format!("\"{BY_LAYER}\" is {other}: expected a list with a number by layer");
            return Err(config_error(module.source, problem));
        }
    };
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
    let Some(layer) = module.layer().filter(|layer| Some(*layer as u64) < layers) else {
        return Ok(None);
    };
    let count = list.get(layer).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
    count.map(Some).ok_or_else(|| {
        let found = list.get(layer).map_or("missing".into(), Value::to_string);
        let problem = format!("\"{BY_LAYER}\" of layer {layer} is {found}: expected a number");
        config_error(module.source, problem)
    })
}
