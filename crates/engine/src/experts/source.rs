//! Where experts lie, and reading one.

use std::{path::PathBuf, sync::Arc};

use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, DataFile, digest, location::ShardLocation},
    model::blueprint::{Blueprint, LayerExperts},
};

/// All experts of a model, readable from any thread.
#[derive(Debug)]
pub(crate) struct ExpertSource {
    files: Arc<Vec<DataFile>>,
    /// Folders that have some of the files too.
    mirrors: Vec<PathBuf>,
    /// By layer of the model; `None` for layers without routed experts.
    layers: Vec<Option<LayerExperts>>,
}

impl ExpertSource {
    pub(crate) fn new(files: Arc<Vec<DataFile>>, layers: Vec<Option<LayerExperts>>) -> Self {
        Self { files, mirrors: Vec::new(), layers }
    }

    /// The experts of a checkpoint.
    pub(crate) fn of(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Self {
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

    /// How many experts there are.
    pub(crate) fn count(&self) -> usize {
        self.layers.iter().flatten().map(|l| l.count).sum()
    }

    /// The layers with experts, as these begin in the files.
    pub(crate) fn layers_in_file_order(&self) -> Vec<(usize, &LayerExperts)> {
        let mut layers: Vec<_> =
            self.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.as_ref()?))).collect();
        layers.sort_by_key(|(_, l)| (0..l.count).map(|expert| l.disk_position(expert)).min());
        layers
    }

    /// All experts, layer and number: the layers as they begin in the files, the experts of each likewise.
    pub(crate) fn in_file_order(&self) -> Vec<(usize, usize)> {
        let mut all = Vec::with_capacity(self.count());
        for (layer, experts) in self.layers_in_file_order() {
            let first = all.len();
            all.extend((0..experts.count).map(|expert| (layer, expert)));
            all[first..].sort_by_key(|(_, expert)| experts.disk_position(*expert));
        }
        all
    }

    /// Reads one expert to the start of `slot`.
    pub(crate) fn read(&self, layer: usize, expert: usize, slot: &mut [u8]) -> Result<(), Error> {
        let Some(experts) = self.layer(layer).filter(|l| expert < l.count && l.bytes <= slot.len())
        else {
            return Err(Error::Input(format!("there is no expert {expert} in layer {layer}")));
        };
        let mut rest = &mut slot[..];
        for segment in experts.segments(expert) {
            let (now, later) = rest.split_at_mut(segment.bytes);
            let file = &self.files[segment.file as usize];
            file.read_exact_at(now, segment.offset).map_err(|source| Error::Expert {
                layer,
                expert,
                path: file.path().into(),
                offset: segment.offset,
                bytes: segment.bytes,
                source,
            })?;
            rest = later;
        }
        self.verify(layer, expert, slot)
    }

    /// Whether a layer's experts have digests.
    pub(crate) fn has_digests(&self, layer: usize) -> bool {
        matches!(self.layer(layer).map(|l| &l.shards[..]), Some([ShardLocation::Packed { .. }]))
    }

    /// That the bytes which were read to the start of `slot` are those of the expert: of a packed model, whose records
    /// have digests; of others there is nothing to compare with.
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
