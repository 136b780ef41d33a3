//! Weights of a vision tower on a device.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Bytes, Format, MatrixShape, Scalar, Weight};
use moeflux_model::{
    blueprint::{
        LayerNormSource, LinearSource, PatchLayout, VisionBlock, VisionBlueprint, VisionMerger,
    },
    checkpoint::MatrixSource,
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

/// Embedding of patches on a device, and of positions on the host.
pub(super) struct LoadedEmbedding {
    pub(super) patches: LoadedLinear,
    pub(super) positions: Vec<f32>,
}

/// Weights of a [`TowerStage`].
pub(super) enum LoadedStage {
    Embedding(LoadedEmbedding),
    Block(LoadedBlock),
    Merger(LoadedMerger),
}

/// Step of a tower, whose weights are loaded together.
#[derive(Clone, Copy)]
pub(super) enum TowerStage<'a> {
    /// Start of the residual stream.
    Embedding(&'a VisionBlueprint),
    /// Change of the residual stream.
    Block(&'a VisionBlock),
    /// Result of the residual stream: DeepStack's in their order, then the last.
    Merger(&'a VisionMerger),
}

impl<'a> TowerStage<'a> {
    /// Stages of a tower in the order in which they are computed.
    pub(super) fn of(blueprint: &'a VisionBlueprint) -> Vec<Self> {
        let mut stages = vec![Self::Embedding(blueprint)];
        for (index, block) in blueprint.blocks.iter().enumerate() {
            stages.push(Self::Block(block));
            let deepstack = blueprint.deepstack.iter().filter(|merger| merger.after == index);
            stages.extend(deepstack.map(|deepstack| Self::Merger(&deepstack.merger)));
        }
        stages.push(Self::Merger(&blueprint.merger));
        stages
    }

    /// Matrices in the order in which they are loaded.
    pub(super) fn matrices(self) -> impl Iterator<Item = &'a MatrixSource> {
        self.linears().into_iter().map(|linear| &linear.weight)
    }

    fn linears(self) -> Vec<&'a LinearSource> {
        match self {
            Self::Embedding(_) => Vec::new(),
            Self::Block(VisionBlock { qkv, proj, up, down, .. }) => vec![qkv, proj, up, down],
            Self::Merger(VisionMerger { up, down, .. }) => vec![up, down],
        }
    }

    fn norms(self) -> Vec<&'a LayerNormSource> {
        match self {
            Self::Embedding(_) => Vec::new(),
            Self::Block(block) => vec![&block.attention_norm, &block.mlp_norm],
            Self::Merger(merger) => vec![&merger.norm],
        }
    }

    /// Maximum bytes of the weights while they are loaded, and after.
    pub(super) fn bytes(self) -> u64 {
        let of_linear = |linear: &LinearSource| {
            let bias = linear.bias.as_ref().map_or(0, |bias| f32_bytes(bias.len));
            linear.weight.memory_bytes() as u64 + bias
        };
        let linears = self.linears().into_iter().map(of_linear).sum::<u64>();
        let norms = self.norms().into_iter().map(|norm| f32_bytes(norm.weight.len + norm.bias.len));
        let of_embedding = match self {
            Self::Embedding(VisionBlueprint { embedding, positions, .. }) => {
                let sums = f32_bytes(embedding.weight.len / embedding.frames);
                let bias = embedding.bias.as_ref().map_or(0, |bias| f32_bytes(bias.len));
                // The sums are computed from the file's values, then copied to the device.
                let loading = f32_bytes(embedding.weight.len).saturating_add(2 * sums);
                loading.max(sums + f32_bytes(positions.table.len)) + bias
            }
            _ => 0,
        };
        linears + norms.sum::<u64>() + of_embedding
    }

    /// Loads the weights, the matrices in the order of [`TowerStage::matrices`].
    pub(super) fn load(self, loader: &mut Loader<'_>) -> Result<LoadedStage, Error> {
        Ok(match self {
            Self::Embedding(blueprint) => LoadedStage::Embedding(LoadedEmbedding {
                patches: embedding(blueprint, loader)?,
                positions: loader.checkpoint.read_vector(&blueprint.positions.table)?,
            }),
            Self::Block(source) => LoadedStage::Block(block(source, loader)?),
            Self::Merger(source) => LoadedStage::Merger(merger(source, loader)?),
        })
    }
}

/// Bytes of values of f32.
pub(super) fn f32_bytes(values: usize) -> u64 {
    (values as u64).saturating_mul(size_of::<f32>() as u64)
}

/// Embedding of patches as a matrix of `(channel, y, x)`: an image is the same in all frames, so
/// their slices are added.
fn embedding(blueprint: &VisionBlueprint, loader: &mut Loader<'_>) -> Result<LoadedLinear, Error> {
    let source = &blueprint.embedding;
    let values = loader.checkpoint.read_vector(&source.weight)?;
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
