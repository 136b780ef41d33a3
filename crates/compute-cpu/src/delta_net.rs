//! Gated delta rule.

use moeflux_ops::{
    Error, KeySharing, LogDecay, Op, Span, View,
    seam::{Host, SpanPart},
};

use super::{
    cpu::{Cpu, row, vector},
    pool::Grid,
    simd::{DeltaRuleFactors, Kernels},
};

/// Elements of a value head in a tile. Each has its own row of the state.
const TILE_VALUES: usize = 32;
/// Epsilon of the L2 norms, added to the sum of squares.
const L2_EPS: f32 = 1e-6;

/// Runs [`Op::DeltaNet`].
pub(super) fn delta_net(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::DeltaNet { k, spans, out, .. } = op else { return Ok(()) };
    // Room for the decays of a row.
    cpu.reserve(1, k.width)?;
    host.with(&out, |host, values| {
        let mut first = 0;
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = host.states.take_recurrent(span.state, index)?;
            let result = DeltaInputs::new(host, op, first, &span)
                .map(|inputs| inputs.run(cpu, state.part(index), &out, values));
            host.states.put_recurrent(span.state, index, state)?;
            result?;
            first += span.rows;
        }
        Ok(())
    })
}

/// Inputs of one span, each buffer with its view.
struct DeltaInputs<'a> {
    q: (&'a [f32], View),
    k: (&'a [f32], View),
    v: (&'a [f32], View),
    a: (&'a [f32], View),
    b: (&'a [f32], View),
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    decay: LogDecay,
    sharing: KeySharing,
    /// Row of the op where the span starts.
    first: usize,
    /// Rows of the span.
    rows: usize,
}

impl<'a> DeltaInputs<'a> {
    fn new(host: &'a Host, op: &Op<'_>, first: usize, span: &Span) -> Result<Self, Error> {
        let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, decay, sharing, .. } = op else {
            return Err(Error::Shape("another op than DeltaNet".into()));
        };
        let with_values = |view: View| Ok::<_, Error>((host.get(&view)?, view));
        Ok(Self {
            q: with_values(q)?,
            k: with_values(k)?,
            v: with_values(v)?,
            a: with_values(a)?,
            b: with_values(b)?,
            a_log: host.values(a_log)?,
            dt_bias: host.values(dt_bias)?,
            decay,
            sharing,
            first,
            rows: span.rows,
        })
    }

    /// Computes the span.
    fn run(
        &self,
        cpu: &mut Cpu,
        (committed, next): (&[f32], &mut [f32]),
        out: &View,
        values: &mut [f32],
    ) {
        let (kernels, first) = (cpu.kernels, self.first);
        let (width, heads) = (self.k.1.width, out.heads);
        let (key_heads, run) = (self.k.1.heads, self.sharing.run(heads, self.k.1.heads));
        let rows = out.slice(first, self.rows);
        // The state `(value heads, value width, key width)` as a view: a row per head, and a vector
        // per element of a value.
        let state_view = View {
            heads: out.width,
            head_stride: width,
            width,
            ..View::rows(out.buffer, heads, out.width * width)
        };
        if self.rows == 0 {
            next.copy_from_slice(committed);
            return;
        }
        let out_grid = Grid::new(&rows, self.rows, 1, TILE_VALUES);
        let state_grid = Grid::new(&state_view, 1, TILE_VALUES, width);
        cpu.pool.tiles2(values, out_grid, next, state_grid, |mut y, mut state, scratch| {
            let (head, elements) = (y.heads().start, y.cols());
            let state = state.vectors(head);
            let start = (head * out.width + elements.start) * width;
            state.copy_from_slice(&committed[start..start + state.len()]);
            for i in y.rows() {
                let key_head = head / run % key_heads;
                let (q, k) = (self.q(first + i, key_head), self.k(first + i, key_head));
                let v = &vector(self.v.0, &self.v.1, first + i, head)[elements.clone()];
                let decays = &mut scratch.dequantized[..self.a.1.width];
                let factors = self.factors(kernels, first + i, head, [q, k], decays);
                kernels.delta_rule(state, [k, q], v, y.vector(i, head), factors);
            }
        });
    }

    fn q(&self, row: usize, head: usize) -> &[f32] {
        vector(self.q.0, &self.q.1, row, head)
    }

    fn k(&self, row: usize, head: usize) -> &[f32] {
        vector(self.k.0, &self.k.1, row, head)
    }

    /// Factors of the delta rule for one row and head. Writes the decays.
    fn factors<'d>(
        &self,
        kernels: Kernels,
        i: usize,
        head: usize,
        [q, k]: [&[f32]; 2],
        decays: &'d mut [f32],
    ) -> DeltaRuleFactors<'d> {
        let inverse_norm = |x: &[f32]| 1.0 / (kernels.square(x) + L2_EPS).sqrt();
        let a = vector(self.a.0, &self.a.1, i, head);
        let (bias, rate) = (&self.dt_bias[head * a.len()..][..a.len()], self.a_log[head].exp());
        match (a, &mut *decays) {
            ([a], [decay]) => *decay = log_decay(self.decay, a + bias[0], rate).exp(),
            (_, decays) => kernels.decays(a, bias, rate, self.decay, decays),
        }
        DeltaRuleFactors {
            q_scale: inverse_norm(q) / (k.len() as f32).sqrt(),
            k_scale: inverse_norm(k),
            decay: decays,
            beta: sigmoid(row(self.b.0, &self.b.1, i)[head]),
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Logarithm of a decay; `rate` is `exp(a_log)`.
fn log_decay(function: LogDecay, x: f32, rate: f32) -> f32 {
    match function {
        LogDecay::Softplus => -rate * (x.max(0.0) + (-x.abs()).exp().ln_1p()),
        LogDecay::Bounded { bound } => bound * sigmoid(rate * x),
    }
}
