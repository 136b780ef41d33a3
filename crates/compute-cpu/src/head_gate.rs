//! Gate per head or per element.

use moeflux_ops::{Error, GateFunction, Op, seam::Host};

use super::{
    cpu::{Cpu, vector},
    norm::vector_tiles,
};

/// Value of a gate's function.
pub(super) fn factor(function: GateFunction, gate: f32) -> f32 {
    match function {
        GateFunction::Sigmoid => 1.0 / (1.0 + (-gate).exp()),
        GateFunction::Softplus => gate.max(0.0) + (-gate.abs()).exp().ln_1p(),
        GateFunction::Identity => gate,
        GateFunction::DoubleSigmoid => 2.0 / (1.0 + (-gate).exp()),
    }
}

/// Runs [`Op::HeadGate`].
pub(super) fn head_gate(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::HeadGate { x, gate, function } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    host.with(&x, |host, values| {
        let gates = host.get(&gate)?;
        cpu.pool.tiles(values, vector_tiles(&x), |mut tile, _| {
            for (row, head) in tile.coords() {
                let (x, gates) = (tile.vector(row, head), vector(gates, &gate, row, head));
                match (gates, function) {
                    ([gate], _) => {
                        let factor = factor(function, *gate);
                        x.iter_mut().for_each(|x| *x *= factor);
                    }
                    (_, GateFunction::Sigmoid) => kernels.mul_sigmoid(x, gates),
                    _ => {
                        x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= factor(function, *gate));
                    }
                }
            }
        });
        Ok(())
    })
}
