//! The CPU device.
//!
//! One file per op or family of ops. An op moves the buffer that it writes out of the [`Host`], shares its tiles
//! out over the [`Pool`], and puts it back. What a tile computes does not depend on the tile: neither the number of
//! threads nor the rows that share an op change a bit, but for one thing: on the fast path quants that more than four rows
//! meet sum in another order.

mod attention;
mod conv1d;
mod delta_net;
mod elementwise;
mod experts;
mod head_matmul;
mod latent_attention;
mod lines;
mod logits;
mod matmul;
mod norm;
mod pool;
mod rope;
mod scratch;
mod simd;
mod top_logits;
mod top_positions;
mod topk;

use std::{ops::Range, thread};

use lines::Lines;
pub use logits::{LogitTally, LogitWeights, logits_between, logits_extent};
use pool::Pool;
use scratch::WorkerScratch;
pub use simd::{CpuPeak, Isa};
use simd::{Kernels, Q8Rows, QuantLayout, padded};

use crate::{
    BankPlace, Buffer, Device, Error, ExpertUse, ExpertUses, KV_BLOCK, KvFormat, Op, ScratchShape,
    Slot, SlotTable, Span, State, StateShape, Ticket, View, Weight,
    host::Host,
    matrix::{Bytes, MatrixShape},
};

/// Rows that activations have room for at least, so that the experts of a token are computed together.
const MIN_ROWS: usize = 64;

/// Rows of activations rounded to 8 bits, and the memory for them.
#[derive(Default)]
struct Activations {
    q: Lines<i8>,
    meta: Lines<f32>,
}

impl Activations {
    const fn memory(rows: usize, cols: usize) -> usize {
        Lines::<i8>::memory(rows * padded(cols))
            + Lines::<f32>::memory(rows * Q8Rows::scale_len(cols))
    }

    fn reserve(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        self.q.grow(rows * padded(cols))?;
        self.meta.grow(rows * Q8Rows::scale_len(cols))
    }
}

/// What computes, apart from what is computed on.
struct Cpu {
    kernels: Kernels,
    pool: Pool<WorkerScratch>,
    exact: bool,
    /// Inputs of a matrix.
    rounded: Activations,
    /// Inputs of the experts' second matrices.
    inner: Activations,
    /// Which uses are of one expert.
    runs: experts::ExpertRuns,
    /// Parts of sums of attention, and what they are parts of.
    parts: Lines<f32>,
    /// What there is room for.
    reserved: ScratchShape,
}

impl Cpu {
    /// What there is room for once ops of a size fit, and the bytes that scratch and workers then hold.
    fn room(&self, shape: ScratchShape) -> Result<(ScratchShape, usize), Error> {
        let has = self.reserved;
        let rows = shape.rows.max(MIN_ROWS).max(has.rows);
        let cols = shape.cols.max(has.cols);
        let latent_head = shape.latent_head.max(has.latent_head);
        let wide_kv = shape.wide_kv.max(has.wide_kv);
        let limit = isize::MAX as usize / 64;
        let most = latent_head.max(wide_kv);
        if rows.checked_mul(cols).is_none_or(|n| n > limit) || most > limit / (2 * KV_BLOCK) {
            return Err(Error::Shape(format!(
                "scratch for {rows} rows of {cols} inputs and heads of {latent_head} is too large"
            )));
        }
        let blocks = [latent_attention::numbers(latent_head), KV_BLOCK * wide_kv];
        let blocks: usize = blocks.map(Lines::<f32>::memory).iter().sum();
        let per_thread = WorkerScratch::memory(cols) + blocks + pool::STACK_BYTES;
        let parts = Lines::<f32>::memory(attention::KV_SPLITS);
        let each = 2 * Activations::memory(rows, cols) + experts::ExpertRuns::memory(rows);
        let bytes = parts + each + self.pool.threads() * per_thread;
        Ok((ScratchShape { rows, cols, latent_head, wide_kv }, bytes))
    }

    /// Makes room for `rows` rows of `cols` inputs.
    fn reserve(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        self.reserve_all(ScratchShape { rows, cols, ..ScratchShape::default() })
    }

    /// Makes room for ops of a size.
    fn reserve_all(&mut self, shape: ScratchShape) -> Result<(), Error> {
        let (shape, _) = self.room(shape)?;
        if shape != self.reserved {
            let ScratchShape { rows, cols, latent_head, wide_kv } = shape;
            self.parts.grow(attention::KV_SPLITS)?;
            self.rounded.reserve(rows, cols)?;
            self.inner.reserve(rows, cols)?;
            self.runs.reserve(rows)?;
            self.pool.lanes().try_for_each(|lane| {
                lane.latent_head.grow(latent_attention::numbers(latent_head))?;
                lane.kv.grow(KV_BLOCK * wide_kv)?;
                lane.reserve(cols)
            })?;
            self.reserved = shape;
        }
        Ok(())
    }

    /// What rounded activations are rounded for, if a matrix of this shape and format meets such.
    fn rounds(&self, shape: MatrixShape) -> Option<QuantLayout> {
        if self.exact { None } else { QuantLayout::new(shape) }
    }
}

/// The CPU device.
pub(crate) struct CpuDevice {
    host: Host,
    cpu: Cpu,
    isa: Isa,
    /// What a router's ids stand for.
    routed: Vec<ExpertUse>,
}

impl CpuDevice {
    /// # Errors
    /// The machine does not have the instruction set, or not that many threads.
    pub(crate) fn new(
        isa: Isa,
        threads: Option<usize>,
        exact: bool,
        keys: KvFormat,
    ) -> Result<Self, Error> {
        let threads =
            threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let cpu = Cpu {
            kernels: Kernels::new(isa)?,
            pool: Pool::new(threads)?,
            exact,
            rounded: Activations::default(),
            inner: Activations::default(),
            runs: experts::ExpertRuns::default(),
            parts: Lines::default(),
            reserved: ScratchShape::default(),
        };
        Ok(Self { host: Host::new(keys), cpu, isa, routed: Vec::new() })
    }
}

impl Device for CpuDevice {
    fn describe(&self) -> String {
        let threads = match self.cpu.pool.threads() {
            1 => "1 thread".into(),
            n => format!("{n} threads"),
        };
        let path = if self.cpu.exact { "exact" } else { "8-bit activations" };
        format!("cpu, {}, {threads}, {path}", self.isa)
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.host.buffer(len)
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        self.host.add_weight(shape, bytes)
    }

    fn bank_slots(&self, _: usize) -> usize {
        usize::MAX
    }

    fn bank(&mut self, count: usize, bytes: usize, _: BankPlace) -> Result<u16, Error> {
        self.host.bank(count, bytes)
    }

    fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error> {
        self.host.slot_table(slots)
    }

    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.host.take_slot(slot)
    }

    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        self.host.put_slot(slot, bytes)
    }

    fn copy_slot(&mut self, from: Slot, to: Slot) -> Result<(), Error> {
        self.host.copy_slot(from, to)
    }

    fn kv_format(&self) -> KvFormat {
        self.host.states.keys()
    }

    fn state_bytes(&self, shape: StateShape) -> u64 {
        self.host.states.bytes(shape)
    }

    fn limit_states(&mut self, bytes: u64) {
        self.host.states.limit(bytes);
    }

    fn states_held(&self) -> u64 {
        self.host.states.held()
    }

    fn state_need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        self.host.states.need(spans)
    }

    fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        self.host.states.make(shape)
    }

    fn fork_state(&mut self, state: State, places: usize) -> Result<State, Error> {
        self.host.states.fork(state, places)
    }

    fn drop_state(&mut self, state: State) {
        self.host.states.drop_state(state);
    }

    fn reset(&mut self, state: State) -> Result<(), Error> {
        self.host.states.reset(state)
    }

    fn cut_state(&mut self, state: State, places: usize) -> Result<(), Error> {
        self.host.states.cut(state, places)
    }

    fn save_state(
        &mut self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.host.states.save(state, places, out)
    }

    fn load_state(
        &mut self,
        state: State,
        places: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.host.states.load(state, places, bytes)
    }

    fn commit(&mut self, states: &[State]) -> Result<(), Error> {
        self.host.states.commit(states)
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check(&self.host)?;
        if let &Op::Experts {
            x,
            shape,
            activation,
            experts,
            uses: ExpertUses::Routed { ids, table },
            inner,
            out,
        } = op
        {
            let mut routed = std::mem::take(&mut self.routed);
            let found = self.host.routed(ids, table, &mut routed);
            let uses = ExpertUses::Listed(&routed);
            let done = found.and_then(|()| {
                self.run(&Op::Experts { x, shape, activation, experts, uses, inner, out })
            });
            self.routed = routed;
            return done;
        }
        let (host, cpu) = (&mut self.host, &mut self.cpu);
        match *op {
            Op::Embed { table, tokens, out } => {
                elementwise::embed(host, cpu, (table, tokens), &out)
            }
            Op::RmsNorm { x, weight, eps, out } => {
                norm::rms_norm(host, cpu, (&x, None), (weight, eps), &out)
            }
            Op::GatedRmsNorm { x, gate, weight, eps, out } => {
                norm::rms_norm(host, cpu, (&x, Some(&gate)), (Some(weight), eps), &out)
            }
            Op::LayerNorm { x, weight, bias, eps, out } => {
                norm::layer_norm(host, cpu, &x, (weight, bias, eps), &out)
            }
            Op::HeadMatMul { .. } => head_matmul::head_mat_mul(host, cpu, op),
            Op::MatMul { .. } => matmul::mat_mul(host, cpu, op),
            Op::Rope { x, frequencies, pairs, scale, spans, out } => {
                rope::rope(host, cpu, &x, (frequencies, pairs, scale), (spans, &out))
            }
            Op::Attention { .. } => attention::attention(host, cpu, op),
            Op::LatentAttention { .. } => latent_attention::latent_attention(host, cpu, op),
            Op::TopPositions { .. } => top_positions::top_positions(host, cpu, op),
            Op::Conv1d { .. } => conv1d::conv1d(host, cpu, op),
            Op::DeltaNet { .. } => delta_net::delta_net(host, cpu, op),
            Op::Glu { activation, gate, up, out } => {
                elementwise::glu(host, cpu, activation, [&gate, &up], &out)
            }
            Op::Scale { x, factor } => elementwise::map(host, cpu, &x, |x| x * factor),
            Op::SoftCap { x, cap } => elementwise::map(host, cpu, &x, |x| cap * (x / cap).tanh()),
            Op::Add { x, y } => elementwise::add(host, cpu, &x, &y),
            Op::TopK { logits, router, ids, weights } => {
                topk::top_k(host, cpu, (&logits, router), [&ids, &weights])
            }
            Op::TopLogits { logits, best } => top_logits::top_logits(host, cpu, &logits, &best),
            Op::Experts { .. } => experts::experts(host, cpu, op),
            Op::Combine { parts, weights, shared, add, out } => {
                elementwise::combine(host, cpu, (&out, add), [&parts, &weights], shared)
            }
        }
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        Ok(Ticket(0))
    }

    fn done(&mut self, _: Ticket) -> Result<bool, Error> {
        Ok(true)
    }

    fn write(&mut self, buffer: Buffer, numbers: &[f32]) -> Result<(), Error> {
        self.host.write(buffer, numbers)
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.host.read(view, out)
    }

    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error> {
        self.cpu.room(shape).map(|(_, bytes)| bytes as u64)
    }

    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error> {
        self.cpu.reserve_all(shape)
    }
}

/// A row of a view of one head.
fn row<'a>(all: &'a [f32], view: &View, row: usize) -> &'a [f32] {
    vector(all, view, row, 0)
}

/// One vector of a view.
fn vector<'a>(all: &'a [f32], view: &View, row: usize, head: usize) -> &'a [f32] {
    let at = view.at(row, head);
    &all[at..at + view.width]
}
