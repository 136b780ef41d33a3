//! Elementwise ops: embedding lookup, gated linear units, residual addition, rows into given rows,
//! columns in another order, and the weighted sum of expert outputs.

use moeflux_ops::{Activation, Error, Format, Op, Shared, View, Weight, seam::Host};

use super::{
    cpu::{Cpu, row},
    pool::Grid,
};

/// Columns of a tile. Smaller tiles do not pay for their scheduling.
const TILE_COLS: usize = 4096;
/// Columns of a tile of [`scatter_rows`].
const SCATTER_COLS: usize = 512;
/// Elements that [`combine`] sums in a local array before it adds them to the output.
const SUM_BLOCK: usize = 256;
/// Rows of a tile.
const TILE_ROWS: usize = 4;

/// Runs [`Op::Embed`].
pub(super) fn embed(
    host: &mut Host,
    cpu: &mut Cpu,
    table: Weight,
    tokens: &[u32],
    out: &View,
) -> Result<(), Error> {
    embed_rows(host, cpu, table, out, |i| tokens[i] as usize)
}

/// Runs [`Op::EmbedChosen`].
pub(super) fn embed_chosen(
    host: &mut Host,
    cpu: &mut Cpu,
    table: Weight,
    ids: &View,
    out: &View,
) -> Result<(), Error> {
    let last = host.weight(table)?.shape.rows - 1;
    (0..ids.rows).try_for_each(|i| {
        let id = row(host.get(ids)?, ids, i)[0] as usize;
        embed_rows(host, cpu, table, &out.slice(i, 1), |_| id.min(last))
    })
}

/// Looks a row of a table up for each row of `out`.
fn embed_rows(
    host: &mut Host,
    cpu: &mut Cpu,
    table: Weight,
    out: &View,
    row_of: impl Fn(usize) -> usize + Sync,
) -> Result<(), Error> {
    let kernels = cpu.kernels;
    host.with(out, |host, values| {
        let table = host.weight(table)?;
        cpu.pool.tiles(values, Grid::new(out, 1, 1, out.width), |mut tile, _| {
            for (i, head) in tile.coords() {
                let (row, y) = (table.row(row_of(i)), tile.vector(i, head));
                match table.shape.format {
                    Format::Plain(scalar) => kernels.widen(scalar, row[0], y),
                    format => format.dequantize(row, y),
                }
            }
        });
        Ok(())
    })
}

/// `sqrt(2 / pi)`.
const GELU_FACTOR: f32 = 0.797_884_6;

/// Gated activation of one element. SwiGLU has SIMD kernels besides. Activations without a gate
/// have no other implementation than [`Kernels::activate_up`](super::simd::Kernels::activate_up).
pub(super) fn glu_of(activation: Activation, gate: f32, up: f32) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::SwiGlu => gate * sigmoid(gate) * up,
        // gelu(x) = x (1 + tanh(y)) / 2 = x sigmoid(2 y)
        Activation::GeGlu => {
            gate * sigmoid(2.0 * GELU_FACTOR * (gate + 0.044_715 * gate * gate * gate)) * up
        }
        Activation::ClampedSwiGlu { alpha, limit } => {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(alpha * gate) * (up + 1.0)
        }
        // `min` would drop a NaN.
        Activation::ClippedSwiGlu { limit } => {
            let gate = gate.clamp(f32::NEG_INFINITY, limit);
            gate * sigmoid(gate) * up.clamp(-limit, limit)
        }
        Activation::LimitedSwiGlu { limit } => {
            (gate * sigmoid(gate)).clamp(f32::NEG_INFINITY, limit) * up.clamp(-limit, limit)
        }
        Activation::Relu2 | Activation::Gelu | Activation::GeluTanh | Activation::QuickGelu => up,
    }
}

/// Runs [`Op::Glu`].
pub(super) fn glu(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Glu { activation, gate, up, out } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    host.with(&out, |host, values| {
        // An input that aliases the output is read from the output.
        let gates = if gate.buffer == out.buffer { None } else { Some(host.get(&gate)?) };
        let ups = if up.buffer == out.buffer { None } else { Some(host.get(&up)?) };
        cpu.pool.tiles(values, Grid::new(&out, TILE_ROWS, 1, TILE_COLS), |mut tile, _| {
            let cols = tile.cols();
            for i in tile.rows() {
                let y = tile.row(i);
                let gate = gates.map(|values| &row(values, &gate, i)[cols.clone()]);
                let up = ups.map(|values| &row(values, &up, i)[cols.clone()]);
                if !activation.has_gate() {
                    if let Some(up) = up {
                        y.copy_from_slice(up);
                    }
                    kernels.activate_up(activation, y);
                    continue;
                }
                if activation != Activation::SwiGlu {
                    for (i, y) in y.iter_mut().enumerate() {
                        *y = glu_of(activation, gate.map_or(*y, |g| g[i]), up.map_or(*y, |u| u[i]));
                    }
                    continue;
                }
                match (gate, up) {
                    (Some(gate), None) => kernels.mul_silu(y, gate),
                    (gate, Some(up)) => {
                        if let Some(gate) = gate {
                            y.copy_from_slice(gate);
                        }
                        kernels.silu_mul(y, up);
                    }
                    // The op's check excludes that both inputs alias the output.
                    (None, None) => {}
                }
            }
        });
        Ok(())
    })
}

/// Runs [`Op::Add`].
pub(super) fn add(host: &mut Host, cpu: &mut Cpu, x: &View, y: &View) -> Result<(), Error> {
    host.with(x, |host, values| {
        let addends = host.get(y)?;
        cpu.pool.tiles(values, Grid::new(x, TILE_ROWS, 1, TILE_COLS), |mut tile, _| {
            let cols = tile.cols();
            for i in tile.rows() {
                let y = &row(addends, y, i)[cols.clone()];
                tile.row(i).iter_mut().zip(y).for_each(|(x, y)| *x += y);
            }
        });
        Ok(())
    })
}

/// Runs [`Op::ScatterRows`].
pub(super) fn scatter_rows(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::ScatterRows { x, rows, add, out } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let inputs = host.get(&x)?;
        // Tiles of all rows: which of them are written is in a list.
        cpu.pool.tiles(values, Grid::new(&out, out.rows, 1, SCATTER_COLS), |mut tile, _| {
            let cols = tile.cols();
            for (i, dst) in rows.iter().enumerate() {
                let x = &row(inputs, &x, i)[cols.clone()];
                let y = tile.row(*dst as usize);
                if add {
                    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
                } else {
                    y.copy_from_slice(x);
                }
            }
        });
        Ok(())
    })
}

/// Runs [`Op::GatherColumns`].
pub(super) fn gather_columns(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::GatherColumns { x, orders, ids, out } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let (inputs, order_values) = (host.get(&x)?, host.get(&orders)?);
        let ids = ids.as_ref().map(|ids| Ok::<_, Error>((host.get(ids)?, ids))).transpose()?;
        let k = ids.map_or(1, |(_, ids)| ids.width);
        cpu.pool.tiles(values, Grid::new(&out, TILE_ROWS, 1, TILE_COLS), |mut tile, _| {
            let cols = tile.cols();
            for i in tile.rows() {
                let id = ids.map_or(0, |(values, ids)| row(values, ids, i / k)[i % k] as usize);
                let order = row(order_values, &orders, id.min(orders.rows - 1));
                let x = row(inputs, &x, i / k);
                for (y, col) in tile.row(i).iter_mut().zip(&order[cols.clone()]) {
                    *y = x[(*col as usize).min(x.len() - 1)];
                }
            }
        });
        Ok(())
    })
}

/// `x = f(x)` per element.
pub(super) fn map(
    host: &mut Host,
    cpu: &mut Cpu,
    x: &View,
    f: impl Fn(f32) -> f32 + Sync,
) -> Result<(), Error> {
    host.with(x, |_, values| {
        cpu.pool.tiles(values, Grid::new(x, TILE_ROWS, 1, TILE_COLS), |mut tile, _| {
            for i in tile.rows() {
                tile.row(i).iter_mut().for_each(|x| *x = f(*x));
            }
        });
        Ok(())
    })
}

/// Runs [`Op::Combine`].
pub(super) fn combine(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Combine { parts, weights, shared, add, out: x } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    host.with(&x, |host, values| {
        let (outputs, weight_values) = (host.get(&parts)?, host.get(&weights)?);
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
        cpu.pool.tiles(values, Grid::new(&x, TILE_ROWS, 1, TILE_COLS), |mut tile, _| {
            let tile_cols = tile.cols();
            let blocks =
                |i: usize| tile_cols.clone().step_by(SUM_BLOCK).map(move |first| (i, first));
            for (i, first) in tile.rows().flat_map(blocks) {
                let cols = first..tile_cols.end.min(first + SUM_BLOCK);
                let mut sum = [0.0; SUM_BLOCK];
                let sum = &mut sum[..cols.len()];
                for (rank, weight) in row(weight_values, &weights, i).iter().enumerate() {
                    kernels.axpy(sum, *weight, &row(outputs, &parts, i * k + rank)[cols.clone()]);
                }
                if let Some((shared_values, view, gate)) = &shared {
                    let weight = gate.map_or(1.0, |(values, gate)| {
                        1.0 / (1.0 + (-row(values, gate, i)[0]).exp())
                    });
                    kernels.axpy(sum, weight, &row(shared_values, view, i)[cols.clone()]);
                }
                let dst = &mut tile.row(i)[first - tile_cols.start..][..cols.len()];
                if add {
                    dst.iter_mut().zip(sum).for_each(|(x, sum)| *x += *sum);
                } else {
                    dst.copy_from_slice(sum);
                }
            }
        });
        Ok(())
    })
}
