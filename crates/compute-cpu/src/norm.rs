//! RMS norm and layer norm.

use moeflux_ops::{Buffer, Error, NormGate, Op, View, seam::Host};

use super::{
    cpu::{Cpu, vector},
    pool::Grid,
};

/// Rows of a tile.
const TILE_ROWS: usize = 4;
/// Minimum elements per row of a tile. Smaller tiles do not pay for their scheduling.
const MIN_TILE_ELEMENTS: usize = 4096;

/// Tiles of whole vectors.
pub(super) fn vector_tiles(out: &View) -> Grid<'_> {
    Grid::new(out, TILE_ROWS, MIN_TILE_ELEMENTS / out.width.max(1), out.width)
}

/// Operands of [`rms_norm`].
pub(super) struct RmsNormArgs {
    pub(super) x: View,
    /// Gate of [`Op::GatedRmsNorm`].
    pub(super) gate: Option<(View, NormGate)>,
    pub(super) weight: Option<Buffer>,
    /// Whether each head has its weights.
    pub(super) per_head: bool,
    pub(super) eps: f32,
    pub(super) out: View,
}

/// Runs [`Op::RmsNorm`], or [`Op::GatedRmsNorm`] with a gate.
pub(super) fn rms_norm(host: &mut Host, cpu: &mut Cpu, args: &RmsNormArgs) -> Result<(), Error> {
    let RmsNormArgs { x, gate, weight, per_head, eps, out } = args;
    let kernels = cpu.kernels;
    let in_place = x.buffer == out.buffer;
    host.with(out, |host, values| {
        let weight = weight.map(|weight| host.values(weight)).transpose()?;
        let gate = gate.map(|(view, function)| Ok::<_, Error>((host.get(&view)?, view, function)));
        let gate = gate.transpose()?;
        let src = if in_place { None } else { Some(host.get(x)?) };
        cpu.pool.tiles(values, vector_tiles(out), |mut tile, _| {
            for (row, head) in tile.coords() {
                let y = tile.vector(row, head);
                if let Some(src) = src {
                    y.copy_from_slice(vector(src, x, row, head));
                }
                let gate = gate
                    .map(|(values, view, function)| (vector(values, &view, row, head), function));
                if let Some((gate, NormGate::SiluBeforeNorm)) = gate {
                    kernels.mul_silu(y, gate);
                }
                let scale = 1.0 / (kernels.square(y) / x.width as f32 + eps).sqrt();
                match weight {
                    Some(weight) => {
                        let first = if *per_head { head * x.width } else { 0 };
                        let weight = &weight[first..first + x.width];
                        y.iter_mut().zip(weight).for_each(|(y, w)| *y = *y * scale * w);
                    }
                    None => y.iter_mut().for_each(|y| *y *= scale),
                }
                match gate {
                    Some((gate, NormGate::Silu)) => kernels.mul_silu(y, gate),
                    Some((gate, NormGate::Sigmoid)) => kernels.mul_sigmoid(y, gate),
                    Some((_, NormGate::SiluBeforeNorm)) | None => {}
                }
            }
        });
        Ok(())
    })
}

/// Runs [`Op::LayerNorm`].
pub(super) fn layer_norm(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::LayerNorm { x, weight, bias, eps, out } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    let in_place = x.buffer == out.buffer;
    host.with(&out, |host, values| {
        let weight = host.values(weight)?;
        let bias = bias.map(|bias| host.values(bias)).transpose()?;
        let src = if in_place { None } else { Some(host.get(&x)?) };
        cpu.pool.tiles(values, vector_tiles(&out), |mut tile, _| {
            for (row, head) in tile.coords() {
                let y = tile.vector(row, head);
                if let Some(src) = src {
                    y.copy_from_slice(vector(src, &x, row, head));
                }
                let n = x.width as f32;
                let mean = y.iter().sum::<f32>() / n;
                y.iter_mut().for_each(|y| *y -= mean);
                let scale = 1.0 / (kernels.square(y) / n + eps).sqrt();
                y.iter_mut().zip(weight).for_each(|(y, w)| *y = *y * scale * w);
                if let Some(bias) = bias {
                    y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                }
            }
        });
        Ok(())
    })
}
