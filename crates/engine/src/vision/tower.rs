//! Vision tower on a separate device, which is dropped with all of its memory.

use std::path::PathBuf;

use moeflux_base::Error;
use moeflux_compute::{
    Activation, Buffer, Device, DeviceOptions, Op, RopePairs, RopePositions, ScratchShape, View,
    ViewRead,
};
use moeflux_model::{
    blueprint::{DeepstackMerger, VisionBlueprint},
    checkpoint::{Checkpoint, MatrixSource},
    seam::ReadAhead,
};
use moeflux_vision::PixelValues;

use super::{
    patch_positions::{embeddings, rope_ids},
    tower_weights::{LoadedBlock, LoadedLinear, LoadedMerger, LoadedNorm, TowerWeights},
};
use crate::{
    experts::cache::wait,
    runtime::{ImageRows, control::StepControl, layer::Loader},
};

/// Name in errors.
const TOWER: &str = "the vision tower";

/// Base of the frequencies of 2-D RoPE.
const ROPE_BASE: f64 = 10_000.0;

/// A loaded vision tower. Images are computed one by one, so that the rows of one do not depend on
/// others.
pub struct VisionTower {
    device: Box<dyn Device>,
    blueprint: VisionBlueprint,
    weights: TowerWeights,
    /// Angle per position of RoPE, for rows, then for columns, and the axis of each.
    frequencies: Vec<f32>,
    axes: Vec<u8>,
    buffers: Option<TowerBuffers>,
    /// Folder of the checkpoint, for messages.
    folder: PathBuf,
}

/// Buffers for images of up to some patches.
#[derive(Clone, Copy)]
struct TowerBuffers {
    patches: usize,
    /// Pixel values of patches, `(patches, 3 * patch * patch)`.
    pixels: Buffer,
    /// Residual stream, `(patches, hidden)`.
    x: Buffer,
    /// Inputs and outputs of parts of a block, `(patches, hidden)`.
    normed: Buffer,
    part: Buffer,
    /// Queries, keys and values, `(patches, 3 * hidden)`.
    qkv: Buffer,
    /// Intermediate results of MLPs, `(patches, inner)`.
    inner: Buffer,
    /// Result of a merger, `(tokens, out)`.
    out: Buffer,
}

impl VisionTower {
    /// Loads the tower of a checkpoint to a new device. `None` if the checkpoint has none.
    /// `progress` receives the bytes of each loaded matrix.
    ///
    /// # Errors
    /// The tower is not supported or damaged, a file cannot be read, or the device failed.
    pub fn open(
        checkpoint: &Checkpoint,
        options: &DeviceOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<Self>, Error> {
        let Some(blueprint) = VisionBlueprint::for_checkpoint(checkpoint)? else {
            return Ok(None);
        };
        let opened = moeflux_compute::open(options);
        let mut device = opened.map_err(Error::at(|| "opening the device of the vision tower"))?;
        let largest = blueprint.matrices().map(MatrixSource::memory_bytes).max().unwrap_or(0);
        let ahead = ReadAhead::new(checkpoint, blueprint.matrices(), largest);
        let weights = std::thread::scope(|scope| {
            let _stop = ahead.start(scope);
            let mut loader = Loader {
                checkpoint,
                ahead: &ahead,
                device: &mut *device,
                exact: options.exact,
                context: 0,
                chunk: 0,
                progress,
                last_order: None,
            };
            TowerWeights::load(&blueprint, checkpoint, &mut loader)
        })?;
        let width = blueprint.hidden / blueprint.heads;
        let of_axis = width / 4;
        let frequency =
            |i: usize| ROPE_BASE.powf(-4.0 * (i % of_axis) as f64 / width as f64) as f32;
        let frequencies = (0..2 * of_axis).map(frequency).collect();
        let axes = (0..2 * of_axis).map(|i| (i / of_axis) as u8).collect();
        let folder = checkpoint.folder().to_owned();
        Ok(Some(Self { device, blueprint, weights, frequencies, axes, buffers: None, folder }))
    }

    /// The tower as data.
    pub fn blueprint(&self) -> &VisionBlueprint {
        &self.blueprint
    }

    /// Rows of an image.
    ///
    /// # Errors
    /// The pixel values are of another processor, the device failed, or `control` was cancelled.
    pub fn rows(
        &mut self,
        image: &PixelValues,
        control: &mut StepControl<'_>,
    ) -> Result<ImageRows, Error> {
        self.check(image)?;
        let buffers = self.buffers(image.rows)?;
        let Self { device, blueprint, weights, frequencies, axes, .. } = self;
        let mut run = TowerRun { device: &mut **device, blueprint, buffers, patches: image.rows };
        run.embed(image, weights)?;
        let ids = rope_ids(image);
        let turns = RopePositions::Axes { axes, ids: &ids };
        let mut deepstack = Vec::with_capacity(weights.deepstack.len());
        let mut submitted = None;
        for (index, block) in weights.blocks.iter().enumerate() {
            if control.is_cancelled() {
                return Err(Error::Cancelled);
            }
            run.block(block, frequencies, turns)?;
            let of_block = |deepstack: &DeepstackMerger| deepstack.after == index;
            if let Some(found) = blueprint.deepstack.iter().position(of_block) {
                deepstack.push(run.merged(&weights.deepstack[found])?);
            }
            if control.progress.is_some() || control.cancel.is_some() {
                // The block before is complete, while this one is computed.
                let ticket = run.device.submit().map_err(Error::at(|| TOWER))?;
                if let Some(before) = submitted.replace(ticket) {
                    wait(run.device, before).map_err(Error::at(|| TOWER))?;
                }
            }
            if let Some(progress) = &mut control.progress {
                progress(index as f64 / weights.blocks.len() as f64);
            }
        }
        let values = run.merged(&weights.merger)?;
        let [_, rows, columns] = image.grid.map(|side| side as usize / blueprint.merge);
        Ok(ImageRows::new([rows, columns], blueprint.out, values, deepstack))
    }

    /// Checks that the pixel values are of this tower's processor.
    fn check(&self, image: &PixelValues) -> Result<(), Error> {
        let VisionBlueprint { patch, merge, ref embedding, .. } = self.blueprint;
        let [frames, rows, columns] = image.grid.map(|side| side as usize);
        let width = 3 * embedding.frames * patch * patch;
        let is_grid =
            frames == 1 && image.rows > 0 && rows.checked_mul(columns) == Some(image.rows);
        let is_whole = rows.is_multiple_of(merge) && columns.is_multiple_of(merge);
        let is_filled = image.rows.checked_mul(width) == Some(image.values.len());
        if image.width == width && image.block == merge && is_grid && is_whole && is_filled {
            return Ok(());
        }
        let problem = format!(
            "its images have {rows} x {columns} patches of {} values in blocks of {}, the vision \
             tower of config.json takes patches of {width} values in blocks of {merge}: take both \
             files from one model",
            image.width, image.block
        );
        Err(Error::Checkpoint { path: self.folder.join("preprocessor_config.json"), problem })
    }

    /// Buffers for an image of `patches` patches. Buffers of a smaller image are kept until the
    /// tower is dropped.
    fn buffers(&mut self, patches: usize) -> Result<TowerBuffers, Error> {
        if let Some(buffers) = self.buffers.filter(|buffers| buffers.patches >= patches) {
            return Ok(buffers);
        }
        let VisionBlueprint { hidden, heads, patch, merge, inner, out, .. } = self.blueprint;
        let context =
            || format!("memory for an image of {patches} patches; smaller ones take less");
        let merged = hidden * merge * merge;
        let cols = inner.max(merged).max(3 * patch * patch);
        let segment_head = 2 * hidden / heads;
        let shape = ScratchShape { rows: patches, cols, segment_head, ..ScratchShape::default() };
        self.device.reserve_scratch(shape).map_err(Error::at(context))?;
        let mut buffer = |width: usize| {
            self.device.buffer(patches.saturating_mul(width)).map_err(Error::at(context))
        };
        let buffers = TowerBuffers {
            patches,
            pixels: buffer(3 * patch * patch)?,
            x: buffer(hidden)?,
            normed: buffer(hidden)?,
            part: buffer(hidden)?,
            qkv: buffer(3 * hidden)?,
            inner: buffer(inner.max(hidden))?,
            out: buffer(out.div_ceil(merge * merge))?,
        };
        self.buffers = Some(buffers);
        Ok(buffers)
    }
}

/// Computation of one image.
struct TowerRun<'a> {
    device: &'a mut dyn Device,
    blueprint: &'a VisionBlueprint,
    buffers: TowerBuffers,
    patches: usize,
}

impl TowerRun<'_> {
    fn view(&self, buffer: Buffer, width: usize) -> View {
        View::rows(buffer, self.patches, width)
    }

    /// Starts the residual stream: embeddings of patches and of their positions.
    fn embed(&mut self, image: &PixelValues, weights: &TowerWeights) -> Result<(), Error> {
        let VisionBlueprint { hidden, patch, ref embedding, ref positions, .. } = *self.blueprint;
        let pixels = self.view(self.buffers.pixels, 3 * patch * patch);
        let [x, part] = [self.buffers.x, self.buffers.part].map(|b| self.view(b, hidden));
        let written = self.device.write_view(pixels, &first_frames(image, embedding.frames));
        written.map_err(Error::at(|| "pixels of an image"))?;
        self.mat_mul(pixels, weights.embedding, x)?;
        let positions = embeddings(image, positions, &weights.positions);
        let written = self.device.write_view(part, &positions);
        written.map_err(Error::at(|| "positions of an image"))?;
        self.run(&Op::Add { x, y: part })
    }

    /// Adds attention, then an MLP, to the residual stream.
    fn block(
        &mut self,
        block: &LoadedBlock,
        frequencies: &[f32],
        positions: RopePositions<'_>,
    ) -> Result<(), Error> {
        let VisionBlueprint { hidden, heads, inner, .. } = *self.blueprint;
        let TowerBuffers { x, normed, part, qkv, inner: inner_buffer, .. } = self.buffers;
        let [x, normed, part] = [x, normed, part].map(|buffer| self.view(buffer, hidden));
        let qkv = self.view(qkv, 3 * hidden);
        self.norm(x, &block.attention_norm, normed)?;
        self.mat_mul(normed, block.qkv, qkv)?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv.columns(i * hidden, hidden).split(heads));
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
        let mut values = vec![0.0; rows * out];
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
    let channels = image.values.chunks_exact(frames * frame);
    channels.flat_map(|channel| &channel[..frame]).copied().collect()
}
