//! Recurrent ops: causal convolution, means of blocks, gated delta rule and the recurrence of
//! Mamba-2. They read the committed state and write the next one.

use moeflux_ops::{Buffer, Error, KeySharing, LogDecay, NormGate, Op, Span, View, seam::SpanPart};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{CompressParams, Conv1dParams, DeltaNetParams, Mamba2Params, ViewParams},
    },
    context::OpContext,
    gemv::HeadNormPrologue,
    norm::{NormDispatch, NormKind},
};
use crate::store::DeviceBuffer;

pub(crate) static CONV1D: Kernel =
    kernel!("conv1d", "recurrent/conv1d", Conv1dParams, [Write, Write, Write, Read]);
pub(crate) static COMPRESS: Kernel =
    kernel!("compress", "recurrent/compress", CompressParams, [Write, Write, Write, Read]);
pub(crate) static DELTA_NET: Kernel = kernel!(
    "delta_net",
    "recurrent/delta_net",
    DeltaNetParams,
    { convolution: "recurrent/delta_no_conv", states: "recurrent/states_of_sequence" },
    [Write, Write, Write]
);
/// The same for several sequences.
pub(crate) static DELTA_NET_SPANS: Kernel = kernel!(
    "delta_net spans",
    "recurrent/delta_net",
    DeltaNetParams,
    { convolution: "recurrent/delta_no_conv", states: "recurrent/states_of_spans" },
    [Write, Write, Write, Read]
);
/// Delta rule that computes the convolution of its inputs.
pub(crate) static DELTA_NET_CONV: Kernel = kernel!(
    "delta_net_conv",
    "recurrent/delta_net",
    DeltaNetParams,
    {
        convolution: "recurrent/delta_conv",
        states: "recurrent/states_of_sequence",
        inputs: "recurrent/inputs_of_sequence",
    },
    [Write, Write, Write, Write, Write]
);
/// The same for a row of each of several sequences.
pub(crate) static DELTA_NET_CONV_ROWS: Kernel = kernel!(
    "delta_net_conv rows",
    "recurrent/delta_net",
    DeltaNetParams,
    {
        convolution: "recurrent/delta_conv",
        states: "recurrent/states_of_rows",
        inputs: "recurrent/states_of_rows",
    },
    [Write, Write, Write, Write, Write, Read]
);

pub(crate) static MAMBA2: Kernel = kernel!(
    "mamba2",
    "recurrent/mamba2",
    Mamba2Params,
    { states: "recurrent/states_of_sequence" },
    [Write, Write, Write]
);
/// The same for several sequences.
pub(crate) static MAMBA2_SPANS: Kernel = kernel!(
    "mamba2 spans",
    "recurrent/mamba2",
    Mamba2Params,
    { states: "recurrent/states_of_spans" },
    [Write, Write, Write, Read]
);

const CONV_THREADS: usize = 256;
/// Words of a sequence in the table of `recurrent/conv1d.wgsl`.
const CONV_SEQUENCE_WORDS: usize = 5;
/// Words of a sequence in the table of `recurrent/compress.wgsl`.
const COMPRESS_SEQUENCE_WORDS: usize = 8;
/// Threads of a workgroup of the delta rule.
const DELTA_THREADS: usize = 128;
/// Maximum number of threads that share a row of the state.
const MAX_ROW_THREADS: usize = 8;
/// Rows of the state per thread group.
const ROWS_PER_THREAD: usize = 2;
/// Bytes of queries and keys in workgroup memory, unless one row has more.
const STAGED_BYTES: usize = 16 << 10;

/// [`Op::Conv1d`] with SiLU, without a bias or dilation, and one row per part of a span.
pub(crate) struct DecodeConv {
    x: View,
    weight: Buffer,
    width: usize,
    spans: Vec<Span>,
    out: View,
}

impl DecodeConv {
    /// `None` unless it has SiLU, no bias and no dilation, and every part of a span has one row.
    pub(crate) fn from_op(op: &Op<'_>) -> Option<Box<Self>> {
        match *op {
            Op::Conv1d {
                x,
                weight,
                bias: None,
                width: width @ 2..,
                dilation: 1,
                silu: true,
                spans,
                out,
            } if has_single_rows(spans) => {
                Some(Box::new(Self { x, weight, width, spans: spans.to_vec(), out }))
            }
            _ => None,
        }
    }

    /// Whether the queries, keys and values of a delta rule are its whole output, each channel
    /// once.
    fn feeds(&self, op: &Op<'_>) -> bool {
        let &Op::DeltaNet { q, k, v, a, b, spans, out: delta_out, .. } = op else { return false };
        let &Self { x, out, .. } = self;
        let (keys, values) = (k.heads * k.width, v.heads * v.width);
        let columns = |first, width, heads| out.columns(first, width).split(heads);
        spans.len() == self.spans.len()
            && has_single_rows(spans)
            && out.width == 2 * keys + values
            && q == columns(0, keys, q.heads)
            && k == columns(keys, keys, k.heads)
            && v == columns(2 * keys, values, v.heads)
            && [a, b].iter().all(|view| view.buffer != out.buffer)
            && [out, delta_out].iter().all(|view| view.buffer != x.buffer)
    }

    /// Encodes it as a separate dispatch.
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        let &Self { x, weight, width, ref spans, out } = self;
        let bias = None;
        let op = Op::Conv1d { x, weight, bias, width, dilation: 1, silu: true, spans, out };
        encode_conv1d(ctx, &op)
    }
}

/// Whether every part of the spans has one row.
fn has_single_rows(spans: &[Span]) -> bool {
    spans.iter().flat_map(|span| span.parts()).all(|part| part.span.rows == 1)
}

/// Encodes [`Op::Conv1d`].
pub(super) fn encode_conv1d(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Conv1d { x, weight, bias, width, dilation, silu, spans, out } = op else {
        return Ok(());
    };
    let constants = Constants::new(&[
        ("WG", CONV_THREADS as u32),
        ("TAPS", width as u32),
        ("DILATION", dilation as u32),
        ("SILU", silu.into()),
        ("BIASED", bias.is_some().into()),
    ]);
    let mut rest = &SequenceStates::of_spans(ctx, spans, None)?[..];
    while let Some(first) = rest.first() {
        let (run, others) = rest.split_at(first.run(ctx, &rest[1..]));
        rest = others;
        let mut table = Vec::with_capacity(run.len() * CONV_SEQUENCE_WORDS);
        let mut groups = 0;
        for sequence in run {
            let [first_group, first_row, rows] =
                [groups, sequence.first_row, sequence.span.rows].map(|value| value as u32);
            table.push(first_group);
            table.extend(sequence.starts());
            table.extend([first_row, rows]);
            groups +=
                ((sequence.span.rows + (width - 1) * dilation) * x.width).div_ceil(CONV_THREADS);
        }
        ctx.recorder.reserve_upload(table.len())?;
        let params = Conv1dParams {
            x: ViewParams::new(ctx.store, &x)?,
            out: ViewParams::new(ctx.store, &out)?,
            weight: ctx.store.buffer_offset(weight)?,
            bias: ctx.store.optional_offset(bias)?,
            channels: x.width as u32,
            table: ctx.recorder.upload(table),
            sequences: run.len() as u32,
        };
        let upload = ctx.recorder.upload_buffer().clone();
        let arenas = first.arenas(ctx);
        let buffers: Vec<_> =
            [ctx.store.activations()].into_iter().chain(&arenas).chain([&upload]).collect();
        ctx.recorder.dispatch(&CONV1D, &constants, &buffers, &params, groups)?;
    }
    Ok(())
}

/// Encodes [`Op::Compress`].
pub(super) fn encode_compress(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Compress { x, gate, ape, ratio, overlap, spans, out } = op else { return Ok(()) };
    let constants = Constants::new(&[
        ("WG", CONV_THREADS as u32),
        ("RATIO", ratio as u32),
        ("OVERLAP", overlap.into()),
        ("GATED", gate.is_some().into()),
        ("APE", ape.is_some().into()),
    ]);
    let slots = if overlap { 2 * ratio } else { ratio };
    let state_len = slots * x.width * (1 + usize::from(gate.is_some()));
    let mut rest = &SequenceStates::of_spans(ctx, spans, None)?[..];
    let mut entry = 0;
    while let Some(first) = rest.first() {
        let (run, others) = rest.split_at(first.run(ctx, &rest[1..]));
        rest = others;
        let mut table = Vec::with_capacity(run.len() * COMPRESS_SEQUENCE_WORDS);
        let mut groups = 0;
        for sequence in run {
            let span = sequence.span;
            // It still has a block before it.
            let position = match span.position < 2 * slots {
                true => span.position,
                false => span.position % slots + slots,
            };
            let entries = span.completed_blocks(ratio).len();
            table.push(groups as u32);
            table.extend(sequence.starts());
            let rows = [sequence.first_row, span.rows, position, entry, entries];
            table.extend(rows.map(|value| value as u32));
            groups += (entries * out.width + state_len).div_ceil(CONV_THREADS);
            entry += entries;
        }
        ctx.recorder.reserve_upload(table.len())?;
        let params = CompressParams {
            x: ViewParams::new(ctx.store, &x)?,
            gate: ViewParams::new(ctx.store, &gate.unwrap_or(x))?,
            out: ViewParams::new(ctx.store, &out)?,
            ape: ctx.store.optional_offset(ape)?,
            width: out.width as u32,
            table: ctx.recorder.upload(table),
            sequences: run.len() as u32,
        };
        let upload = ctx.recorder.upload_buffer().clone();
        let arenas = first.arenas(ctx);
        let buffers: Vec<_> =
            [ctx.store.activations()].into_iter().chain(&arenas).chain([&upload]).collect();
        ctx.recorder.dispatch(&COMPRESS, &constants, &buffers, &params, groups)?;
    }
    Ok(())
}

/// [`Op::DeltaNet`] with one row per state that reads the output of a convolution, optionally
/// followed by [`Op::GatedRmsNorm`].
pub(crate) struct ConvolvedDeltaRule {
    convolution: Box<DecodeConv>,
    /// Queries, keys, values, decay, write strength.
    inputs: [View; 5],
    a_log: Buffer,
    dt_bias: Buffer,
    decay: LogDecay,
    sharing: KeySharing,
    spans: Vec<Span>,
    out: View,
    norm: Option<GatedNormEpilogue>,
}

/// Gated norm of the output of a delta rule.
#[derive(Clone, Copy)]
pub(crate) struct GatedNormEpilogue {
    gate: View,
    function: NormGate,
    weight: Buffer,
    eps: f32,
    out: View,
}

impl ConvolvedDeltaRule {
    /// Returns the convolution if it does not feed the op.
    pub(crate) fn from_op(
        op: &Op<'_>,
        convolution: Box<DecodeConv>,
    ) -> Result<Box<Self>, Box<DecodeConv>> {
        match *op {
            Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, decay, sharing, spans, out }
                if convolution.feeds(op) =>
            {
                Ok(Box::new(Self {
                    convolution,
                    inputs: [q, k, v, a, b],
                    a_log,
                    dt_bias,
                    decay,
                    sharing,
                    spans: spans.to_vec(),
                    out,
                    norm: None,
                }))
            }
            _ => Err(convolution),
        }
    }

    /// Adds the gated norm of the output; false if it cannot be fused.
    pub(crate) fn fuse_norm(&mut self, op: &Op<'_>) -> bool {
        let &Op::GatedRmsNorm { x, gate, function, weight, eps, out } = op else { return false };
        let is_dense_row = |view: View| view.heads == 1 || view.head_stride == view.width;
        // Some workgroups write the norm's output while others still read the inputs.
        let [.., a, b] = self.inputs;
        let read = [x, gate, self.convolution.x, a, b];
        let fits = self.norm.is_none()
            && function != NormGate::SiluBeforeNorm
            && x == self.out
            && [x, gate, out].into_iter().all(is_dense_row)
            && read.iter().all(|view| view.buffer != out.buffer)
            && gate.buffer != x.buffer;
        if fits {
            self.norm = Some(GatedNormEpilogue { gate, function, weight, eps, out });
        }
        fits
    }

    /// Prologue of a product that divides heads by their root mean square in place of this kernel;
    /// `None` without a norm.
    pub(crate) fn head_norm(&self, ctx: &OpContext<'_>) -> Option<HeadNormPrologue> {
        let GatedNormEpilogue { eps, out, .. } = self.norm?;
        let count = workgroups_per_head(ctx, self.out.width);
        Some(HeadNormPrologue { heads: out, sums: self.out, count, eps })
    }

    /// Encodes it, with the complete norm.
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        self.encode_rule(ctx, None)?;
        match self.norm {
            Some(GatedNormEpilogue { gate, function, weight, eps, out }) => NormDispatch {
                kind: NormKind::GatedRms(function),
                x: self.out,
                out,
                operand: Some(gate),
                weight: Some(weight),
                per_head: false,
                bias: None,
                eps,
            }
            .encode(ctx),
            None => Ok(()),
        }
    }

    /// Encodes it with the norm's weight and gate. The division is left to the prologue of
    /// [`ConvolvedDeltaRule::head_norm`].
    pub(crate) fn encode_without_division(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        self.encode_rule(ctx, self.norm.as_ref())
    }

    fn encode_rule(
        &self,
        ctx: &mut OpContext<'_>,
        norm: Option<&GatedNormEpilogue>,
    ) -> Result<(), Error> {
        let &Self { inputs: [q, k, v, a, b], a_log, dt_bias, decay, sharing, out, .. } = self;
        let spans = &self.spans[..];
        let op = Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, decay, sharing, spans, out };
        let fused = FusedDeltaOps { convolution: &self.convolution, norm };
        encode_delta_net(ctx, &op, Some(fused))
    }
}

/// Threads that share a row of the state.
fn row_threads(ctx: &OpContext<'_>) -> usize {
    MAX_ROW_THREADS.min(ctx.target().team as usize)
}

/// Workgroups of a head with `values` values.
fn workgroups_per_head(ctx: &OpContext<'_>, values: usize) -> usize {
    values.div_ceil(ROWS_PER_THREAD * DELTA_THREADS / row_threads(ctx))
}

/// `GATED` of the kernel. A gate before the norm is not fused.
const fn norm_gate_code(gate: NormGate) -> u32 {
    match gate {
        NormGate::SiluBeforeNorm => 0,
        NormGate::Silu => 1,
        NormGate::Sigmoid => 2,
    }
}

/// Ops fused with a delta rule.
#[derive(Clone, Copy)]
pub(super) struct FusedDeltaOps<'a> {
    /// Computes queries, keys and values.
    convolution: &'a DecodeConv,
    /// Weight and gate of the output's norm.
    norm: Option<&'a GatedNormEpilogue>,
}

/// Encodes [`Op::DeltaNet`].
pub(super) fn encode_delta_net(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
    fused: Option<FusedDeltaOps<'_>>,
) -> Result<(), Error> {
    let &Op::DeltaNet { q, k, v, a, b, a_log, dt_bias, decay, sharing, spans, out } = op else {
        return Ok(());
    };
    let row_threads = row_threads(ctx);
    let convolution = fused.map(|fused| fused.convolution);
    let norm = fused.and_then(|fused| fused.norm);
    // A query, a key and perhaps its decays in f32.
    let has_key_decays = a.width > 1;
    let row_vectors = 2 + usize::from(has_key_decays);
    let row_bytes = k.width.next_multiple_of(4 * row_threads) * 4 * row_vectors;
    if row_bytes > 2 * STAGED_BYTES {
        return Err(Error::Shape(format!(
            "DeltaNet: keys of {} elements are too wide for a GPU",
            k.width
        )));
    }
    let mut rows = DELTA_THREADS / row_threads;
    while rows > 1 && rows * row_bytes > STAGED_BYTES {
        rows /= 2;
    }
    let constants = Constants::new(&[
        ("WG", DELTA_THREADS as u32),
        ("ROW_THREADS", row_threads as u32),
        ("THREAD_ROWS", ROWS_PER_THREAD as u32),
        ("STAGED_ROWS", rows as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", v.width as u32),
        ("TAPS", convolution.map_or(0, |c| c.width as u32)),
        ("GATED", norm.map_or(0, |norm| norm_gate_code(norm.function))),
        ("KEY_DECAYS", has_key_decays.into()),
        ("BOUNDED", matches!(decay, LogDecay::Bounded { .. }).into()),
        ("HEADS", v.heads as u32),
        ("KEY_HEADS", k.heads as u32),
        ("KEY_RUN", sharing.run(v.heads, k.heads) as u32),
    ]);
    let groups = v.heads * workgroups_per_head(ctx, v.width);
    let mut rest = &SequenceStates::of_spans(ctx, spans, convolution)?[..];
    while let Some(first) = rest.first() {
        let (run, others) = rest.split_at(first.run(ctx, &rest[1..]));
        rest = others;
        let sequences = run.len();
        let first_row = first.first_row;
        let rows = run.iter().map(|sequence| sequence.span.rows).sum();
        let store = &*ctx.store;
        // Input of the convolution at the columns of a view of its output.
        let conv_input = |view: View| match convolution {
            Some(c) => View {
                buffer: c.x.buffer,
                offset: c.x.offset + view.offset - c.out.offset,
                row_stride: c.x.row_stride,
                ..view
            },
            None => view,
        };
        let dst = norm.map_or(out, |norm| norm.out);
        let view = |view: View| ViewParams::new(store, &view.slice(first_row, rows));
        let row_offset = |view: View| store.view_offset(&view.slice(first_row, rows));
        let mut params = DeltaNetParams {
            q: view(conv_input(q))?,
            k: view(conv_input(k))?,
            v: view(conv_input(v))?,
            alpha: view(a)?,
            beta: view(b)?,
            out: view(dst)?,
            a_log: store.buffer_offset(a_log)?,
            dt_bias: store.buffer_offset(dt_bias)?,
            rows: if sequences > 1 { sequences } else { rows } as u32,
            bound: match decay {
                LogDecay::Softplus => 0.0,
                LogDecay::Bounded { bound } => bound,
            },
            q_scale: 1.0 / (k.width as f32).sqrt(),
            ..Default::default()
        };
        if let Some(c) = convolution {
            params.conv_x = row_offset(c.x)?;
            params.conv_weight = store.buffer_offset(c.weight)?;
            params.channels = c.x.width as u32;
        }
        if let Some(norm) = norm {
            params.gate = row_offset(norm.gate)?;
            params.gate_row_stride = norm.gate.row_stride as u32;
            params.norm_weight = store.buffer_offset(norm.weight)?;
            params.squares = row_offset(out)?;
            params.squares_row_stride = out.row_stride as u32;
        }
        let kernel = match (convolution, sequences) {
            (None, 1) => &DELTA_NET,
            (None, _) => &DELTA_NET_SPANS,
            (Some(_), 1) => &DELTA_NET_CONV,
            (Some(_), _) => &DELTA_NET_CONV_ROWS,
        };
        let activations = ctx.store.activations();
        if sequences > 1 {
            let mut table = Vec::new();
            for sequence in run {
                table.extend(sequence.starts());
                if convolution.is_none() {
                    let rows = [sequence.first_row - first_row, sequence.span.rows];
                    table.extend(rows.map(|value| value as u32));
                }
            }
            ctx.recorder.reserve_upload(table.len())?;
            params.table = ctx.recorder.upload(table);
            let upload = ctx.recorder.upload_buffer().clone();
            let arenas = first.arenas(ctx);
            let buffers: Vec<_> =
                [activations].into_iter().chain(&arenas).chain([&upload]).collect();
            ctx.recorder.dispatch(kernel, &constants, &buffers, &params, groups * sequences)?;
        } else {
            let buffers: Vec<_> = [activations].into_iter().chain(&first.states).collect();
            ctx.recorder.dispatch(kernel, &constants, &buffers, &params, groups)?;
        }
    }
    Ok(())
}

/// Encodes [`Op::Mamba2`].
pub(super) fn encode_mamba2(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Mamba2 { x, b, c, dt, a_log, d, dt_bias, limits, spans, out } = op else {
        return Ok(());
    };
    let row_threads = row_threads(ctx);
    // An element of `b` and one of `c`, in f32.
    let row_bytes = b.width.next_multiple_of(4 * row_threads) * 4 * 2;
    if row_bytes > 2 * STAGED_BYTES {
        return Err(Error::Shape(format!(
            "Mamba2: states of width {} are too wide for a GPU",
            b.width
        )));
    }
    let mut rows = DELTA_THREADS / row_threads;
    while rows > 1 && rows * row_bytes > STAGED_BYTES {
        rows /= 2;
    }
    let constants = Constants::new(&[
        ("WG", DELTA_THREADS as u32),
        ("ROW_THREADS", row_threads as u32),
        ("STAGED_ROWS", rows as u32),
        ("K_WIDTH", b.width as u32),
        ("V_WIDTH", x.width as u32),
        ("HEADS", x.heads as u32),
        ("GROUP_HEADS", (x.heads / b.heads) as u32),
    ]);
    let groups = x.heads * workgroups_per_head(ctx, x.width);
    let mut rest = &SequenceStates::of_spans(ctx, spans, None)?[..];
    while let Some(first) = rest.first() {
        let (run, others) = rest.split_at(first.run(ctx, &rest[1..]));
        rest = others;
        let (sequences, first_row) = (run.len(), first.first_row);
        let rows = run.iter().map(|sequence| sequence.span.rows).sum();
        let store = &*ctx.store;
        let view = |view: View| ViewParams::new(store, &view.slice(first_row, rows));
        let mut params = Mamba2Params {
            x: view(x)?,
            b: view(b)?,
            c: view(c)?,
            dt: view(dt)?,
            out: view(out)?,
            a_log: store.buffer_offset(a_log)?,
            d: store.buffer_offset(d)?,
            dt_bias: store.buffer_offset(dt_bias)?,
            rows: if sequences > 1 { sequences } else { rows } as u32,
            table: 0,
            min_step: limits.min,
            // Metal's fast math does not support infinity.
            max_step: limits.max.min(f32::MAX),
        };
        let activations = ctx.store.activations();
        if sequences > 1 {
            let mut table = Vec::new();
            for sequence in run {
                table.extend(sequence.starts());
                let rows = [sequence.first_row - first_row, sequence.span.rows];
                table.extend(rows.map(|value| value as u32));
            }
            ctx.recorder.reserve_upload(table.len())?;
            params.table = ctx.recorder.upload(table);
            let upload = ctx.recorder.upload_buffer().clone();
            let arenas = first.arenas(ctx);
            let buffers: Vec<_> =
                [activations].into_iter().chain(&arenas).chain([&upload]).collect();
            let groups = groups * sequences;
            ctx.recorder.dispatch(&MAMBA2_SPANS, &constants, &buffers, &params, groups)?;
        } else {
            let buffers: Vec<_> = [activations].into_iter().chain(&first.states).collect();
            ctx.recorder.dispatch(&MAMBA2, &constants, &buffers, &params, groups)?;
        }
    }
    Ok(())
}

/// Recurrent states of a part of a span, and its rows in an op.
struct SequenceStates {
    first_row: usize,
    span: Span,
    /// Whether another part of the span comes before it.
    follows: bool,
    /// Committed and next state; of a delta rule with a convolution, then those of the convolution.
    states: Vec<DeviceBuffer>,
}

impl SequenceStates {
    /// Marks the states of spans as written. Parts of the spans of a fused convolution have the
    /// same indices.
    fn of_spans(
        ctx: &mut OpContext<'_>,
        spans: &[Span],
        convolution: Option<&DecodeConv>,
    ) -> Result<Vec<Self>, Error> {
        let mut all = Vec::with_capacity(spans.len());
        let mut first_row = 0;
        for (i, span) in spans.iter().enumerate() {
            for SpanPart { span, index } in span.parts() {
                let mut states = ctx.store.write_recurrent(span.state, index)?.to_vec();
                if let Some(span) = convolution.and_then(|convolution| convolution.spans.get(i)) {
                    states.extend(ctx.store.write_recurrent(span.state, index)?);
                }
                all.push(Self { first_row, span, follows: index > 0, states });
                first_row += span.rows;
            }
        }
        Ok(all)
    }

    /// Arena of each state.
    fn arenas(&self, ctx: &OpContext<'_>) -> Vec<DeviceBuffer> {
        let arena = |state: &DeviceBuffer| ctx.store.states.arena(state).unwrap_or(state).clone();
        self.states.iter().map(arena).collect()
    }

    /// Number of parts that share a dispatch: this one, and those at the start of `others` that
    /// follow no other part and whose states are in the same arenas.
    fn run(&self, ctx: &OpContext<'_>, others: &[Self]) -> usize {
        let shares = |other: &&Self| {
            let pairs = self.states.iter().zip(&other.states);
            pairs.into_iter().all(|(a, b)| a.raw == b.raw)
        };
        let in_arenas = self.states.iter().all(|state| ctx.store.states.arena(state).is_some());
        let joins = |other: &&Self| in_arenas && !other.follows && shares(other);
        1 + others.iter().take_while(joins).count()
    }

    /// Starts of the states in their arenas, in f32 values.
    fn starts(&self) -> impl Iterator<Item = u32> {
        self.states.iter().map(|state| (state.start / 4) as u32)
    }
}
