//! Rotary position embedding (RoPE).

use moeflux_ops::{Error, Op, RopePairs, seam::Host};

use super::{
    cpu::{Cpu, vector},
    pool::Grid,
};

/// Angles computed at a time, for all heads of a row.
const ANGLE_BLOCK: usize = 64;

/// Runs [`Op::Rope`].
pub(super) fn rope(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Rope { x, frequencies, pairs, scale, positions, out } = op else { return Ok(()) };
    let count = frequencies.len();
    // Pairs whose elements are halves of the same part of a vector.
    let half = if pairs == RopePairs::SplitHalves { count / 2 } else { count };
    host.with(&out, |host, values| {
        let src = if x.buffer == out.buffer { None } else { Some(host.get(&x)?) };
        cpu.pool.tiles(values, Grid::new(&out, 1, out.heads, out.width), |mut tile, _| {
            let row = tile.rows().start;
            if let Some(src) = src {
                for head in tile.heads() {
                    tile.vector(row, head).copy_from_slice(vector(src, &x, row, head));
                }
            }
            let ids = positions.ids(row);
            let starts = (0..count).step_by(half.max(1)).flat_map(|part| {
                let end = count.min(part + half);
                (part..end).step_by(ANGLE_BLOCK).map(move |first| (part, first, end))
            });
            for (part, first, end) in starts {
                let n = ANGLE_BLOCK.min(end - first);
                let (mut sin, mut cos) = ([0.0; ANGLE_BLOCK], [0.0; ANGLE_BLOCK]);
                for (i, (sin, cos)) in sin.iter_mut().zip(&mut cos).take(n).enumerate() {
                    let pair = first + i;
                    let angle = ids[positions.axis(pair)] * frequencies[pair];
                    let (s, c) = f64::from(angle).sin_cos();
                    (*sin, *cos) = (s as f32 * scale, c as f32 * scale);
                }
                let angles = sin[..n].iter().zip(&cos[..n]);
                for head in tile.heads() {
                    let y = tile.vector(row, head);
                    match pairs {
                        RopePairs::Halves | RopePairs::SplitHalves => {
                            let (a, b) = y[2 * part..].split_at_mut(half);
                            let range = first - part..first - part + n;
                            let pairs = a[range.clone()].iter_mut().zip(&mut b[range]);
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

fn rotate(a: &mut f32, b: &mut f32, (sin, cos): (&f32, &f32)) {
    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
}
