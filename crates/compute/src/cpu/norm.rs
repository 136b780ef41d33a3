//! Norms.

use super::{Cpu, pool::Grid, vector};
use crate::{Buffer, Error, View, host::Host};

/// Rows of a tile.
const ROWS: usize = 4;
/// Numbers of the heads of a tile: fewer are not worth to be shared out.
const NUMBERS: usize = 4096;

/// Runs [`Op::RmsNorm`](crate::Op::RmsNorm), and with a gate [`Op::GatedRmsNorm`](crate::Op::GatedRmsNorm).
pub(super) fn rms_norm(
    host: &mut Host,
    cpu: &mut Cpu,
    (x, gate): (&View, Option<&View>),
    (weight, eps): (Option<Buffer>, f32),
    out: &View,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    let in_place = x.buffer == out.buffer;
    host.with(out, |host, numbers| {
        let weight = weight.map(|weight| host.all(weight)).transpose()?;
        let gate = gate.map(|gate| Ok::<_, Error>((host.get(gate)?, gate))).transpose()?;
        let from = if in_place { None } else { Some(host.get(x)?) };
        cpu.pool.tiles(
            numbers,
            Grid::new(out, ROWS, NUMBERS / out.width.max(1), out.width),
            |mut tile, _| {
                for (row, head) in tile.places() {
                    let to = tile.vector(row, head);
                    if let Some(from) = from {
                        to.copy_from_slice(vector(from, x, row, head));
                    }
                    let scale = 1.0 / (kernels.square(to) / x.width as f32 + eps).sqrt();
                    match weight {
                        Some(weight) => {
                            to.iter_mut().zip(weight).for_each(|(to, w)| *to = *to * scale * w)
                        }
                        None => to.iter_mut().for_each(|to| *to *= scale),
                    }
                    if let Some((gate, view)) = gate {
                        kernels.mul_silu(to, vector(gate, view, row, head));
                    }
                }
            },
        );
        Ok(())
    })
}

/// Runs [`Op::LayerNorm`](crate::Op::LayerNorm).
pub(super) fn layer_norm(
    host: &mut Host,
    cpu: &mut Cpu,
    x: &View,
    (weight, bias, eps): (Buffer, Buffer, f32),
    out: &View,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    let in_place = x.buffer == out.buffer;
    host.with(out, |host, numbers| {
        let (weight, bias) = (host.all(weight)?, host.all(bias)?);
        let from = if in_place { None } else { Some(host.get(x)?) };
        cpu.pool.tiles(
            numbers,
            Grid::new(out, ROWS, NUMBERS / out.width.max(1), out.width),
            |mut tile, _| {
                for (row, head) in tile.places() {
                    let to = tile.vector(row, head);
                    if let Some(from) = from {
                        to.copy_from_slice(vector(from, x, row, head));
                    }
                    let n = x.width as f32;
                    let mean = to.iter().sum::<f32>() / n;
                    to.iter_mut().for_each(|to| *to -= mean);
                    let scale = 1.0 / (kernels.square(to) / n + eps).sqrt();
                    to.iter_mut()
                        .zip(weight)
                        .zip(bias)
                        .for_each(|((to, w), b)| *to = *to * scale * w + b);
                }
            },
        );
        Ok(())
    })
}
