//! RMS norms.

use super::{Cpu, pool::Grid, vector};
use crate::{Buffer, Error, View, host::Host};

/// Rows of a tile.
const ROWS: usize = 4;
/// Heads of a tile.
const HEADS: usize = 8;

/// Runs [`Op::RmsNorm`](crate::Op::RmsNorm), and with a gate [`Op::GatedRmsNorm`](crate::Op::GatedRmsNorm).
pub(super) fn rms_norm(
    host: &mut Host,
    cpu: &mut Cpu,
    (x, gate): (&View, Option<&View>),
    (weight, eps): (Buffer, f32),
    out: &View,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    let in_place = x.buffer == out.buffer;
    host.with(out, |host, numbers| {
        let weight = &host.all(weight)?[..x.width];
        let gate = gate.map(|gate| Ok::<_, Error>((host.get(gate)?, gate))).transpose()?;
        let from = if in_place { None } else { Some(host.get(x)?) };
        cpu.pool.tiles(numbers, Grid::new(out, ROWS, HEADS, out.width), |mut tile, _| {
            for (row, head) in tile.places() {
                let to = tile.vector(row, head);
                if let Some(from) = from {
                    to.copy_from_slice(vector(from, x, row, head));
                }
                let scale = 1.0 / (kernels.square(to) / x.width as f32 + eps).sqrt();
                to.iter_mut().zip(weight).for_each(|(to, weight)| *to = *to * scale * weight);
                if let Some((gate, view)) = gate {
                    kernels.mul_silu(to, vector(gate, view, row, head));
                }
            }
        });
        Ok(())
    })
}
