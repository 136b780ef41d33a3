//! The gated delta rule.

use super::{
    Cpu,
    pool::Grid,
    row,
    simd::{DeltaRuleScalars, Kernels},
    vector,
};
use crate::{Buffer, Error, Op, Span, View, host::Host, host::Recurrent};

/// Numbers of a value head that a tile has: each has its own row of the state.
const VALUES: usize = 32;
/// Epsilon of the l2 norms, under the root beside the sum of squares.
const L2_EPS: f32 = 1e-6;

/// Runs [`Op::DeltaNet`].
pub(super) fn delta_net(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::DeltaNet { spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, numbers| {
        let mut first = 0;
        for span in spans {
            let mut state = host.states.take_recurrent(span.state)?;
            let done = Inputs::new(host, op)
                .map(|inputs| inputs.run(cpu, (&mut state, first, span), &out, numbers));
            host.states.put_recurrent(span.state, state)?;
            done?;
            first += span.rows;
        }
        Ok(())
    })
}

/// What the rows of an op bring, each with its view.
struct Inputs<'a> {
    q: (&'a [f32], View),
    k: (&'a [f32], View),
    v: (&'a [f32], View),
    a: (&'a [f32], View),
    b: (&'a [f32], View),
    a_log: &'a [f32],
    dt_bias: &'a [f32],
}

impl<'a> Inputs<'a> {
    fn new(host: &'a Host, op: &Op<'_>) -> Result<Self, Error> {
        let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, .. } = op else {
            return Err(Error::Shape("another op than DeltaNet".into()));
        };
        let with = |view: View| Ok::<_, Error>((host.get(&view)?, view));
        let all = |buffer: Buffer| host.all(buffer);
        Ok(Self {
            q: with(q)?,
            k: with(k)?,
            v: with(v)?,
            a: with(a)?,
            b: with(b)?,
            a_log: all(a_log)?,
            dt_bias: all(dt_bias)?,
        })
    }

    /// Computes one span, whose rows begin at row `first` of the op.
    fn run(
        &self,
        cpu: &mut Cpu,
        (state, first, span): (&mut Recurrent, usize, &Span),
        out: &View,
        numbers: &mut [f32],
    ) {
        let kernels = cpu.kernels;
        let (width, heads) = (self.k.1.width, out.heads);
        let group = heads / self.k.1.heads;
        let (before, after) = (&*state.committed, &mut *state.next);
        let rows = out.slice(first, span.rows);
        // The state as the rows of heads: a vector per number of a value head.
        let all = View {
            heads: out.width,
            head_stride: width,
            width,
            ..View::rows(out.buffer, heads, out.width * width)
        };
        if span.rows == 0 {
            after.copy_from_slice(before);
            return;
        }
        let grids = (Grid::new(&rows, span.rows, 1, VALUES), Grid::new(&all, 1, VALUES, width));
        cpu.pool.tiles2((numbers, grids.0), (after, grids.1), |mut y, mut state, _| {
            let (head, values) = (y.heads().start, y.cols());
            let state = state.vectors(head);
            let from = (head * out.width + values.start) * width;
            state.copy_from_slice(&before[from..from + state.len()]);
            for i in y.rows() {
                let (q, k) = (self.q(first + i, head / group), self.k(first + i, head / group));
                let v = &vector(self.v.0, &self.v.1, first + i, head)[values.clone()];
                let delta = self.delta(kernels, first + i, head, [q, k]);
                kernels.delta_rule(state, [k, q], v, y.vector(i, head), delta);
            }
        });
    }

    fn q(&self, row: usize, head: usize) -> &[f32] {
        vector(self.q.0, &self.q.1, row, head)
    }

    fn k(&self, row: usize, head: usize) -> &[f32] {
        vector(self.k.0, &self.k.1, row, head)
    }

    fn delta(
        &self,
        kernels: Kernels,
        i: usize,
        head: usize,
        [q, k]: [&[f32]; 2],
    ) -> DeltaRuleScalars {
        let norm = |x: &[f32]| 1.0 / (kernels.square(x) + L2_EPS).sqrt();
        let x = row(self.a.0, &self.a.1, i)[head] + self.dt_bias[head];
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        DeltaRuleScalars {
            q_scale: norm(q) / (k.len() as f32).sqrt(),
            k_scale: norm(k),
            decay: (-self.a_log[head].exp() * softplus).exp(),
            beta: 1.0 / (1.0 + (-row(self.b.0, &self.b.1, i)[head]).exp()),
        }
    }
}
