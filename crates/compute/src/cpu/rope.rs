//! Rotary positions.

use super::{Cpu, pool::Grid, vector};
use crate::{Error, RopePairs, Span, View, host::Host};

/// Angles that are worked out at once, for all heads of a row.
const ANGLES: usize = 64;

/// Runs [`Op::Rope`](crate::Op::Rope).
pub(super) fn rope(
    host: &mut Host,
    cpu: &mut Cpu,
    x: &View,
    (frequencies, pairs, scale): (&[f32], RopePairs, f32),
    (spans, out): (&[Span], &View),
) -> Result<(), Error> {
    let half = frequencies.len();
    host.with(out, |host, numbers| {
        let from = if x.buffer == out.buffer { None } else { Some(host.get(x)?) };
        cpu.pool.tiles(numbers, Grid::new(out, 1, out.heads, out.width), |mut tile, _| {
            let row = tile.rows().start;
            if let Some(from) = from {
                for head in tile.heads() {
                    tile.vector(row, head).copy_from_slice(vector(from, x, row, head));
                }
            }
            let position = position(spans, row) as f32;
            for (block, frequencies) in frequencies.chunks(ANGLES).enumerate() {
                let (mut sin, mut cos) = ([0.0; ANGLES], [0.0; ANGLES]);
                for ((sin, cos), f) in sin.iter_mut().zip(&mut cos).zip(frequencies) {
                    let (s, c) = f64::from(position * f).sin_cos();
                    (*sin, *cos) = (s as f32 * scale, c as f32 * scale);
                }
                let (first, n) = (block * ANGLES, frequencies.len());
                let angles = sin[..n].iter().zip(&cos[..n]);
                for head in tile.heads() {
                    let y = tile.vector(row, head);
                    match pairs {
                        RopePairs::Halves => {
                            let (a, b) = y.split_at_mut(half);
                            let pairs =
                                a[first..first + n].iter_mut().zip(&mut b[first..first + n]);
                            pairs
                                .zip(angles.clone())
                                .for_each(|((a, b), angle)| rotate(a, b, angle));
                        }
                        RopePairs::Interleaved => {
                            let pairs = y[2 * first..2 * (first + n)].as_chunks_mut().0;
                            pairs
                                .iter_mut()
                                .zip(angles.clone())
                                .for_each(|([a, b], angle)| rotate(a, b, angle));
                        }
                    }
                }
            }
        });
        Ok(())
    })
}

/// The position of a row of an op.
fn position(spans: &[Span], row: usize) -> usize {
    let mut first = 0;
    for span in spans {
        if row < first + span.rows {
            return span.position + row - first;
        }
        first += span.rows;
    }
    0
}

fn rotate(a: &mut f32, b: &mut f32, (sin, cos): (&f32, &f32)) {
    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
}
