//! Buffers of a vision tower on a device.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Device, ScratchShape};
use moeflux_model::blueprint::VisionBlueprint;

use super::tower_weights::f32_bytes;

/// Buffers for images of up to some patches.
#[derive(Clone, Copy)]
pub(super) struct TowerBuffers {
    pub(super) patches: usize,
    /// Pixel values of patches, `(patches, 3 * patch * patch)`.
    pub(super) pixels: Buffer,
    /// Residual stream, `(patches, hidden)`.
    pub(super) x: Buffer,
    /// Inputs and outputs of parts of a block, `(patches, hidden)`.
    pub(super) normed: Buffer,
    pub(super) part: Buffer,
    /// Queries, keys and values, `(patches, 3 * hidden)`.
    pub(super) qkv: Buffer,
    /// Intermediate results of MLPs, `(patches, inner)`.
    pub(super) inner: Buffer,
    /// Result of a merger, `(tokens, out)`.
    pub(super) out: Buffer,
}

impl TowerBuffers {
    /// Allocates buffers, and the scratch memory of the ops on them.
    pub(super) fn allocate(
        device: &mut dyn Device,
        blueprint: &VisionBlueprint,
        patches: usize,
    ) -> Result<Self, Error> {
        let context =
            || format!("memory for an image of {patches} patches; smaller ones take less");
        let reserved = device.reserve_scratch(scratch_shape(blueprint, patches));
        reserved.map_err(Error::at(context))?;
        let mut buffer =
            |width: usize| device.buffer(patches.saturating_mul(width)).map_err(Error::at(context));
        let [pixels, x, normed, part, qkv, inner, out] = widths(blueprint);
        Ok(Self {
            patches,
            pixels: buffer(pixels)?,
            x: buffer(x)?,
            normed: buffer(normed)?,
            part: buffer(part)?,
            qkv: buffer(qkv)?,
            inner: buffer(inner)?,
            out: buffer(out)?,
        })
    }

    /// Bytes that [`TowerBuffers::allocate`] allocates.
    pub(super) fn bytes(
        device: &dyn Device,
        blueprint: &VisionBlueprint,
        patches: usize,
    ) -> Result<u64, Error> {
        let scratch = device.scratch_bytes(scratch_shape(blueprint, patches));
        let scratch = scratch.map_err(Error::at(|| "planning memory for images"))?;
        let width =
            widths(blueprint).iter().fold(0, |sum: usize, width| sum.saturating_add(*width));
        Ok(f32_bytes(patches.saturating_mul(width)).saturating_add(scratch))
    }
}

/// Values of each buffer per patch, in the order of the fields.
fn widths(blueprint: &VisionBlueprint) -> [usize; 7] {
    let &VisionBlueprint { hidden, patch, merge, inner, out, .. } = blueprint;
    let tokens = out.div_ceil(merge * merge);
    [3 * patch * patch, hidden, hidden, hidden, 3 * hidden, inner.max(hidden), tokens]
}

fn scratch_shape(blueprint: &VisionBlueprint, rows: usize) -> ScratchShape {
    let &VisionBlueprint { hidden, heads, patch, merge, inner, .. } = blueprint;
    let cols = inner.max(hidden * merge * merge).max(3 * patch * patch);
    ScratchShape { rows, cols, segment_head: 2 * hidden / heads, ..ScratchShape::default() }
}
