//! Rotary position embedding (RoPE).

use moeflux_ops::{Error, Op, RopePairs, Span, seam::Host};

use super::{
    cpu::{Cpu, vector},
    pool::Grid,
};

/// Angles computed at a time, for all heads of a row.
const ANGLE_BLOCK: usize = 64;

/// Runs [`Op::Rope`].
pub(super) fn rope(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Rope { x, frequencies, pairs, scale, spans, out } = op else { return Ok(()) };
    let half = frequencies.len();
    host.with(&out, |host, values| {
        let src = if x.buffer == out.buffer { None } else { Some(host.get(&x)?) };
        cpu.pool.tiles(values, Grid::new(&out, 1, out.heads, out.width), |mut tile, _| {
            let row = tile.rows().start;
            if let Some(src) = src {
                for head in tile.heads() {
                    tile.vector(row, head).copy_from_slice(vector(src, &x, row, head));
                }
            }
            let position = position(spans, row) as f32;
            for (block, frequencies) in frequencies.chunks(ANGLE_BLOCK).enumerate() {
                let (mut sin, mut cos) = ([0.0; ANGLE_BLOCK], [0.0; ANGLE_BLOCK]);
                for ((sin, cos), f) in sin.iter_mut().zip(&mut cos).zip(frequencies) {
                    let (s, c) = f64::from(position * f).sin_cos();
                    (*sin, *cos) = (s as f32 * scale, c as f32 * scale);
                }
                let (first, n) = (block * ANGLE_BLOCK, frequencies.len());
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

/// Position of a row of an op.
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
