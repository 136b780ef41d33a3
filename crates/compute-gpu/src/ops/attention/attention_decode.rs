//! Attention of a few rows to grouped heads: the decode kernel.

use moeflux_ops::{Error, Op, Span, View};

use super::attention::{KvBinding, KvSplits, THREADS};
use crate::{
    kernel::{Constants, Kernel, kernel},
    ops::{
        context::OpContext,
        qk_norm_rope::{HeadNorm, RopeTable},
    },
    params::{AttentionDecodeParams, ViewParams},
    store::DeviceBuffer,
};

/// Declares a kernel: its name, and its files for sums and for the KV cache.
macro_rules! decode {
    ($name:literal, $sum8:literal, $kv:literal) => {
        kernel!(
            $name,
            "attention/attention_decode",
            AttentionDecodeParams,
            { sum8: $sum8, kv: $kv },
            [Write, Write, Read, Write]
        )
    };
}

pub(crate) static DECODE: Kernel =
    decode!("attention_decode", "attention/sum8_subgroup", "attention/kv_of_sequence");
pub(crate) static DECODE_MEMORY: Kernel =
    decode!("attention_decode memory", "attention/sum8_memory", "attention/kv_of_sequence");
pub(crate) static DECODE_ROWS: Kernel =
    decode!("attention_decode rows", "attention/sum8_subgroup", "attention/kv_of_rows");
pub(crate) static DECODE_ROWS_MEMORY: Kernel =
    decode!("attention_decode rows memory", "attention/sum8_memory", "attention/kv_of_rows");

/// Maximum number of heads of a workgroup.
const MAX_GROUP_HEADS: usize = 8;
/// Query values in workgroup memory.
const MAX_QUERY_VALUES: usize = 2048;
/// Width of the widest keys and values.
const MAX_WIDTH: usize = 512;
/// Widths are multiples of this: rows of the KV cache are aligned to 16 bytes.
const WIDTH_MULTIPLE: usize = 8;

/// Positions of a block: `BLOCK` in the kernel.
const BLOCK: usize = 32;

/// Most bytes of workgroup memory of the kernel for a tile of `heads` heads: its arrays with f32 in
/// the KV cache, and without subgroups the values that threads exchange.
const fn workgroup_bytes(heads: usize, k_width: usize, v_width: usize, subgroups: bool) -> usize {
    let queries = (heads + 1) * k_width;
    let scores = heads * (BLOCK + 4) + heads * BLOCK + heads * BLOCK / 4 + 2 * heads;
    let partial_values = 4 * THREADS * heads.div_ceil(2);
    let exchanged = if subgroups { THREADS / 4 } else { THREADS * 8 + THREADS };
    4 * (queries + v_width + scores + partial_values + exchanged)
}

/// KV caches of the rows of a dispatch.
#[derive(Clone, Copy)]
pub(crate) enum DecodeKv<'a> {
    /// Of one sequence.
    Sequence(&'a KvBinding),
    /// A sequence for each row, in one arena. Their table is at the splits' position.
    Rows(&'a DeviceBuffer),
}

/// Keys and values that are not in the KV cache yet, of one row or of a row for each sequence.
pub(crate) struct NewKv {
    pub(crate) k: View,
    pub(crate) v: View,
    /// Norms of queries and of keys.
    pub(crate) norms: [Option<HeadNorm>; 2],
    pub(crate) rope: Option<RopeTable>,
    /// Whether RoPE pairs are interleaved.
    pub(crate) interleaved: bool,
}

impl NewKv {
    /// Keys and values without norms and RoPE.
    pub(crate) fn new(k: View, v: View) -> Self {
        Self { k, v, norms: [None; 2], rope: None, interleaved: false }
    }
}

/// Tiling of the decode kernel.
pub(crate) struct DecodeKernel {
    /// Maximum number of heads of a workgroup.
    heads: usize,
    /// Workgroups for one KV split of a row.
    pub(crate) tiles: usize,
    /// Threads that share a key.
    key_threads: usize,
    subgroups: bool,
}

impl DecodeKernel {
    /// Tiling for [`Op::Attention`], with as many heads as fit into workgroup memory; `None` if the
    /// general kernel is needed.
    pub(crate) fn for_op(ctx: &OpContext<'_>, op: &Op<'_>) -> Option<Self> {
        let &Op::Attention { q, k, v: Some(_), positions: None, out, .. } = op else { return None };
        let fits = |width: usize| width.is_multiple_of(WIDTH_MULTIPLE) && width <= MAX_WIDTH;
        if !fits(k.width) || !fits(out.width) {
            return None;
        }
        let group = q.heads / k.heads;
        let target = ctx.target();
        let vectors = k.width / (4 << ctx.kv_half());
        let key_threads = vectors.next_power_of_two().clamp(8, 32);
        let subgroups = target.subgroups && target.team as usize >= key_threads;
        let memory = |heads| workgroup_bytes(heads, k.width, out.width, subgroups);
        let limit = ctx.workgroup_bytes() as usize;
        let most = (MAX_QUERY_VALUES / k.width).min(MAX_GROUP_HEADS);
        let most = (1..=most).rev().find(|heads| memory(*heads) <= limit)?;
        let tiles = group.div_ceil(most);
        let heads = group.div_ceil(tiles);
        Some(Self { heads, tiles: k.heads * tiles, key_threads, subgroups })
    }

    /// Whether the kernel can append the row of a span to the KV cache.
    pub(crate) fn accepts_new_kv(ctx: &OpContext<'_>, op: &Op<'_>, span: &Span) -> bool {
        // The kernel reads at least one older position.
        let older = span.position > 0 && !matches!(op, Op::Attention { window: Some(1), .. });
        span.rows == 1 && older && Self::for_op(ctx, op).is_some()
    }

    /// Encodes rows whose positions have the same number of splits.
    pub(crate) fn encode(
        &self,
        ctx: &mut OpContext<'_>,
        kv: DecodeKv<'_>,
        splits: &KvSplits,
        op: &Op<'_>,
        new_kv: Option<&NewKv>,
    ) -> Result<(), Error> {
        let &Op::Attention { q, k, gate, scale, out, .. } = op else { return Ok(()) };
        let (first_row, rows) = (splits.first_row, splits.rows);
        let slice = |view: View| view.slice(first_row, rows);
        let (q, out) = (slice(q), slice(out));
        let gate_view = gate.map_or(out, slice);
        let unused = NewKv::new(k.slice(first_row, 1), k.slice(first_row, 1));
        let append = new_kv.is_some();
        let new_kv = new_kv.unwrap_or(&unused);
        let store = &*ctx.store;
        let [q_norm, k_norm] = new_kv.norms;
        let (pairs, angles) = new_kv.rope.map_or((0, 0), |rope| (rope.pairs, rope.offset));
        let (table, capacity, v_offset) = match kv {
            DecodeKv::Sequence(kv) => (angles, kv.positions as u32, kv.values),
            DecodeKv::Rows(_) => (splits.position as u32, 0, 0),
        };
        let params = AttentionDecodeParams {
            q: ViewParams::new(store, &q)?,
            out: ViewParams::new(store, &out)?,
            gate: ViewParams::new(store, &gate_view)?,
            k: store.view_offset(&new_kv.k)?,
            k_head_stride: new_kv.k.head_stride as u32,
            v: store.view_offset(&new_kv.v)?,
            v_head_stride: new_kv.v.head_stride as u32,
            rows: rows as u32,
            splits: splits.params(),
            capacity,
            v_offset,
            sinks: splits.sinks,
            gated: gate.is_some().into(),
            scale,
            q_weight: store.optional_offset(HeadNorm::weight(q_norm))?,
            q_eps: q_norm.map_or(0.0, |norm| norm.eps),
            k_weight: store.optional_offset(HeadNorm::weight(k_norm))?,
            k_eps: k_norm.map_or(0.0, |norm| norm.eps),
            table,
        };
        let constants = Constants::new(&[
            ("WG", THREADS as u32),
            ("KV_F16", ctx.kv_half()),
            ("K_WIDTH", k.width as u32),
            ("V_WIDTH", out.width as u32),
            ("KV_HEADS", k.heads as u32),
            ("GROUP_HEADS", (q.heads / k.heads) as u32),
            ("TILE_HEADS", self.heads as u32),
            ("KEY_THREADS", self.key_threads as u32),
            ("V_COLUMNS", (out.width / 2).next_power_of_two().max(16) as u32),
            ("SINGLE_SPLIT", (splits.count == 1).into()),
            ("NEW_KV", append.into()),
            ("Q_NORM", HeadNorm::code(q_norm)),
            ("K_NORM", HeadNorm::code(k_norm)),
            ("ROPE_PAIRS", pairs as u32),
            ("INTERLEAVED", new_kv.interleaved.into()),
        ]);
        let upload = ctx.recorder.upload_buffer().clone();
        let groups = rows * self.tiles * splits.count;
        let (activations, scratch) = (store.activations(), &splits.scratch);
        let (kernels, kv) = match kv {
            DecodeKv::Sequence(kv) => ([&DECODE_MEMORY, &DECODE], &kv.buffer),
            DecodeKv::Rows(arena) => ([&DECODE_ROWS_MEMORY, &DECODE_ROWS], arena),
        };
        let kernel = kernels[usize::from(self.subgroups)];
        let buffers = [activations, kv, &upload, scratch];
        ctx.recorder.dispatch(kernel, &constants, &buffers, &params, groups)
    }
}
