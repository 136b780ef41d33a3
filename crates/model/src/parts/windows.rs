//! Sliding windows in some layers: `layer_types` and `sliding_window` of a config.

use moeflux_base::Error;
use serde::Deserialize;

use super::config::Require;
use crate::checkpoint::source::TensorSource;

/// Config keys of layers with sliding windows among layers of full attention.
#[derive(Deserialize)]
pub(crate) struct LayerWindows {
    pub(crate) sliding_window: Option<usize>,
    layer_types: Vec<String>,
}

impl LayerWindows {
    /// Window of layer `layer` in positions, the token's own included; `None` for full attention.
    pub(crate) fn of(
        &self,
        source: &dyn TensorSource,
        layer: usize,
    ) -> Result<Option<usize>, Error> {
        let require = Require(source);
        require.layers("layer_types", Some(&self.layer_types), layer + 1)?;
        if self.layer_types[layer] != "sliding_attention" {
            return Ok(None);
        }
        let purpose = "the positions that layers of sliding attention see";
        let window = require.named("sliding_window", self.sliding_window, purpose)?;
        require.sizes(&[("sliding_window", window)])?;
        Ok(Some(window))
    }
}
