//! Expert source: file locations of all experts, a blocking read of one, and its finishing.

use std::{path::PathBuf, sync::Arc};

use moeflux_base::Error;
use moeflux_compute::FileLayout;
use moeflux_model::{
    blueprint::{Blueprint, LayerExperts},
    checkpoint::Checkpoint,
    seam::{DataFile, ShardLocation, digest},
};

/// Layer and index of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertId {
    pub(crate) layer: usize,
    pub(crate) expert: usize,
}

/// Locations of all experts of a model; shared by all threads.
#[derive(Debug)]
pub(crate) struct ExpertSource {
    files: Arc<Vec<DataFile>>,
    /// Folders with copies of some of the files.
    mirrors: Vec<PathBuf>,
    /// By layer of the model; `None` for layers without routed experts.
    layers: Vec<Option<LayerExperts>>,
}

impl ExpertSource {
    pub(crate) fn new(files: Arc<Vec<DataFile>>, layers: Vec<Option<LayerExperts>>) -> Self {
        Self { files, mirrors: Vec::new(), layers }
    }

    /// Experts of a checkpoint.
    pub(crate) fn for_checkpoint(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Self {
        let layers = blueprint.layers.iter().map(|l| l.moe().map(|m| m.experts.clone()));
        let files = Arc::clone(checkpoint.files());
        Self { files, mirrors: checkpoint.mirrors().into(), layers: layers.collect() }
    }

    pub(crate) fn files(&self) -> &Arc<Vec<DataFile>> {
        &self.files
    }

    pub(crate) fn mirrors(&self) -> &[PathBuf] {
        &self.mirrors
    }

    pub(crate) fn layer(&self, layer: usize) -> Option<&LayerExperts> {
        self.layers.get(layer)?.as_ref()
    }

    pub(crate) fn layers(&self) -> &[Option<LayerExperts>] {
        &self.layers
    }

    /// Number of experts in all layers.
    pub(crate) fn count(&self) -> usize {
        self.layers.iter().flatten().map(|l| l.count).sum()
    }

    /// Layers with experts, in the order of their first bytes in the files.
    pub(crate) fn layers_in_file_order(&self) -> Vec<(usize, &LayerExperts)> {
        let mut layers: Vec<_> =
            self.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.as_ref()?))).collect();
        layers.sort_by_key(|(_, l)| (0..l.count).map(|expert| l.disk_position(expert)).min());
        layers
    }

    /// All experts, ordered by layer as in [`Self::layers_in_file_order`], then by offset.
    pub(crate) fn experts_in_file_order(&self) -> Vec<(usize, usize)> {
        let mut ids = Vec::with_capacity(self.count());
        for (layer, experts) in self.layers_in_file_order() {
            let first = ids.len();
            ids.extend((0..experts.count).map(|expert| (layer, expert)));
            ids[first..].sort_by_key(|(_, expert)| experts.disk_position(*expert));
        }
        ids
    }

    /// Reads one expert as it is in the file to the start of `bytes`, and verifies its digest.
    pub(crate) fn read_file(
        &self,
        layer: usize,
        expert: usize,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let Some(experts) =
            self.layer(layer).filter(|l| expert < l.count && l.file_bytes <= bytes.len())
        else {
            return Err(Error::internal(format!("there is no expert {expert} in layer {layer}")));
        };
        let mut rest = &mut bytes[..];
        for segment in experts.segments(expert) {
            let (dst, tail) = rest.split_at_mut(segment.bytes);
            let file = &self.files[segment.file as usize];
            file.read_exact_at(dst, segment.offset).map_err(|source| Error::Expert {
                layer,
                expert,
                path: file.path().into(),
                offset: segment.offset,
                bytes: segment.bytes,
                source,
            })?;
            rest = tail;
        }
        self.verify(layer, expert, bytes)
    }

    /// Whether a layer's experts need [`ExpertSource::finish`] once they are read: to compare
    /// digests, or because the file has another layout than memory, or another order of inputs.
    pub(crate) fn needs_finish(&self, layer: usize) -> bool {
        self.layer(layer).is_some_and(|l| {
            matches!(l.shards[..], [ShardLocation::Packed { .. }])
                || l.layouts != [FileLayout::Planes; 3]
                || l.orders.is_some()
        })
    }

    /// Verifies the digest of an expert's file bytes at the start of `slot`, and gives them the
    /// layout of memory.
    pub(crate) fn finish(&self, layer: usize, expert: usize, slot: &mut [u8]) -> Result<(), Error> {
        self.verify(layer, expert, slot)?;
        let Some(experts) = self.layer(layer) else { return Ok(()) };
        let place = || format!("layer {layer}, expert {expert}");
        experts.shape.land(experts.layouts, slot).map_err(Error::at(place))?;
        let Some(orders) = &experts.orders else { return Ok(()) };
        let orders = orders.of_expert(expert, &experts.shape);
        experts.shape.reorder(orders, slot).map_err(Error::at(place))
    }

    /// Compares an expert's bytes at the start of `slot` with its digest. Only packed models have
    /// digests; experts of others pass.
    pub(crate) fn verify(&self, layer: usize, expert: usize, slot: &[u8]) -> Result<(), Error> {
        let Some([ShardLocation::Packed { first, stride, digests }]) =
            self.layer(layer).map(|l| &l.shards[..])
        else {
            return Ok(());
        };
        let read = slot.get(..first.bytes).map(digest);
        if read.is_some() && read == digests.get(expert).copied() {
            return Ok(());
        }
        Err(Error::Damaged {
            layer,
            expert,
            path: self.files[first.file as usize].path().into(),
            offset: first.offset + expert as u64 * stride,
            bytes: first.bytes,
        })
    }
}
