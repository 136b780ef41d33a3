//! CPU device: SIMD kernels on a thread pool.
//!
//! Each op, or family of ops, is a file. An op moves its output buffer out of the [`Host`],
//! distributes tiles of it over the [`ThreadPool`], and returns the buffer.
//!
//! Results do not depend on the number of threads or on the other rows of an op, with one
//! exception: on the fast path, batches of more than four rows sum quantized products in another
//! order.

mod aligned_vec;
mod attention;
mod compress;
mod conv1d;
mod delta_net;
mod elementwise;
mod experts;
mod head_gate;
mod head_matmul;
mod keyed_gate;
mod latent_attention;
mod logit_weights;
mod mamba2;
mod matmul;
mod norm;
mod pool;
mod rope;
mod scratch;
mod simd;
mod streams;
mod top_blocks;
mod top_logits;
mod top_positions;
mod topk;

use std::thread;

use aligned_vec::AlignedVec;
pub use logit_weights::{LogitTally, LogitWeights, logits_between, logits_extent};
use norm::RmsNormArgs;
use pool::{SPIN_TIME, ThreadPool};
use scratch::WorkerScratch;
pub use simd::{CpuPeak, Isa};
use simd::{Kernels, Q8Rows, QuantLayout, padded};

use crate::{
    Buffer, Device, DeviceId, DeviceOptions, Error, ExpertUse, ExpertUses, KV_BLOCK, KvFormat,
    NormGate, Op, PlannedMemory, ScratchShape, Ticket, View, Weight,
    host::{Host, HostDevice},
    matrix::{Bytes, MatrixShape},
};

/// Minimum rows of scratch for activations, so that all experts of a token are computed in one
/// pass.
const MIN_ROWS: usize = 64;

/// Scratch for int8 activations and their scales.
#[derive(Default)]
struct Activations {
    q: AlignedVec<i8>,
    meta: AlignedVec<f32>,
}

impl Activations {
    const fn memory(rows: usize, cols: usize) -> usize {
        AlignedVec::<i8>::memory(rows * padded(cols))
            + AlignedVec::<f32>::memory(rows * Q8Rows::scale_len(cols))
    }

    fn reserve(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        self.q.grow(rows * padded(cols))?;
        self.meta.grow(rows * Q8Rows::scale_len(cols))
    }
}

/// Kernels, threads and scratch memory of the CPU device.
struct Cpu {
    kernels: Kernels,
    pool: ThreadPool<WorkerScratch>,
    exact: bool,
    /// Whether inputs of experts' second matrices stay in f32 on the fast path.
    f32_expert_inputs: bool,
    /// Quantized inputs of a matrix.
    rounded: Activations,
    /// Quantized inputs of the experts' down matrices.
    inner: Activations,
    /// Expert uses, grouped by expert.
    runs: experts::ExpertRuns,
    /// Partial results of split-KV attention.
    kv_splits: AlignedVec<f32>,
    /// Size of the scratch memory.
    reserved: ScratchShape,
}

impl Cpu {
    /// Size of the scratch memory after it has grown for `shape`, and the bytes of scratch and
    /// stacks.
    fn scratch_for(&self, shape: ScratchShape) -> Result<(ScratchShape, usize), Error> {
        scratch_for(shape, self.reserved, self.pool.threads())
    }

    /// Grows the scratch memory for `rows` rows of `cols` inputs.
    fn reserve(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        self.reserve_all(ScratchShape { rows, cols, ..ScratchShape::default() })
    }

    /// Grows the scratch memory for ops of a shape.
    fn reserve_all(&mut self, shape: ScratchShape) -> Result<(), Error> {
        let (shape, _) = self.scratch_for(shape)?;
        if shape != self.reserved {
            let ScratchShape { rows, cols, latent_head, wide_kv } = shape;
            self.kv_splits.grow(attention::SPLIT_SCRATCH_LEN)?;
            self.rounded.reserve(rows, cols)?;
            self.inner.reserve(rows, cols)?;
            self.runs.reserve(rows)?;
            self.pool.scratch().try_for_each(|scratch| {
                scratch.latent_head.grow(latent_attention::scratch_len(latent_head))?;
                scratch.kv.grow(KV_BLOCK * wide_kv)?;
                scratch.reserve(cols)
            })?;
            self.reserved = shape;
        }
        Ok(())
    }

    /// Layout of int8 activations for a matrix; `None` if the matrix is multiplied by f32
    /// activations.
    fn rounds(&self, shape: MatrixShape) -> Option<QuantLayout> {
        if self.exact { None } else { QuantLayout::new(shape) }
    }
}

/// Bytes of scratch and stacks of a CPU device with `threads` threads for ops of a shape, before it
/// is opened.
pub fn cpu_scratch_bytes(shape: ScratchShape, threads: usize) -> Result<u64, Error> {
    scratch_for(shape, ScratchShape::default(), threads).map(|(_, bytes)| bytes as u64)
}

/// Size of the scratch memory after it has grown from `reserved` for `shape`, and the bytes of
/// scratch and stacks.
fn scratch_for(
    shape: ScratchShape,
    reserved: ScratchShape,
    threads: usize,
) -> Result<(ScratchShape, usize), Error> {
    let rows = shape.rows.max(MIN_ROWS).max(reserved.rows);
    let cols = shape.cols.max(reserved.cols);
    let latent_head = shape.latent_head.max(reserved.latent_head);
    let wide_kv = shape.wide_kv.max(reserved.wide_kv);
    let limit = isize::MAX as usize / 64;
    let max_width = latent_head.max(wide_kv);
    if rows.checked_mul(cols).is_none_or(|n| n > limit) || max_width > limit / (2 * KV_BLOCK) {
        return Err(Error::Shape(format!(
            "scratch for {rows} rows of {cols} inputs and heads of {latent_head} is too large"
        )));
    }
    let kv_blocks = [latent_attention::scratch_len(latent_head), KV_BLOCK * wide_kv];
    let kv_blocks: usize = kv_blocks.map(AlignedVec::<f32>::memory).iter().sum();
    let per_thread = WorkerScratch::memory(cols) + kv_blocks + pool::STACK_BYTES;
    let kv_splits = AlignedVec::<f32>::memory(attention::SPLIT_SCRATCH_LEN);
    let activations = 2 * Activations::memory(rows, cols) + experts::ExpertRuns::memory(rows);
    let bytes = kv_splits + activations + threads * per_thread;
    Ok((ScratchShape { rows, cols, latent_head, wide_kv }, bytes))
}

/// The CPU device.
pub(crate) struct CpuDevice {
    host: Host,
    cpu: Cpu,
    isa: Isa,
    /// Resolved uses of [`ExpertUses::Routed`].
    routed: Vec<ExpertUse>,
}

impl CpuDevice {
    /// Opens the device.
    ///
    /// # Errors
    /// The instruction set or the number of threads is not available.
    pub(crate) fn new(
        id: DeviceId,
        isa: Isa,
        kv_format: KvFormat,
        options: &DeviceOptions,
    ) -> Result<Self, Error> {
        let &DeviceOptions { threads, exact, f32_expert_inputs, idle_spin, .. } = options;
        let threads =
            threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let cpu = Cpu {
            kernels: Kernels::new(isa)?,
            pool: ThreadPool::new(threads, idle_spin.unwrap_or(SPIN_TIME))?,
            exact,
            f32_expert_inputs,
            rounded: Activations::default(),
            inner: Activations::default(),
            runs: experts::ExpertRuns::default(),
            kv_splits: AlignedVec::default(),
            reserved: ScratchShape::default(),
        };
        Ok(Self { host: Host::new(id, kv_format), cpu, isa, routed: Vec::new() })
    }
}

impl HostDevice for CpuDevice {
    fn host(&self) -> &Host {
        &self.host
    }

    fn host_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}

impl Device for CpuDevice {
    fn id(&self) -> DeviceId {
        self.host.id()
    }

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

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check(&self.host)?;
        if let &Op::Experts {
            x,
            shape,
            activation,
            experts,
            answers,
            uses: ExpertUses::Routed { ids, table },
            inner,
            out,
        } = op
        {
            let mut routed = std::mem::take(&mut self.routed);
            let resolved = self.host.routed(ids, table, &mut routed);
            let uses = ExpertUses::Listed(&routed);
            let result = resolved.and_then(|()| {
                self.run(&Op::Experts { x, shape, activation, experts, answers, uses, inner, out })
            });
            self.routed = routed;
            return result;
        }
        let (host, cpu) = (&mut self.host, &mut self.cpu);
        match *op {
            Op::Embed { table, tokens, out } => elementwise::embed(host, cpu, table, tokens, &out),
            Op::RmsNorm { x, weight, per_head, eps, out } => {
                let args = RmsNormArgs { x, gate: None, weight, per_head, eps, out };
                norm::rms_norm(host, cpu, &args)
            }
            Op::GatedRmsNorm { x, gate, function, weight, eps, out } => {
                let per_head = function == NormGate::SiluBeforeNorm;
                let (gate, weight) = (Some((gate, function)), Some(weight));
                norm::rms_norm(host, cpu, &RmsNormArgs { x, gate, weight, per_head, eps, out })
            }
            Op::LayerNorm { .. } => norm::layer_norm(host, cpu, op),
            Op::HeadMatMul { .. } => head_matmul::head_mat_mul(host, cpu, op),
            Op::MatMul { .. } => matmul::mat_mul(host, cpu, op),
            Op::Rope { .. } => rope::rope(host, cpu, op),
            Op::Attention { .. } => attention::attention(host, cpu, op),
            Op::LatentAttention { .. } => latent_attention::latent_attention(host, cpu, op),
            Op::Append { k, v, spans } => attention::append_kv(host, spans, &k, v.as_ref()),
            Op::TopPositions { .. } => top_positions::top_positions(host, cpu, op),
            Op::TopBlocks { .. } => top_blocks::top_blocks(host, cpu, op),
            Op::Conv1d { .. } => conv1d::conv1d(host, cpu, op),
            Op::Compress { .. } => compress::compress(host, cpu, op),
            Op::DeltaNet { .. } => delta_net::delta_net(host, cpu, op),
            Op::Mamba2 { .. } => mamba2::mamba2(host, cpu, op),
            Op::Glu { .. } => elementwise::glu(host, cpu, op),
            Op::HeadGate { .. } => head_gate::head_gate(host, cpu, op),
            Op::KeyedGate { .. } => keyed_gate::keyed_gate(host, cpu, op),
            Op::Scale { x, factor } => elementwise::map(host, cpu, &x, |x| x * factor),
            Op::Silu { x } => elementwise::map(host, cpu, &x, |x| x / (1.0 + (-x).exp())),
            Op::StreamWeights { .. } => streams::stream_weights(host, cpu, op),
            Op::Collapse { .. } => streams::collapse(host, cpu, op),
            Op::Expand { .. } => streams::expand(host, cpu, op),
            Op::GatherColumns { .. } => elementwise::gather_columns(host, cpu, op),
            Op::SoftCap { x, cap } => elementwise::map(host, cpu, &x, |x| cap * (x / cap).tanh()),
            Op::Add { x, y } => elementwise::add(host, cpu, &x, &y),
            Op::TopK { .. } => topk::top_k(host, cpu, op),
            Op::TopLogits { logits, best } => top_logits::top_logits(host, cpu, &logits, &best),
            Op::Experts { .. } => experts::experts(host, cpu, op),
            Op::Combine { .. } => elementwise::combine(host, cpu, op),
        }
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        Ok(Ticket(0))
    }

    fn done(&mut self, _: Ticket) -> Result<bool, Error> {
        Ok(true)
    }

    fn write(&mut self, buffer: Buffer, values: &[f32]) -> Result<(), Error> {
        self.host.write(buffer, values)
    }

    fn write_view(&mut self, view: View, values: &[f32]) -> Result<(), Error> {
        self.host.write_view(view, values)
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.host.read(view, out)
    }
}

impl PlannedMemory for CpuDevice {
    fn scratch_bytes(&self, shape: ScratchShape) -> Result<u64, Error> {
        self.cpu.scratch_for(shape).map(|(_, bytes)| bytes as u64)
    }

    fn reserve_scratch(&mut self, shape: ScratchShape) -> Result<(), Error> {
        self.cpu.reserve_all(shape)
    }
}

/// Row of a view of one head.
fn row<'a>(values: &'a [f32], view: &View, row: usize) -> &'a [f32] {
    vector(values, view, row, 0)
}

/// Vector of a view.
fn vector<'a>(values: &'a [f32], view: &View, row: usize, head: usize) -> &'a [f32] {
    let start = view.index(row, head);
    &values[start..start + view.width]
}
