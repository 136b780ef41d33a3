//! Ops that combine rows number by number, and the embedding.

use super::{Cpu, pool::Grid, row};
use crate::{Activation, Error, Format, Shared, View, Weight, host::Host};

/// Numbers of a row of a tile: fewer are not worth to be shared out.
const COLS: usize = 4096;
/// Numbers that are summed apart before they are added to what is there.
const BLOCK: usize = 256;
/// Rows of a tile.
const ROWS: usize = 4;

/// Runs [`Op::Embed`](crate::Op::Embed).
pub(super) fn embed(
    host: &mut Host,
    cpu: &mut Cpu,
    (table, tokens): (Weight, &[u32]),
    out: &View,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    host.with(out, |host, numbers| {
        let table = host.weight(table)?;
        cpu.pool.tiles(numbers, Grid::new(out, 1, 1, out.width), |mut tile, _| {
            let i = tile.rows().start;
            let (w, s, b) = table.row(tokens[i] as usize);
            match table.shape.format {
                Format::Plain(scalar) => kernels.widen(scalar, w, tile.row(i)),
                format => format.dequantize(w, s, b, tile.row(i)),
            }
        });
        Ok(())
    })
}

/// `sqrt(2 / pi)`.
const GELU: f32 = 0.797_884_6;

/// The activations that are not SwiGLU, which has kernels: one number.
pub(super) fn glu_of(activation: Activation, gate: f32, up: f32) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::SwiGlu => gate * sigmoid(gate) * up,
        // gelu(x) = x (1 + tanh(y)) / 2 = x sigmoid(2 y)
        Activation::GeGlu => {
            gate * sigmoid(2.0 * GELU * (gate + 0.044_715 * gate * gate * gate)) * up
        }
        Activation::ClampedSwiGlu { alpha, limit } => {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(alpha * gate) * (up + 1.0)
        }
    }
}

/// Runs [`Op::Glu`](crate::Op::Glu).
pub(super) fn glu(
    host: &mut Host,
    cpu: &mut Cpu,
    activation: Activation,
    [gate, up]: [&View; 2],
    out: &View,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    host.with(out, |host, numbers| {
        // What lies in the output's place is the output already.
        let gates = if gate.buffer == out.buffer { None } else { Some(host.get(gate)?) };
        let ups = if up.buffer == out.buffer { None } else { Some(host.get(up)?) };
        cpu.pool.tiles(numbers, Grid::new(out, ROWS, 1, COLS), |mut tile, _| {
            let cols = tile.cols();
            for i in tile.rows() {
                let to = tile.row(i);
                let gate = gates.map(|all| &row(all, gate, i)[cols.clone()]);
                let up = ups.map(|all| &row(all, up, i)[cols.clone()]);
                if activation != Activation::SwiGlu {
                    for (i, to) in to.iter_mut().enumerate() {
                        *to = glu_of(
                            activation,
                            gate.map_or(*to, |g| g[i]),
                            up.map_or(*to, |u| u[i]),
                        );
                    }
                    continue;
                }
                match (gate, up) {
                    (Some(gate), None) => kernels.mul_silu(to, gate),
                    (gate, Some(up)) => {
                        if let Some(gate) = gate {
                            to.copy_from_slice(gate);
                        }
                        kernels.silu_mul(to, up);
                    }
                    // The op's check excludes one buffer for all.
                    (None, None) => {}
                }
            }
        });
        Ok(())
    })
}

/// Runs [`Op::Add`](crate::Op::Add).
pub(super) fn add(host: &mut Host, cpu: &mut Cpu, x: &View, y: &View) -> Result<(), Error> {
    host.with(x, |host, numbers| {
        let all = host.get(y)?;
        cpu.pool.tiles(numbers, Grid::new(x, ROWS, 1, COLS), |mut tile, _| {
            let cols = tile.cols();
            for i in tile.rows() {
                let y = &row(all, y, i)[cols.clone()];
                tile.row(i).iter_mut().zip(y).for_each(|(x, y)| *x += y);
            }
        });
        Ok(())
    })
}

/// Replaces every number of `x` by what `f` makes of it.
pub(super) fn map(
    host: &mut Host,
    cpu: &mut Cpu,
    x: &View,
    f: impl Fn(f32) -> f32 + Sync,
) -> Result<(), Error> {
    host.with(x, |_, numbers| {
        cpu.pool.tiles(numbers, Grid::new(x, ROWS, 1, COLS), |mut tile, _| {
            for i in tile.rows() {
                tile.row(i).iter_mut().for_each(|x| *x = f(*x));
            }
        });
        Ok(())
    })
}

/// Runs [`Op::Combine`](crate::Op::Combine).
pub(super) fn combine(
    host: &mut Host,
    cpu: &mut Cpu,
    (x, add): (&View, bool),
    [parts, weights]: [&View; 2],
    shared: Option<Shared>,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    host.with(x, |host, numbers| {
        let (from, shares) = (host.get(parts)?, host.get(weights)?);
        let shared = match &shared {
            Some(Shared { out, gate }) => {
                let gate = gate
                    .as_ref()
                    .map(|gate| Ok::<_, Error>((host.get(gate)?, gate)))
                    .transpose()?;
                Some((host.get(out)?, out, gate))
            }
            None => None,
        };
        let k = weights.width;
        cpu.pool.tiles(numbers, Grid::new(x, ROWS, 1, COLS), |mut tile, _| {
            let whole = tile.cols();
            let blocks = |i: usize| whole.clone().step_by(BLOCK).map(move |first| (i, first));
            for (i, first) in tile.rows().flat_map(blocks) {
                let cols = first..whole.end.min(first + BLOCK);
                let mut sum = [0.0; BLOCK];
                let sum = &mut sum[..cols.len()];
                for (rank, share) in row(shares, weights, i).iter().enumerate() {
                    kernels.axpy(sum, *share, &row(from, parts, i * k + rank)[cols.clone()]);
                }
                if let Some((all, view, gate)) = &shared {
                    let share =
                        gate.map_or(1.0, |(all, gate)| 1.0 / (1.0 + (-row(all, gate, i)[0]).exp()));
                    kernels.axpy(sum, share, &row(all, view, i)[cols.clone()]);
                }
                let to = &mut tile.row(i)[first - whole.start..][..cols.len()];
                if add {
                    to.iter_mut().zip(sum).for_each(|(x, sum)| *x += *sum);
                } else {
                    to.copy_from_slice(sum);
                }
            }
        });
        Ok(())
    })
}
