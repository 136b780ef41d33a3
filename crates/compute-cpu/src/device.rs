//! The CPU device: runs each op over the threads of the pool.

use std::thread;

use moeflux_ops::{
    Buffer, Bytes, Device, DeviceId, DeviceOptions, Error, ExpertUse, ExpertUses, KvFormat,
    MatrixShape, NormGate, Op, PlannedMemory, ScratchShape, Ticket, View, Weight,
    seam::{Host, HostDevice},
};

use super::{
    aligned_vec::AlignedVec,
    attention, compress, conv1d,
    cpu::{Activations, Cpu},
    delta_net, elementwise,
    expert_runs::ExpertRuns,
    experts, head_gate, head_matmul, keyed_gate, latent_attention, mamba2, matmul,
    norm::{self, RmsNormArgs},
    pool::{SPIN_TIME, ThreadPool},
    rope, segment_attention,
    simd::{Isa, Kernels},
    streams, top_blocks, top_logits, top_positions, topk,
};

/// The CPU device.
pub struct CpuDevice {
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
    #[doc(hidden)]
    pub fn new(
        id: DeviceId,
        isa: Isa,
        kv_format: KvFormat,
        options: &DeviceOptions,
    ) -> Result<Self, Error> {
        let &DeviceOptions { threads, exact, fine_expert_inputs, idle_spin, .. } = options;
        let threads =
            threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let cpu = Cpu {
            kernels: Kernels::new(isa)?,
            pool: ThreadPool::new(threads, idle_spin.unwrap_or(SPIN_TIME))?,
            exact,
            fine_expert_inputs,
            rounded: Activations::default(),
            inner: Activations::default(),
            runs: ExpertRuns::default(),
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
            Op::EmbedChosen { table, ids, out } => {
                elementwise::embed_chosen(host, cpu, table, &ids, &out)
            }
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
            Op::SegmentAttention { .. } => segment_attention::segment_attention(host, cpu, op),
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
            Op::ScatterRows { .. } => elementwise::scatter_rows(host, cpu, op),
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
