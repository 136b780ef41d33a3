//! Ops with a recurrent state: the committed one is read, the next one written.

use super::{Constants, GpuDevice, Kernel, Memory, Params, kernel};
use crate::{Error, Op, State};

static CONV1D: Kernel = kernel!("conv1d", ["common", "conv1d"], [Write, Read, Write]);
static DELTA_NET: Kernel =
    kernel!("delta_net", ["common", "precise", "lanes_subgroup", "delta_net"], [Write, Read, Write]);
static DELTA_NET_PLAIN: Kernel =
    kernel!("delta_net_plain", ["common", "precise", "lanes_memory", "delta_net"], [Write, Read, Write]);

const CONV_THREADS: usize = 256;
/// Threads of a workgroup of the delta rule, those that share a row of the state at most, and rows that they have.
const DELTA_THREADS: usize = 128;
const MOST_LANES: usize = 8;
const SHARE: usize = 2;
/// Bytes of queries and keys in a workgroup's memory, unless one row has more.
const STAGED: usize = 16 << 10;

impl GpuDevice {
    /// A state's committed and next numbers; the latter are going to be written.
    fn recurrent(&mut self, state: State) -> Result<[Memory; 2], Error> {
        let recurrent = self.store.writable(state)?;
        recurrent.written = true;
        let next = recurrent.next.as_ref().unwrap_or(&recurrent.committed);
        Ok([&recurrent.committed, next].map(|memory| Memory::clone(memory)))
    }
}

/// Runs [`Op::Conv1d`].
pub(super) fn conv1d(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Conv1d { x, weight, width, spans, out } = op else { return Ok(()) };
    let constants = Constants::new(&[("WG", CONV_THREADS as u32), ("TAPS", width as u32)]);
    let mut first = 0;
    for span in spans {
        let [committed, next] = gpu.recurrent(span.state)?;
        let (from, to) = (x.slice(first, span.rows), out.slice(first, span.rows));
        let params = Params::new()
            .view(gpu.store.place(&from)?, &from)
            .view(gpu.store.place(&to)?, &to)
            .u(gpu.store.start(weight)?)
            .n(span.rows)
            .n(x.width);
        let groups = ((span.rows + width - 1) * x.width).div_ceil(CONV_THREADS);
        gpu.dispatch(&CONV1D, constants, &[&gpu.activations(), &committed, &next], &params, groups)?;
        first += span.rows;
    }
    Ok(())
}

/// Runs [`Op::DeltaNet`].
pub(super) fn delta_net(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans, out } = op else { return Ok(()) };
    let target = gpu.target();
    let lanes = MOST_LANES.min(target.team as usize);
    let row_bytes = k.width.next_multiple_of(4 * lanes) * 8;
    if row_bytes > 2 * STAGED {
        return Err(Error::Shape(format!("DeltaNet: keys of {} numbers are too wide for a GPU", k.width)));
    }
    let mut rows = DELTA_THREADS / lanes;
    while rows > 1 && rows * row_bytes > STAGED {
        rows /= 2;
    }
    let constants = Constants::new(&[
        ("WG", DELTA_THREADS as u32),
        ("LANES", lanes as u32),
        ("SHARE", SHARE as u32),
        ("ROWS", rows as u32),
        ("KEYS", k.width as u32),
        ("VALUES", v.width as u32),
    ]);
    let kernel = if target.subgroups { &DELTA_NET } else { &DELTA_NET_PLAIN };
    let groups = v.heads * v.width.div_ceil(SHARE * DELTA_THREADS / lanes);
    let mut first = 0;
    for span in spans {
        let [committed, next] = gpu.recurrent(span.state)?;
        let store = &gpu.store;
        let mut params = Params::new();
        for view in [q, k, v, a, b, out] {
            let view = view.slice(first, span.rows);
            params = params.view(store.place(&view)?, &view);
        }
        let params = params
            .u(store.start(a_log)?)
            .u(store.start(dt_bias)?)
            .n(span.rows)
            .n(v.heads)
            .n(v.heads / k.heads)
            .f(1.0 / (k.width as f32).sqrt());
        gpu.dispatch(kernel, constants, &[&gpu.activations(), &committed, &next], &params, groups)?;
        first += span.rows;
    }
    Ok(())
}
