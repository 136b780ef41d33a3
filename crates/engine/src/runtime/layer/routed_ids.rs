//! Router ids of a step's layers, which the host reads together with logits where it need not know
//! them earlier: it counts the uses of experts.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Device, View};
use moeflux_model::blueprint::Blueprint;

use super::moe_state::MoeState;
use crate::experts::{cache::ExpertCache, placement::Placement, stats::Stats};

/// Layer whose ids are kept.
#[derive(Clone, Copy, Debug, Default)]
struct RoutedLayer {
    /// Experts that the router chooses for a row, and experts per row in all; zeros in a dense
    /// layer.
    top_k: usize,
    width: usize,
}

/// Ids that the routers of all layers choose in a step of few rows.
#[derive(Debug)]
pub(crate) struct RoutedIds {
    buffer: Buffer,
    layers: Vec<RoutedLayer>,
    /// Maximum experts per row.
    width: usize,
}

impl RoutedIds {
    /// Maximum rows of a step whose ids are kept.
    const MAX_ROWS: usize = Placement::MAX_ROWS;

    /// Values of the buffer.
    pub(super) fn values(blueprint: &Blueprint) -> usize {
        blueprint.own_layers() * Self::MAX_ROWS * blueprint.max_uses()
    }

    /// Buffer on a device that looks experts up itself. `None` on the CPU.
    pub(super) fn new(
        blueprint: &Blueprint,
        device: &mut dyn Device,
    ) -> Result<Option<Self>, Error> {
        let values = Self::values(blueprint);
        if device.memory().is_none() || values == 0 {
            return Ok(None);
        }
        let buffer = device.buffer(values).map_err(Error::at(|| "ids of routers"))?;
        // A drafter runs other numbers of rows.
        let layers = blueprint.layers[..blueprint.own_layers()].iter();
        let layers = layers.map(|layer| match layer.moe() {
            Some(moe) => RoutedLayer { top_k: moe.router.top_k, width: moe.uses() },
            None => RoutedLayer::default(),
        });
        Ok(Some(Self { buffer, layers: layers.collect(), width: blueprint.max_uses() }))
    }

    /// Ids of a layer in a step of `rows` rows, `(rows, width)`.
    pub(super) fn of_layer(&self, layer: usize, rows: usize, width: usize) -> Option<View> {
        let offset = layer * rows * self.width;
        let view = View { offset, ..View::rows(self.buffer, rows, width) };
        (rows <= Self::MAX_ROWS && layer < self.layers.len()).then_some(view)
    }

    /// Ids of all layers in a step of `rows` rows, in one row.
    pub(crate) fn all(&self, rows: usize) -> Option<View> {
        let values = self.layers.len() * rows * self.width;
        (rows <= Self::MAX_ROWS).then(|| View::rows(self.buffer, 1, values))
    }

    /// Counts uses in the layers whose ids the host has not seen. `ids`: contents of
    /// [`RoutedIds::all`].
    pub(crate) fn count(
        &self,
        ids: &[f32],
        rows: usize,
        moe_state: &MoeState,
        cache: &ExpertCache,
        stats: &mut Stats,
    ) {
        let of_layers = ids.chunks_exact((rows * self.width).max(1));
        for ((layer, routed), ids) in self.layers.iter().enumerate().zip(of_layers) {
            let RoutedLayer { top_k, width } = *routed;
            if top_k == 0 || moe_state.has_seen_ids(layer) {
                continue;
            }
            for row in ids[..rows * width].chunks_exact(width) {
                for id in &row[..top_k] {
                    let expert = *id as usize;
                    moe_state.counters.add_uses(layer, expert, 1);
                    stats.add_uses(1, cache.is_on_card(layer, expert));
                }
            }
        }
    }
}
