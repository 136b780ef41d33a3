//! Weights of a vision tower on a device.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Bytes, Format, MatrixShape, Scalar, Weight};
use moeflux_model::{
    blueprint::{
        LayerNormSource, LinearSource, PatchLayout, VisionBlock, VisionBlueprint, VisionMerger,
    },
    checkpoint::Checkpoint,
};

use crate::runtime::layer::Loader;

/// Matrix with an optional bias. Its inputs are in the file's order.
#[derive(Clone, Copy)]
pub(super) struct LoadedLinear {
    pub(super) weight: Weight,
    pub(super) bias: Option<Buffer>,
}

/// Weight and bias of a LayerNorm.
#[derive(Clone, Copy)]
pub(super) struct LoadedNorm {
    pub(super) weight: Buffer,
    pub(super) bias: Buffer,
    pub(super) width: usize,
}

/// Weights of a [`VisionBlock`].
#[derive(Clone, Copy)]
pub(super) struct LoadedBlock {
    pub(super) attention_norm: LoadedNorm,
    pub(super) qkv: LoadedLinear,
    pub(super) proj: LoadedLinear,
    pub(super) mlp_norm: LoadedNorm,
    pub(super) up: LoadedLinear,
    pub(super) down: LoadedLinear,
}

/// Weights of a [`VisionMerger`].
#[derive(Clone, Copy)]
pub(super) struct LoadedMerger {
    pub(super) norm: LoadedNorm,
    pub(super) up: LoadedLinear,
    pub(super) down: LoadedLinear,
}

/// Weights of a tower.
pub(super) struct TowerWeights {
    pub(super) embedding: LoadedLinear,
    /// Embeddings of positions, on the host.
    pub(super) positions: Vec<f32>,
    pub(super) blocks: Vec<LoadedBlock>,
    /// By DeepStack's index.
    pub(super) deepstack: Vec<LoadedMerger>,
    pub(super) merger: LoadedMerger,
}

impl TowerWeights {
    /// Loads the weights of a tower, the matrices in the order of [`VisionBlueprint::matrices`].
    pub(super) fn load(
        blueprint: &VisionBlueprint,
        checkpoint: &Checkpoint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            embedding: embedding(blueprint, checkpoint, loader)?,
            positions: checkpoint.read_vector(&blueprint.positions.table)?,
            blocks: each(&blueprint.blocks, |source| block(source, loader))?,
            merger: merger(&blueprint.merger, loader)?,
            deepstack: each(&blueprint.deepstack, |source| merger(&source.merger, loader))?,
        })
    }
}

fn each<S, T>(
    sources: &[S],
    mut load: impl FnMut(&S) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    sources.iter().map(&mut load).collect()
}

/// Embedding of patches as a matrix of `(channel, y, x)`: an image is the same in all frames, so
/// their slices are added.
fn embedding(
    blueprint: &VisionBlueprint,
    checkpoint: &Checkpoint,
    loader: &mut Loader<'_>,
) -> Result<LoadedLinear, Error> {
    let source = &blueprint.embedding;
    let values = checkpoint.read_vector(&source.weight)?;
    let (frames, pixels) = (source.frames, blueprint.patch * blueprint.patch);
    let cols = 3 * pixels;
    let mut sums = vec![0.0_f32; blueprint.hidden * cols];
    let rows = values.chunks_exact(frames * cols);
    for (row, sums) in rows.zip(sums.chunks_exact_mut(cols)) {
        for (i, value) in row.iter().enumerate() {
            let (channel, pixel) = match source.layout {
                PatchLayout::ChannelsFirst => (i / (frames * pixels), i % pixels),
                PatchLayout::ChannelsLast => (i % 3, i / 3 % pixels),
            };
            sums[channel * pixels + pixel] += value;
        }
    }
    let name = &*source.weight.name;
    let mut bytes = Bytes::zeroed(4 * sums.len()).map_err(Error::at(|| name))?;
    for (bytes, sum) in bytes.chunks_exact_mut(4).zip(&sums) {
        bytes.copy_from_slice(&sum.to_le_bytes());
    }
    let shape = MatrixShape { rows: blueprint.hidden, cols, format: Format::Plain(Scalar::F32) };
    let weight = loader.device.weight(shape, bytes).map_err(Error::at(|| name))?;
    let bias = loader.optional_vector(source.bias.as_ref())?;
    Ok(LoadedLinear { weight, bias })
}

fn block(source: &VisionBlock, loader: &mut Loader<'_>) -> Result<LoadedBlock, Error> {
    Ok(LoadedBlock {
        attention_norm: norm(&source.attention_norm, loader)?,
        qkv: linear(&source.qkv, loader)?,
        proj: linear(&source.proj, loader)?,
        mlp_norm: norm(&source.mlp_norm, loader)?,
        up: linear(&source.up, loader)?,
        down: linear(&source.down, loader)?,
    })
}

fn merger(source: &VisionMerger, loader: &mut Loader<'_>) -> Result<LoadedMerger, Error> {
    Ok(LoadedMerger {
        norm: norm(&source.norm, loader)?,
        up: linear(&source.up, loader)?,
        down: linear(&source.down, loader)?,
    })
}

fn norm(source: &LayerNormSource, loader: &mut Loader<'_>) -> Result<LoadedNorm, Error> {
    Ok(LoadedNorm {
        weight: loader.vector(&source.weight)?,
        bias: loader.vector(&source.bias)?,
        width: source.weight.len,
    })
}

fn linear(source: &LinearSource, loader: &mut Loader<'_>) -> Result<LoadedLinear, Error> {
    let weight = loader.matrix(&source.weight)?;
    Ok(LoadedLinear { weight, bias: loader.optional_vector(source.bias.as_ref())? })
}
