//! Ops with a recurrent state: the committed one is read, the next one written.

use super::{Constants, GpuDevice, Kernel, Memory, Params, kernel, matvec::Squares, norm};
use crate::{Buffer, Error, Op, Span, State, View};

pub(in crate::gpu) static CONV1D: Kernel =
    kernel!("conv1d", "recurrent/conv1d", [Write, Read, Write]);
pub(in crate::gpu) static DELTA_NET: Kernel = kernel!("delta_net", "recurrent/delta_net", { convolution: "recurrent/delta_no_conv" }, [Write, Read, Write]);
/// Convolution, then delta rule.
pub(in crate::gpu) static CONVOLVED: Kernel = kernel!("delta_net_conv", "recurrent/delta_net", { convolution: "recurrent/delta_conv" }, [Write, Read, Write, Read, Write]);

const CONV_THREADS: usize = 256;
/// Threads of a workgroup of the delta rule, those that share a row of the state at most, and rows that they have.
const DELTA_THREADS: usize = 128;
const MAX_LANES: usize = 8;
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

/// [`Op::Conv1d`] of one row of each of some states.
pub(super) struct Convolution {
    x: View,
    weight: Buffer,
    width: usize,
    spans: Vec<Span>,
    out: View,
}

impl Convolution {
    /// What the op asks for, if every state has one row.
    pub(super) fn of(op: &Op<'_>) -> Option<Box<Self>> {
        match *op {
            Op::Conv1d { x, weight, width: width @ 2.., spans, out }
                if spans.iter().all(|span| span.rows == 1) =>
            {
                Some(Box::new(Self { x, weight, width, spans: spans.to_vec(), out }))
            }
            _ => None,
        }
    }

    /// Whether all that it yields is what a delta rule takes, each channel once.
    fn feeds(&self, op: &Op<'_>) -> bool {
        let &Op::DeltaNet { q, k, v, a, b, spans, out: yields, .. } = op else { return false };
        let &Self { x, out, .. } = self;
        let (keys, values) = (k.heads * k.width, v.heads * v.width);
        let columns = |from, width, heads| out.columns(from, width).split(heads);
        spans.len() == self.spans.len()
            && spans.iter().all(|span| span.rows == 1)
            && out.width == 2 * keys + values
            && q == columns(0, keys, q.heads)
            && k == columns(keys, keys, k.heads)
            && v == columns(2 * keys, values, v.heads)
            && [a, b].iter().all(|view| view.buffer != out.buffer)
            && [out, yields].iter().all(|view| view.buffer != x.buffer)
    }

    /// Runs it by itself.
    pub(super) fn run(&self, gpu: &mut GpuDevice) -> Result<(), Error> {
        let &Self { x, weight, width, ref spans, out } = self;
        conv1d(gpu, &Op::Conv1d { x, weight, width, spans, out })
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
        gpu.dispatch(
            &CONV1D,
            constants,
            &[&gpu.activations(), &committed, &next],
            &params,
            groups,
        )?;
        first += span.rows;
    }
    Ok(())
}

/// [`Op::DeltaNet`] of one row of each of some states, behind a convolution, and perhaps [`Op::GatedRmsNorm`] of what it yields.
pub(super) struct Rule {
    convolution: Box<Convolution>,
    /// Queries, keys, values, decay, write strength; `a_log` and `dt_bias`.
    inputs: [View; 5],
    numbers: [Buffer; 2],
    spans: Vec<Span>,
    out: View,
    norm: Option<GatedNorm>,
}

/// The norm of what a delta rule yields.
#[derive(Clone, Copy)]
pub(super) struct GatedNorm {
    gate: View,
    weight: Buffer,
    eps: f32,
    out: View,
}

impl Rule {
    /// What the op asks for, behind a convolution, which is given back where that does not feed it.
    pub(super) fn of(
        op: &Op<'_>,
        convolution: Box<Convolution>,
    ) -> Result<Box<Self>, Box<Convolution>> {
        match *op {
            Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans, out } if convolution.feeds(op) => {
                Ok(Box::new(Self {
                    convolution,
                    inputs: [q, k, v, a, b],
                    numbers: [a_log, dt_bias],
                    spans: spans.to_vec(),
                    out,
                    norm: None,
                }))
            }
            _ => Err(convolution),
        }
    }

    /// Takes the norm of what it yields; whether it could.
    pub(super) fn norms(&mut self, op: &Op<'_>) -> bool {
        let &Op::GatedRmsNorm { x, gate, weight, eps, out } = op else { return false };
        let in_line = |view: View| view.heads == 1 || view.head_stride == view.width;
        // What is normed is written by some workgroups while others read what it is made of.
        let [.., a, b] = self.inputs;
        let read = [x, gate, self.convolution.x, a, b];
        let takes = self.norm.is_none()
            && x == self.out
            && [x, gate, out].into_iter().all(in_line)
            && read.iter().all(|view| view.buffer != out.buffer)
            && gate.buffer != x.buffer;
        if takes {
            self.norm = Some(GatedNorm { gate, weight, eps, out });
        }
        takes
    }

    /// What a product is to divide heads by, if this leaves them undivided.
    pub(super) fn squares(&self, gpu: &GpuDevice) -> Option<Squares> {
        let GatedNorm { eps, out, .. } = self.norm?;
        Some(Squares { of: out, at: self.out, count: parts(gpu, self.out.width), eps })
    }

    /// Runs all of it, with heads normed.
    pub(super) fn run(&self, gpu: &mut GpuDevice) -> Result<(), Error> {
        self.run_rule(gpu, None)?;
        match self.norm {
            Some(GatedNorm { gate, weight, eps, out }) => {
                norm::norm(gpu, &Op::GatedRmsNorm { x: self.out, gate, weight, eps, out })
            }
            None => Ok(()),
        }
    }

    /// Runs it and leaves the squares of heads for a product: [`Rule::squares`].
    pub(super) fn run_gated(&self, gpu: &mut GpuDevice) -> Result<(), Error> {
        self.run_rule(gpu, self.norm.as_ref())
    }

    fn run_rule(&self, gpu: &mut GpuDevice, norm: Option<&GatedNorm>) -> Result<(), Error> {
        let ([q, k, v, a, b], [a_log, dt_bias]) = (self.inputs, self.numbers);
        let op = Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans: &self.spans, out: self.out };
        delta_net(gpu, &op, Some((&self.convolution, norm)))
    }
}

/// Threads that share a row of a delta rule's state at most, on an adapter.
fn lanes(gpu: &GpuDevice) -> usize {
    MAX_LANES.min(gpu.target().team as usize)
}

/// Workgroups of a head with so many values.
fn parts(gpu: &GpuDevice, values: usize) -> usize {
    values.div_ceil(SHARE * DELTA_THREADS / lanes(gpu))
}

/// Runs [`Op::DeltaNet`]. `joined`: what makes its queries, keys and values first, and what becomes of what it yields.
pub(super) fn delta_net(
    gpu: &mut GpuDevice,
    op: &Op<'_>,
    joined: Option<(&Convolution, Option<&GatedNorm>)>,
) -> Result<(), Error> {
    let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, spans, out } = op else { return Ok(()) };
    let lanes = lanes(gpu);
    let (convolution, norm) = (joined.map(|(c, _)| c), joined.and_then(|(_, norm)| norm));
    let row_bytes = k.width.next_multiple_of(4 * lanes) * 8;
    if row_bytes > 2 * STAGED {
        return Err(Error::Shape(format!(
            "DeltaNet: keys of {} numbers are too wide for a GPU",
            k.width
        )));
    }
    let mut rows = DELTA_THREADS / lanes;
    while rows > 1 && rows * row_bytes > STAGED {
        rows /= 2;
    }
    let constants = Constants::new(&[
        ("WG", DELTA_THREADS as u32),
        ("ROW_THREADS", lanes as u32),
        ("THREAD_ROWS", SHARE as u32),
        ("STAGED_ROWS", rows as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", v.width as u32),
        ("TAPS", convolution.map_or(0, |c| c.width as u32)),
        ("GATED", norm.is_some().into()),
    ]);
    let groups = v.heads * parts(gpu, v.width);
    let mut first = 0;
    for (i, span) in spans.iter().enumerate() {
        let [committed, next] = gpu.recurrent(span.state)?;
        let store = &gpu.store;
        let mut params = Params::new();
        // In the place of what is convolved, what it is made of.
        let input = |view: View| match convolution {
            Some(c) => View {
                buffer: c.x.buffer,
                offset: c.x.offset + view.offset - c.out.offset,
                row_stride: c.x.row_stride,
                ..view
            },
            None => view,
        };
        let to = norm.map_or(out, |norm| norm.out);
        for view in [input(q), input(k), input(v), a, b, to] {
            let view = view.slice(first, span.rows);
            params = params.view(store.place(&view)?, &view);
        }
        let before = match convolution {
            Some(c) => [
                store.place(&c.x.slice(first, span.rows))?,
                store.start(c.weight)?,
                c.x.width as u32,
            ],
            None => [0; 3],
        };
        let behind = match norm {
            Some(norm) => {
                let [gate, squares] =
                    [norm.gate, out].map(|view| store.place(&view.slice(first, span.rows)));
                [gate?, store.start(norm.weight)?, squares?]
            }
            None => [0; 3],
        };
        let params = params
            .u(store.start(a_log)?)
            .u(store.start(dt_bias)?)
            .n(span.rows)
            .n(v.heads)
            .n(v.heads / k.heads)
            .f(1.0 / (k.width as f32).sqrt());
        let params = before.into_iter().chain(behind).fold(params, Params::u);
        let buffers = [&gpu.activations(), &committed, &next];
        match convolution {
            None => gpu.dispatch(&DELTA_NET, constants, &buffers, &params, groups)?,
            Some(c) => {
                let [inputs, next_inputs] = gpu.recurrent(c.spans[i].state)?;
                let [activations, committed, next] = buffers;
                let buffers = [activations, committed, next, &inputs, &next_inputs];
                gpu.dispatch(&CONVOLVED, constants, &buffers, &params, groups)?;
            }
        }
        first += span.rows;
    }
    Ok(())
}
