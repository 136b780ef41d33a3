//! Values gated by the agreement of queries and keys.

use moeflux_ops::{Error, GateFunction, Op, seam::Host};

use super::{
    cpu::{Cpu, row, vector},
    head_gate::factor,
    norm::vector_tiles,
};

/// Sums of a dot product that are independent of each other.
const LANES: usize = 16;

/// Dot product, in an order fixed by the length.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

/// Runs [`Op::KeyedGate`].
pub(super) fn keyed_gate(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::KeyedGate { q, k, v, scale, out } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let (queries, keys, gated) = (host.get(&q)?, host.get(&k)?, host.get(&v)?);
        cpu.pool.tiles(values, vector_tiles(&out), |mut tile, _| {
            for (i, head) in tile.coords() {
                let s = scale * dot(vector(queries, &q, i, head), vector(keys, &k, i, head));
                let root = s.abs().max(1e-6).sqrt();
                let root = if s == 0.0 { 0.0 } else { root.copysign(s) };
                let gate = factor(GateFunction::Sigmoid, root);
                let values = row(gated, &v, i);
                tile.vector(i, head).iter_mut().zip(values).for_each(|(y, v)| *y = gate * v);
            }
        });
        Ok(())
    })
}
