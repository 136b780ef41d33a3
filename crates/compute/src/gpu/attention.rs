//! Attention: appending keys and values to states, and the form that splits a row's positions over workgroups.

use super::{
    Constants, GpuDevice, Kernel, Memory, Params,
    attention_decode::{Decode, NewKv},
    kernel,
};
use crate::{Device, Error, KV_BLOCK, KvFormat, Op, Span, State, View};

pub(in crate::gpu) static APPEND: Kernel =
    kernel!("append_kv", "attention/append_kv", [Write, Write]);
pub(in crate::gpu) static ATTENTION: Kernel =
    kernel!("attention_split", "attention/attention_split", [Write, Read, Write]);
pub(in crate::gpu) static TILES: Kernel =
    kernel!("attention_tiled", "attention/attention_tiled", [Write, Read]);
pub(in crate::gpu) static COOPERATIVE: Kernel =
    kernel!("attention_cooperative", "attention/attention_cooperative", [Write, Read]);
pub(in crate::gpu) static MERGE: Kernel =
    kernel!("merge_splits", "attention/merge_splits", [Write, Read]);
/// Columns of a workgroup that joins parts, and its threads.
const MERGED: usize = 32;
const MERGING: usize = 256;

/// Threads of a workgroup.
pub(super) const THREADS: usize = 256;
/// What stands for "none" among the parameters.
pub(super) const NONE: u32 = u32::MAX;
/// Most heads of a workgroup: they read the same keys and values.
pub(super) const MAX_HEADS: usize = 16;
/// Most pairs of sums that a thread keeps.
const MAX_SUMS: usize = 32;
/// Most parts that the positions of a row are split into.
const MAX_SPLITS: usize = 64;
/// Workgroups that the fast path aims at for one row of a long context: they fill the largest cards.
const WORKGROUPS: usize = 512;
/// Positions that the fast path does not split, at most: joining parts takes longer than a second block.
const ALONE: usize = 64;
/// Positions of a part on the fast path, at least.
const MIN_SPLIT: usize = 32;
/// Numbers of scratch that rows share: those that need more run one after another.
const SCRATCH: usize = 8 << 20;
/// Rows from which on the fast path takes several at a time.
const TILED_ROWS: usize = 16;
/// Queries and values of a workgroup that takes several rows: numbers of which its threads keep 64 each.
const TILE_NUMBERS: usize = 64 * 256;
/// Queries of a workgroup whose subgroups multiply matrices together, and what it needs of workgroup memory.
const COOPERATIVE_QUERIES: usize = 128;
const COOPERATIVE_BYTES: u32 = 48 << 10;
/// Positions above this are brought down by the length of a state that wraps around.
const HIGH: usize = 1 << 30;

/// Keys and values of a state.
#[derive(Clone)]
pub(super) struct KeyValues {
    pub(super) memory: Memory,
    /// Number at which values begin.
    pub(super) values: u32,
    pub(super) positions: usize,
}

impl GpuDevice {
    pub(super) fn key_values(&self, state: State) -> Result<KeyValues, Error> {
        let (memory, values, positions) = self.piece(state)?;
        Ok(KeyValues { memory, values, positions })
    }

    /// One where keys and values are kept as f16, two of them in a word.
    pub(super) fn half(&self) -> u32 {
        (self.kv_format() == KvFormat::F16).into()
    }

    /// Writes a span's rows of keys and values, which begin at row `first` of the op, at their positions.
    pub(super) fn append(
        &mut self,
        kv: &KeyValues,
        (span, first): (&Span, usize),
        (k, v): (&View, Option<&View>),
    ) -> Result<(), Error> {
        let per = 1 + self.half() as usize;
        let mut from = 0;
        while from < span.rows {
            let place = (span.position + from) % kv.positions;
            let rows = (span.rows - from).min(kv.positions - place);
            // Words that some numbers of a state touch.
            let words = |base: usize, width: usize| {
                let first = base + place * k.heads * width;
                (first + rows * k.heads * width).div_ceil(per) - first / per
            };
            let of_keys = words(0, k.width);
            let of_values = v.map_or(0, |v| words(kv.values as usize, v.width));
            let k = k.slice(first + from, rows);
            let v = v.map_or(k, |v| v.slice(first + from, rows));
            let params = Params::new()
                .view(self.store.place(&k)?, &k)
                .view(self.store.place(&v)?, &v)
                .n(k.heads)
                .n(k.width)
                .n(v.width)
                .n(rows)
                .n(place)
                .u(kv.values)
                .n(of_keys)
                .n(of_keys + of_values);
            let constants = Constants::new(&[("WG", THREADS as u32), ("KV_F16", self.half())]);
            let groups = (of_keys + of_values).div_ceil(THREADS);
            self.dispatch(&APPEND, constants, &[&self.activations(), &kv.memory], &params, groups)?;
            from += rows;
        }
        Ok(())
    }
}

/// Runs [`Op::Attention`].
pub(super) fn attention(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Attention { k, v, spans, .. } = op else { return Ok(()) };
    let mut first = 0;
    for span in spans.iter().filter(|span| span.rows > 0) {
        let kv = gpu.key_values(span.state)?;
        match v {
            Some(v) if Decode::takes(gpu, op, span) => {
                let own = NewKv::new(k.slice(first, 1), v.slice(first, 1));
                attend(gpu, &kv, (span, first), op, Some(&own))?;
            }
            _ => {
                gpu.append(&kv, (span, first), (&k, v.as_ref()))?;
                attend_span(gpu, &kv, (span, first), op)?;
            }
        }
        first += span.rows;
    }
    Ok(())
}

/// Attends from the rows of one span, whose keys and values lie in the state already.
pub(super) fn attend_span(
    gpu: &mut GpuDevice,
    kv: &KeyValues,
    (span, first): (&Span, usize),
    op: &Op<'_>,
) -> Result<(), Error> {
    match !gpu.exact && span.rows >= TILED_ROWS {
        true => attend_tiled(gpu, kv, (span, first), op),
        false => attend(gpu, kv, (span, first), op, None),
    }
}

/// A position that lies where `position` does, within 32 bits.
const fn low(position: usize, kv: &KeyValues) -> usize {
    match position > HIGH {
        true => position % kv.positions + kv.positions,
        false => position,
    }
}

/// Attends from the rows of one span, several of them in a workgroup: keys and values are read once for all of its queries.
/// A row's bits do not depend on the other rows, but differ from those of [`attend`]. Queries and weights are rounded to f16
/// where matrices are multiplied in hardware.
pub(super) fn attend_tiled(
    gpu: &mut GpuDevice,
    kv: &KeyValues,
    (span, first): (&Span, usize),
    op: &Op<'_>,
) -> Result<(), Error> {
    let &Op::Attention { q, k, v, gate, scale, window, sinks, positions, out, .. } = op else {
        return Ok(());
    };
    let width = out.width.next_multiple_of(64);
    if positions.is_some() || width * 16 > TILE_NUMBERS {
        return attend(gpu, kv, (span, first), op, None);
    }
    let (kernel, queries, threads) = match cooperates(gpu, kv, op) {
        true => (&COOPERATIVE, COOPERATIVE_QUERIES, 2 * COOPERATIVE_QUERIES),
        false => (&TILES, 1 << (TILE_NUMBERS / width).clamp(16, 64).ilog2(), THREADS),
    };
    let group = q.heads / k.heads;
    let tiles = (span.rows * group).div_ceil(queries);
    let part = |view: View| view.slice(first, span.rows);
    let (q, out) = (part(q), part(out));
    let gate_view = gate.map_or(out, part);
    let params = Params::new()
        .view(gpu.store.place(&q)?, &q)
        .view(gpu.store.place(&out)?, &out)
        .view(gpu.store.place(&gate_view)?, &gate_view)
        .n(span.rows)
        .n(low(span.position, kv))
        .n(window.unwrap_or(usize::MAX).min(HIGH * 2))
        .n(q.heads)
        .n(group)
        .n(kv.positions)
        .u(kv.values)
        .u(sinks.map(|sinks| gpu.store.start(sinks)).transpose()?.unwrap_or(NONE))
        .u(gate.is_some().into())
        .f(scale)
        .n(tiles);
    let constants = Constants::new(&[
        ("WG", threads as u32),
        ("KV_F16", gpu.half()),
        ("QUERIES", queries as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", out.width as u32),
        ("LATENT", v.is_none().into()),
    ]);
    gpu.dispatch(kernel, constants, &[&gpu.activations(), &kv.memory], &params, tiles * k.heads)
}

/// Whether subgroups multiply the op's queries and keys together as matrices: [`COOPERATIVE`].
fn cooperates(gpu: &GpuDevice, kv: &KeyValues, op: &Op<'_>) -> bool {
    let &Op::Attention { k, v: Some(_), out, .. } = op else { return false };
    let target = gpu.target();
    let whole = |width: usize| width.is_multiple_of(16) && width <= 128;
    target.cooperative
        && target.team == 32
        && gpu.limits.max_compute_workgroup_storage_size >= COOPERATIVE_BYTES
        && gpu.half() == 1
        && kv.values.is_multiple_of(4)
        && whole(k.width)
        && whole(out.width)
}

/// How a row's positions are split, as `attention_splits.wgsl` has it.
#[derive(Clone, Copy)]
pub(super) struct Splits {
    window: usize,
    /// Positions that are not split, at most.
    alone: usize,
    /// Positions of a part, at least.
    least: usize,
    /// Parts, at most.
    most: usize,
}

impl Splits {
    fn count(self, position: usize) -> usize {
        let seen = self.window.min(position + 1);
        if seen <= self.alone {
            return 1;
        }
        let of_split = seen.div_ceil(self.most).next_multiple_of(MIN_SPLIT).max(self.least);
        seen.div_ceil(of_split)
    }

    pub(super) fn params(self, params: Params, position: usize, splits: usize) -> Params {
        params.n(position).n(self.window).n(self.alone).n(self.least).n(self.most).n(splits)
    }
}

/// How heads and columns lie in workgroups.
struct Shape {
    /// Heads of a workgroup at most; a power of two.
    heads: usize,
    /// Workgroups for the heads that share keys.
    tiles: usize,
    /// Pairs of columns side by side.
    columns: usize,
}

impl Shape {
    /// For `group` heads that share keys, and values of `value` numbers.
    fn new(group: usize, value: usize) -> Self {
        let pairs = value.div_ceil(2);
        let columns = pairs.next_power_of_two().clamp(16, THREADS);
        let most = (MAX_SUMS / pairs.div_ceil(columns)).clamp(1, MAX_HEADS);
        let tiles = group.div_ceil(1 << most.ilog2());
        Self { heads: group.div_ceil(tiles).next_power_of_two(), tiles, columns }
    }
}

/// Attends from the rows of one span to its keys and values. Of one row, they may be on their way to the state.
pub(super) fn attend(
    gpu: &mut GpuDevice,
    kv: &KeyValues,
    (span, first): (&Span, usize),
    op: &Op<'_>,
    own: Option<&NewKv>,
) -> Result<(), Error> {
    let &Op::Attention { q, k, gate, window, sinks, positions, out, .. } = op else {
        return Ok(());
    };
    let decode = Decode::of(gpu, op);
    let shape = Shape::new(q.heads / k.heads, out.width);
    let tiles = decode.as_ref().map_or(k.heads * shape.tiles, |decode| decode.tiles);
    let window = positions.map_or(window.unwrap_or(usize::MAX), |list| list.width).min(HIGH * 2);
    let splits = match gpu.exact {
        true => Splits { window, alone: KV_BLOCK, least: KV_BLOCK, most: MAX_SPLITS },
        false => Splits {
            window,
            alone: ALONE,
            least: MIN_SPLIT,
            most: (WORKGROUPS / tiles).clamp(8, MAX_SPLITS),
        },
    };
    let position = low(span.position, kv);
    let sinks = sinks.map(|sinks| gpu.store.start(sinks)).transpose()?.unwrap_or(NONE);
    let mut from = 0;
    while from < span.rows {
        // As many rows as have room for their parts.
        let most = splits.count(position + span.rows - 1);
        let room = SCRATCH / (q.heads * most * (out.width + 2));
        let rows = room.clamp(1, span.rows - from);
        let at = position + from;
        let n = splits.count(at + rows - 1);
        let parts = Parts {
            rows: (first + from, rows),
            position: at,
            splits,
            n,
            sinks,
            scratch: gpu.scratch(if n == 1 { 1 } else { rows * q.heads * n * (out.width + 2) })?,
        };
        match &decode {
            Some(decode) => decode.run(gpu, kv, &parts, op, own)?,
            None => run(gpu, kv, &parts, op, &shape)?,
        }
        if n > 1 {
            let part = |view: View| view.slice(first + from, rows);
            merge(gpu, &parts, (part(out), gate.map(part)))?;
        }
        from += rows;
    }
    Ok(())
}

/// Rows of an op whose positions are split alike.
pub(super) struct Parts {
    /// The first, and how many.
    pub(super) rows: (usize, usize),
    /// Where the first row lies.
    pub(super) position: usize,
    pub(super) splits: Splits,
    /// Parts of the row that has most.
    pub(super) n: usize,
    /// Where sinks begin among the activations, or [`NONE`].
    pub(super) sinks: u32,
    /// What parts leave to be joined.
    pub(super) scratch: Memory,
}

/// Attends with any widths, by name, and to latents.
fn run(
    gpu: &mut GpuDevice,
    kv: &KeyValues,
    parts: &Parts,
    op: &Op<'_>,
    shape: &Shape,
) -> Result<(), Error> {
    let &Op::Attention { q, k, v, gate, scale, positions, out, .. } = op else { return Ok(()) };
    let (first, rows) = parts.rows;
    let group = q.heads / k.heads;
    let part = |view: View| view.slice(first, rows);
    let (q, out) = (part(q), part(out));
    let (gate_view, list) = (gate.map_or(out, part), positions.map_or(out, part));
    let store = &gpu.store;
    let params = Params::new()
        .view(store.place(&q)?, &q)
        .view(store.place(&out)?, &out)
        .view(store.place(&gate_view)?, &gate_view)
        .view(store.place(&list)?, &list)
        .n(rows);
    let params = parts
        .splits
        .params(params, parts.position, parts.n)
        .n(q.heads)
        .n(group)
        .n(shape.tiles)
        .n(kv.positions)
        .u(kv.values)
        .u(parts.sinks)
        .u(gate.is_some().into())
        .f(scale);
    let constants = Constants::new(&[
        ("WG", THREADS as u32),
        ("KV_F16", gpu.half()),
        ("TILE_HEADS", shape.heads as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", out.width as u32),
        ("LATENT", v.is_none().into()),
        ("LISTED", positions.is_some().into()),
        ("V_COLUMNS", shape.columns as u32),
        ("SINGLE_SPLIT", (parts.n == 1).into()),
    ]);
    let buffers = [&gpu.activations(), &kv.memory, &parts.scratch];
    gpu.dispatch(&ATTENTION, constants, &buffers, &params, rows * k.heads * shape.tiles * parts.n)
}

/// Joins what parts have left.
fn merge(
    gpu: &mut GpuDevice,
    parts: &Parts,
    (out, gate): (View, Option<View>),
) -> Result<(), Error> {
    let gate_view = gate.unwrap_or(out);
    let params = Params::new()
        .view(gpu.store.place(&out)?, &out)
        .view(gpu.store.place(&gate_view)?, &gate_view)
        .n(out.rows);
    let columns = out.width.div_ceil(MERGED);
    let params = parts
        .splits
        .params(params, parts.position, parts.n)
        .n(out.heads)
        .n(out.width)
        .n(columns)
        .u(parts.sinks)
        .u(gate.is_some().into());
    let most = parts.splits.most.next_multiple_of(MERGING / MERGED);
    let constants = Constants::new(&[("WG", MERGING as u32), ("MAX_SPLITS", most as u32)]);
    let buffers = [&gpu.activations(), &parts.scratch];
    gpu.dispatch(&MERGE, constants, &buffers, &params, out.rows * out.heads * columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernel::{Target, tests::valid};

    #[test]
    fn cooperative_attention_is_valid() {
        let target = Target { team: 32, subgroups: true, dot8: true, f16: true, cooperative: true };
        for (key, value) in [(128, 128), (16, 112), (96, 64)] {
            let constants = Constants::new(&[
                ("WG", 2 * COOPERATIVE_QUERIES as u32),
                ("KV_F16", 1),
                ("QUERIES", COOPERATIVE_QUERIES as u32),
                ("K_WIDTH", key),
                ("V_WIDTH", value),
                ("LATENT", 0),
            ]);
            valid(&target.text(&COOPERATIVE, &constants), COOPERATIVE_BYTES);
        }
    }
}
