//! Ops of a vision tower on an image.

use moeflux_base::Error;
use moeflux_compute::{
    Activation, Buffer, Device, Op, ROPE_AXES, RopePairs, RopePositions, Ticket, View, ViewRead,
};
use moeflux_model::blueprint::VisionBlueprint;
use moeflux_vision::PixelValues;

use super::{
    patch_positions::{embeddings, rope_ids},
    tower_buffers::TowerBuffers,
    tower_weights::{
        LoadedBlock, LoadedEmbedding, LoadedLinear, LoadedMerger, LoadedNorm, LoadedStage,
    },
};
use crate::{experts::cache::wait, runtime::ImageRows};

/// Name in errors.
pub(super) const TOWER: &str = "the vision tower";

/// Base of the frequencies of 2-D RoPE.
const ROPE_BASE: f64 = 10_000.0;

/// 2-D RoPE of a tower: angle per position for rows, then for columns, and the axis of each.
pub(super) struct PatchRope {
    frequencies: Vec<f32>,
    axes: Vec<u8>,
}

impl PatchRope {
    pub(super) fn new(blueprint: &VisionBlueprint) -> Self {
        let width = blueprint.hidden / blueprint.heads;
        let of_axis = width / 4;
        let frequency =
            |i: usize| ROPE_BASE.powf(-4.0 * (i % of_axis) as f64 / width as f64) as f32;
        Self {
            frequencies: (0..2 * of_axis).map(frequency).collect(),
            axes: (0..2 * of_axis).map(|i| (i / of_axis) as u8).collect(),
        }
    }
}

/// An image on its way through a tower.
pub(super) struct TowerImage<'a> {
    pub(super) pixels: &'a PixelValues,
    ids: Vec<[u32; ROPE_AXES]>,
    /// Residual stream, while it is on no device.
    x: Vec<f32>,
    /// Results of mergers.
    merged: Vec<Vec<f32>>,
}

impl<'a> TowerImage<'a> {
    pub(super) fn new(pixels: &'a PixelValues) -> Self {
        Self { pixels, ids: rope_ids(pixels), x: Vec::new(), merged: Vec::new() }
    }

    /// Bytes of host memory for an image of `patches` patches that is computed.
    pub(super) fn bytes(blueprint: &VisionBlueprint, patches: usize) -> u64 {
        let &VisionBlueprint { hidden, patch, .. } = blueprint;
        // The pixels of one frame, or the embeddings of positions.
        let width = hidden.max(3 * patch * patch).saturating_add(ROPE_AXES);
        (patches as u64).saturating_mul((width as u64).saturating_mul(4))
    }

    /// Rows of the image, after the last stage.
    pub(super) fn into_rows(mut self, blueprint: &VisionBlueprint) -> ImageRows {
        let [_, rows, columns] = self.pixels.grid.map(|side| side as usize / blueprint.merge);
        let values = self.merged.pop().unwrap_or_default();
        ImageRows::new([rows, columns], blueprint.out, values, self.merged)
    }
}

/// Computation of one image on a device.
pub(super) struct TowerRun<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) blueprint: &'a VisionBlueprint,
    pub(super) rope: &'a PatchRope,
    pub(super) buffers: TowerBuffers,
    pub(super) patches: usize,
    /// End of the stage before, if someone waits for it.
    pub(super) submitted: Option<Ticket>,
}

impl TowerRun<'_> {
    /// Computes a stage.
    pub(super) fn stage(
        &mut self,
        stage: &LoadedStage,
        image: &mut TowerImage<'_>,
    ) -> Result<(), Error> {
        match stage {
            LoadedStage::Embedding(embedding) => self.embed(image.pixels, embedding),
            LoadedStage::Block(block) => self.block(block, &image.ids),
            LoadedStage::Merger(merger) => {
                image.merged.push(self.merged(merger)?);
                Ok(())
            }
        }
    }

    /// Waits until the stage before is complete, while this one is computed.
    pub(super) fn wait_for_stage_before(&mut self) -> Result<(), Error> {
        let ticket = self.device.submit().map_err(Error::at(|| TOWER))?;
        match self.submitted.replace(ticket) {
            Some(before) => wait(self.device, before).map_err(Error::at(|| TOWER)),
            None => Ok(()),
        }
    }

    /// Moves the residual stream of an image to the device.
    pub(super) fn resume(&mut self, image: &mut TowerImage<'_>) -> Result<(), Error> {
        let x = self.view(self.buffers.x, self.blueprint.hidden);
        let written = self.device.write_view(x, &std::mem::take(&mut image.x));
        written.map_err(Error::at(|| TOWER))
    }

    /// Moves the residual stream of an image to the host.
    pub(super) fn suspend(&mut self, image: &mut TowerImage<'_>) -> Result<(), Error> {
        image.x = self.read(self.view(self.buffers.x, self.blueprint.hidden))?;
        Ok(())
    }

    fn view(&self, buffer: Buffer, width: usize) -> View {
        View::rows(buffer, self.patches, width)
    }

    /// Starts the residual stream: embeddings of patches and of their positions.
    fn embed(&mut self, image: &PixelValues, weights: &LoadedEmbedding) -> Result<(), Error> {
        let VisionBlueprint { hidden, patch, ref embedding, ref positions, .. } = *self.blueprint;
        let pixels = self.view(self.buffers.pixels, 3 * patch * patch);
        let [x, part] = [self.buffers.x, self.buffers.part].map(|b| self.view(b, hidden));
        let written = self.device.write_view(pixels, &first_frames(image, embedding.frames));
        written.map_err(Error::at(|| "pixels of an image"))?;
        self.mat_mul(pixels, weights.patches, x)?;
        let positions = embeddings(image, positions, &weights.positions);
        let written = self.device.write_view(part, &positions);
        written.map_err(Error::at(|| "positions of an image"))?;
        self.run(&Op::Add { x, y: part })
    }

    /// Adds attention, then an MLP, to the residual stream.
    fn block(&mut self, block: &LoadedBlock, ids: &[[u32; ROPE_AXES]]) -> Result<(), Error> {
        let VisionBlueprint { hidden, heads, inner, .. } = *self.blueprint;
        let TowerBuffers { x, normed, part, qkv, inner: inner_buffer, .. } = self.buffers;
        let [x, normed, part] = [x, normed, part].map(|buffer| self.view(buffer, hidden));
        let qkv = self.view(qkv, 3 * hidden);
        self.norm(x, &block.attention_norm, normed)?;
        self.mat_mul(normed, block.qkv, qkv)?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv.columns(i * hidden, hidden).split(heads));
        let PatchRope { frequencies, axes } = self.rope;
        let positions = RopePositions::Axes { axes, ids };
        for turned in [q, k] {
            let (x, out, pairs, scale) = (turned, turned, RopePairs::Halves, 1.0);
            self.run(&Op::Rope { x, frequencies, pairs, scale, positions, out })?;
        }
        let scale = 1.0 / ((hidden / heads) as f32).sqrt();
        let (segments, out) = (&[self.patches], normed.split(heads));
        self.run(&Op::SegmentAttention { q, k, v, scale, segments, out })?;
        self.mat_mul(normed, block.proj, part)?;
        self.run(&Op::Add { x, y: part })?;
        self.norm(x, &block.mlp_norm, normed)?;
        let inner = self.view(inner_buffer, inner);
        self.mat_mul(normed, block.up, inner)?;
        self.activate(Activation::GeluTanh, inner)?;
        self.mat_mul(inner, block.down, part)?;
        self.run(&Op::Add { x, y: part })
    }

    /// Rows of a merger of the residual stream.
    fn merged(&mut self, merger: &LoadedMerger) -> Result<Vec<f32>, Error> {
        let VisionBlueprint { hidden, merge, out, .. } = *self.blueprint;
        let TowerBuffers { x, normed, inner, out: out_buffer, .. } = self.buffers;
        let (rows, merged) = (self.patches / (merge * merge), hidden * merge * merge);
        let width = merger.norm.width;
        let [x, of_norm] = [x, normed].map(|b| View::rows(b, self.patches * hidden / width, width));
        self.norm(x, &merger.norm, of_norm)?;
        let [joined, inner] = [normed, inner].map(|buffer| View::rows(buffer, rows, merged));
        let view = View::rows(out_buffer, rows, out);
        self.mat_mul(joined, merger.up, inner)?;
        self.activate(Activation::Gelu, inner)?;
        self.mat_mul(inner, merger.down, view)?;
        self.read(view)
    }

    /// Values of a view of one head without gaps.
    fn read(&mut self, view: View) -> Result<Vec<f32>, Error> {
        let mut values = vec![0.0; view.rows * view.width];
        let read = ViewRead { view, out: &mut values };
        self.device.read_views(&mut [read]).map_err(Error::at(|| "rows of an image"))?;
        Ok(values)
    }

    fn activate(&mut self, activation: Activation, x: View) -> Result<(), Error> {
        self.run(&Op::Glu { activation, gate: x, up: x, out: x })
    }

    fn norm(&mut self, x: View, norm: &LoadedNorm, out: View) -> Result<(), Error> {
        let (weight, bias, eps) = (norm.weight, Some(norm.bias), self.blueprint.eps);
        self.run(&Op::LayerNorm { x, weight, bias, eps, out })
    }

    fn mat_mul(&mut self, x: View, linear: LoadedLinear, out: View) -> Result<(), Error> {
        let LoadedLinear { weight, bias } = linear;
        self.run(&Op::MatMul { x, weight, bias, exact: false, answers: 0, out })
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        self.device.run(op).map_err(Error::at(|| format!("{TOWER}, {}", op.name())))
    }
}

/// Values of the first frame of each patch: one image stands for all frames.
fn first_frames(image: &PixelValues, frames: usize) -> Vec<f32> {
    let frame = image.width / (3 * frames);
    let mut values = Vec::with_capacity(image.values.len() / frames);
    for channel in image.values.chunks_exact(frames * frame) {
        values.extend_from_slice(&channel[..frame]);
    }
    values
}
