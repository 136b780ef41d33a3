//! Vision tower on a separate device, which is dropped with all of its memory.

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
    patch_grid::PatchGrid,
    tower_weights::{LoadedBlock, LoadedMerger, LoadedNorm, TowerWeights},
};
use crate::runtime::{
    control::StepControl,
    layer::{Linear, Loader},
};

/// Base of the frequencies of 2-D RoPE.
const ROPE_BASE: f64 = 10_000.0;

/// Rows that replace the placeholders of an image.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ImageRows {
    /// Number of rows: the tokens of the image.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    /// `[rows, width]`.
    pub values: Vec<f32>,
    /// Rows that are added after the language model's first layers, by layer: `[rows, width]` each.
    pub deepstack: Vec<Vec<f32>>,
}

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
    /// `progress` receives the bytes of each loaded weight.
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
        Ok(Some(Self { device, blueprint, weights, frequencies, axes, buffers: None }))
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
        let VisionBlueprint { hidden, heads, patch, merge, out, .. } = self.blueprint;
        let grid = self.grid(image)?;
        let buffers = self.buffers(image.rows)?;
        let patches = image.rows;
        let view = |buffer, width| View::rows(buffer, patches, width);
        let (x, normed) = (view(buffers.x, hidden), view(buffers.normed, hidden));
        let part = view(buffers.part, hidden);
        let pixels = view(buffers.pixels, 3 * patch * patch);
        let frames = self.blueprint.embedding.frames;
        let written = self.device.write_view(pixels, &first_frames(image, frames));
        written.map_err(Error::at(|| "pixels of an image"))?;
        let embedding = self.weights.embedding;
        self.mat_mul(pixels, embedding, x)?;
        let positions = grid.embeddings(&self.blueprint.positions, &self.weights.positions);
        let written = self.device.write_view(part, &positions);
        written.map_err(Error::at(|| "positions of an image"))?;
        self.run(&Op::Add { x, y: part })?;
        let (ids, depth) = (grid.rope_ids(), self.weights.blocks.len());
        let mut deepstack = Vec::with_capacity(self.weights.deepstack.len());
        for index in 0..depth {
            if control.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let LoadedBlock { attention_norm, qkv: into_qkv, proj, mlp_norm, up, down } =
                self.weights.blocks[index];
            let qkv = view(buffers.qkv, 3 * hidden);
            self.norm(x, attention_norm, normed)?;
            self.mat_mul(normed, into_qkv, qkv)?;
            let [q, k, v] = [0, 1, 2].map(|i| qkv.columns(i * hidden, hidden).split(heads));
            for turned in [q, k] {
                self.run(&Op::Rope {
                    x: turned,
                    frequencies: &self.frequencies.clone(),
                    pairs: RopePairs::Halves,
                    scale: 1.0,
                    positions: RopePositions::Axes { axes: &self.axes.clone(), ids: &ids },
                    out: turned,
                })?;
            }
            let scale = 1.0 / ((hidden / heads) as f32).sqrt();
            let attended = normed.split(heads);
            let segments = &[patches];
            self.run(&Op::SegmentAttention { q, k, v, scale, segments, out: attended })?;
            self.mat_mul(normed, proj, part)?;
            self.run(&Op::Add { x, y: part })?;
            self.norm(x, mlp_norm, normed)?;
            let inner = view(buffers.inner, self.blueprint.inner);
            self.mlp(normed, [up, down], Activation::GeluTanh, inner, part)?;
            self.run(&Op::Add { x, y: part })?;
            let of_layer = |d: &DeepstackMerger| d.after == index;
            if let Some(found) = self.blueprint.deepstack.iter().position(of_layer) {
                let merger = self.weights.deepstack[found];
                deepstack.push(self.merged(merger, patches, buffers)?);
            }
            if let Some(progress) = &mut control.progress {
                self.device.submit().map_err(Error::at(|| "the vision tower"))?;
                progress((index + 1) as f64 / depth as f64);
            }
        }
        let merger = self.weights.merger;
        let values = self.merged(merger, patches, buffers)?;
        Ok(ImageRows { rows: patches / (merge * merge), width: out, values, deepstack })
    }

    /// Grid of the image's patches, if they fit the tower.
    fn grid(&self, image: &PixelValues) -> Result<PatchGrid, Error> {
        let VisionBlueprint { patch, merge, ref embedding, .. } = self.blueprint;
        let [_, rows, columns] = image.grid.map(|side| side as usize);
        let width = 3 * embedding.frames * patch * patch;
        let is_whole = rows.is_multiple_of(merge) && columns.is_multiple_of(merge);
        let is_filled = image.rows > 0 && image.rows.checked_mul(width) == Some(image.values.len());
        if image.width != width || image.rows != rows * columns || !is_whole || !is_filled {
            return Err(Error::internal(format!(
                "expected patches of {width} values in blocks of {merge} x {merge}, got {} patches \
                 of {} values in a grid of {rows} x {columns}: the processor is of another model",
                image.rows, image.width
            )));
        }
        Ok(PatchGrid { rows, columns, merge })
    }

    /// Buffers for an image of `patches` patches. Those of a smaller image are kept until the tower
    /// is dropped.
    fn buffers(&mut self, patches: usize) -> Result<TowerBuffers, Error> {
        if let Some(buffers) = self.buffers.filter(|buffers| buffers.patches >= patches) {
            return Ok(buffers);
        }
        let VisionBlueprint { hidden, heads, patch, merge, inner, out, .. } = self.blueprint;
        let context = || format!("memory for an image of {patches} patches");
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

    /// Rows of the residual stream after a merger.
    fn merged(
        &mut self,
        LoadedMerger { norm, up, down }: LoadedMerger,
        patches: usize,
        buffers: TowerBuffers,
    ) -> Result<Vec<f32>, Error> {
        let VisionBlueprint { hidden, merge, out, .. } = self.blueprint;
        let (rows, merged) = (patches / (merge * merge), hidden * merge * merge);
        let view = |buffer| View::rows(buffer, patches * hidden / norm.width, norm.width);
        self.norm(view(buffers.x), norm, view(buffers.normed))?;
        let [joined, inner] = [buffers.normed, buffers.inner].map(|b| View::rows(b, rows, merged));
        let result = View::rows(buffers.out, rows, out);
        self.mlp(joined, [up, down], Activation::Gelu, inner, result)?;
        let mut values = vec![0.0; rows * out];
        let read = ViewRead { view: result, out: &mut values };
        self.device.read_views(&mut [read]).map_err(Error::at(|| "rows of an image"))?;
        Ok(values)
    }

    fn mlp(
        &mut self,
        x: View,
        [up, down]: [Linear; 2],
        activation: Activation,
        inner: View,
        out: View,
    ) -> Result<(), Error> {
        self.mat_mul(x, up, inner)?;
        self.run(&Op::Glu { activation, gate: inner, up: inner, out: inner })?;
        self.mat_mul(inner, down, out)
    }

    fn norm(&mut self, x: View, norm: LoadedNorm, out: View) -> Result<(), Error> {
        let eps = self.blueprint.eps;
        self.run(&Op::LayerNorm { x, weight: norm.weight, bias: Some(norm.bias), eps, out })
    }

    fn mat_mul(&mut self, x: View, linear: Linear, out: View) -> Result<(), Error> {
        let Linear { weight, bias, .. } = linear;
        self.run(&Op::MatMul { x, weight, bias, exact: false, answers: 0, out })
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        self.device.run(op).map_err(Error::at(|| format!("the vision tower, {}", op.name())))
    }
}

/// Values of the first frame of each patch: one image stands for all frames.
fn first_frames(image: &PixelValues, frames: usize) -> Vec<f32> {
    let frame = image.width / (3 * frames);
    let channels = image.values.chunks_exact(frames * frame);
    channels.flat_map(|channel| &channel[..frame]).copied().collect()
}
