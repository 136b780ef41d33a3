//! Checks of an op before a device runs it.

use crate::{
    error::Error,
    handle::{Buffer, Slot, SlotTable, State, Weight},
    matrix::MatrixShape,
    op::Op,
    operands::{Activation, ExpertUses, HeadMatrix, HeadRows, Span, View},
    router::{ExpertGroups, Scoring},
    state::{KV_BLOCK, StateShape},
};

/// Sizes and shapes of a device's objects, by handle. An unknown or dropped handle is an error.
pub trait HandleTable {
    /// Number of values in a buffer.
    fn buffer_len(&self, buffer: Buffer) -> Result<usize, Error>;

    /// Shape of a weight.
    fn matrix_shape(&self, weight: Weight) -> Result<MatrixShape, Error>;

    /// Bytes of a slot. An error while the slot is being filled.
    fn slot_bytes(&self, slot: Slot) -> Result<usize, Error>;

    /// Slots of a table, by expert id.
    fn table(&self, table: SlotTable) -> Result<&[Option<Slot>], Error>;

    /// Shape of a state.
    fn state_shape(&self, state: State) -> Result<StateShape, Error>;
}

/// Error for an unknown or dropped handle.
pub fn stale(what: &str) -> Error {
    Error::Device(format!("a {what} handle that this device did not make, or has dropped"))
}

/// Bound up to which all integers are exact in f32.
pub(super) const EXACT_IDS: usize = 1 << 24;

/// Maximum number of streams of a residual.
pub const MAX_STREAMS: usize = 8;

/// Maximum width of a head of [`Op::SegmentAttention`].
pub const MAX_SEGMENT_WIDTH: usize = 512;

/// Maximum `n` of [`Op::TopLogits`].
pub const MAX_TOP_LOGITS: usize = 1024;

/// Shape of an entry of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvShape {
    pub(super) kv_heads: usize,
    pub(super) key_width: usize,
    pub(super) value_width: usize,
}

impl KvShape {
    /// One head of keys, without values.
    pub(super) const fn keys_only(key_width: usize) -> Self {
        Self { kv_heads: 1, key_width, value_width: 0 }
    }
}

/// Checks of one op. Error messages start with the op's name.
#[derive(Clone, Copy)]
pub(super) struct OpCheck<'a> {
    handles: &'a dyn HandleTable,
    op: &'static str,
}

impl Op<'_> {
    /// Validates shapes, views, spans, states, slots and ids before an op runs. A valid op causes
    /// no further error, except for a NaN among logits.
    #[doc(hidden)]
    pub fn check(&self, handles: &dyn HandleTable) -> Result<(), Error> {
        let c = OpCheck { handles, op: self.name() };
        match *self {
            Op::Embed { table, tokens, out } => {
                let table = handles.matrix_shape(table)?;
                c.vectors("out", &out, tokens.len(), out.heads, table.cols)?;
                match tokens.iter().find(|id| **id as usize >= table.rows) {
                    Some(id) => Err(Error::Token { id: *id, vocab: table.rows }),
                    None => Ok(()),
                }
            }
            Op::EmbedChosen { table, ids, out } => {
                let table = handles.matrix_shape(table)?;
                c.matrix("ids", &ids, out.rows, 1)?;
                c.matrix("out", &out, ids.rows, table.cols)?;
                c.not_written("ids", ids.buffer, &out)?;
                match table.rows {
                    1..=EXACT_IDS => Ok(()),
                    rows => c.wrong(format!("a table of {rows} rows")),
                }
            }
            Op::RmsNorm { x, weight, per_head, out, .. } => {
                c.view("x", &x)?;
                c.same_shape("out", &out, &x)?;
                if let Some(weight) = weight {
                    let heads = if per_head { x.heads } else { 1 };
                    c.buffer("weight", weight, c.product(&[heads, x.width])?)?;
                }
                c.in_place("x", &x, &out)
            }
            Op::LayerNorm { x, weight, bias, out, .. } => {
                c.view("x", &x)?;
                c.same_shape("out", &out, &x)?;
                c.buffer("weight", weight, x.width)?;
                if let Some(bias) = bias {
                    c.buffer("bias", bias, x.width)?;
                }
                c.in_place("x", &x, &out)
            }
            Op::GatedRmsNorm { x, gate, function, weight, out, .. } => {
                c.view("x", &x)?;
                c.same_shape("gate", &gate, &x)?;
                c.same_shape("out", &out, &x)?;
                match function.weights(x.heads, x.width) {
                    Some(weights) => c.buffer("weight", weight, weights)?,
                    None => return c.wrong("more weights than a buffer holds".into()),
                }
                c.in_place("x", &x, &out)?;
                c.not_written("gate", gate.buffer, &out)
            }
            Op::MatMul { x, weight, bias, out, .. } => {
                let shape = handles.matrix_shape(weight)?;
                c.matrix("x", &x, x.rows, shape.cols)?;
                c.matrix("out", &out, x.rows, shape.rows)?;
                if let Some(bias) = bias {
                    c.buffer("bias", bias, shape.rows)?;
                    c.not_written("bias", bias, &out)?;
                }
                c.not_written("x", x.buffer, &out)
            }
            Op::Rope { .. } => self.check_rope(c),
            Op::HeadMatMul { x, matrix, out } => {
                let (inputs, outputs) = c.head_matrix(matrix, x.heads)?;
                c.vectors("x", &x, x.rows, x.heads, inputs)?;
                c.vectors("out", &out, x.rows, x.heads, outputs)?;
                c.not_written("x", x.buffer, &out)
            }
            Op::LatentAttention { q, k, keys, values, spans, out, .. } => {
                let (latent, nope) = c.head_matrix(keys, q.heads)?;
                let (inputs, value) = c.head_matrix(values, q.heads)?;
                if inputs != latent
                    || k.width
                        .checked_sub(latent)
                        .is_none_or(|r| q.width.checked_sub(r) != Some(nope))
                {
                    return c.wrong(format!(
                        "queries of width {} to keys of width {nope} from latents of {latent}, and \
                         values from latents of {inputs}, in {}",
                        q.width, k.width
                    ));
                }
                c.view("q", &q)?;
                c.matrix("k", &k, q.rows, k.width)?;
                c.vectors("out", &out, q.rows, q.heads, value)?;
                c.not_written("q", q.buffer, &out)?;
                c.not_written("k", k.buffer, &out)?;
                c.kv_spans(spans, q.rows, KvShape::keys_only(k.width), None)
            }
            Op::Attention { .. } => self.check_attention(c),
            Op::SegmentAttention { .. } => self.check_segment_attention(c),
            Op::Append { k, v, spans } => {
                c.view("k", &k)?;
                if let Some(v) = v {
                    c.vectors("v", &v, k.rows, k.heads, v.width)?;
                }
                let (key_width, value_width) = (k.width, v.map_or(0, |v| v.width));
                let shape = KvShape { kv_heads: k.heads, key_width, value_width };
                c.kv_spans(spans, k.rows, shape, None)
            }
            Op::TopPositions { .. } => self.check_top_positions(c),
            Op::TopBlocks { .. } => self.check_top_blocks(c),
            Op::Conv1d { x, weight, bias, width, dilation, spans, out, .. } => {
                if width == 0 || dilation == 0 {
                    return c.wrong(format!("{width} taps, dilation {dilation}"));
                }
                c.matrix("x", &x, x.rows, x.width)?;
                c.same_shape("out", &out, &x)?;
                c.buffer("weight", weight, c.product(&[x.width, width])?)?;
                c.not_written("x", x.buffer, &out)?;
                c.not_written("weight", weight, &out)?;
                if let Some(bias) = bias {
                    c.buffer("bias", bias, x.width)?;
                    c.not_written("bias", bias, &out)?;
                }
                c.recurrent_spans(spans, x.rows, c.product(&[width - 1, dilation, x.width])?)
            }
            Op::Compress { x, gate, ape, ratio, overlap, spans, out } => {
                if ratio < 2 {
                    return c.wrong(format!("blocks of {ratio} positions"));
                }
                let parts = 1 + usize::from(overlap);
                c.matrix("x", &x, x.rows, c.product(&[parts, out.width])?)?;
                c.not_written("x", x.buffer, &out)?;
                if let Some(gate) = gate {
                    c.same_shape("gate", &gate, &x)?;
                    c.not_written("gate", gate.buffer, &out)?;
                }
                if let Some(ape) = ape {
                    c.buffer("ape", ape, c.product(&[ratio, x.width])?)?;
                    c.not_written("ape", ape, &out)?;
                    if gate.is_none() {
                        return c.wrong("ape without a gate".into());
                    }
                }
                let row_values = 1 + usize::from(gate.is_some());
                let len = c.product(&[ratio, parts, x.width, row_values])?;
                c.recurrent_spans(spans, x.rows, len)?;
                let entries = spans.iter().map(|span| span.completed_blocks(ratio).len()).sum();
                c.matrix("out", &out, entries, out.width)
            }
            Op::DeltaNet { .. } => self.check_delta_net(c),
            Op::Mamba2 { .. } => self.check_mamba2(c),
            Op::Glu { activation, gate, up, out } => {
                c.activation(activation)?;
                c.matrix("gate", &gate, gate.rows, gate.width)?;
                c.same_shape("up", &up, &gate)?;
                c.same_shape("out", &out, &gate)?;
                match activation.has_gate() {
                    true if gate.buffer == out.buffer && up.buffer == out.buffer => {
                        return c.wrong("gate, up and out in one buffer".into());
                    }
                    false if gate != up => {
                        return c.wrong(format!("a gate for {activation:?}"));
                    }
                    _ => {}
                }
                c.in_place("gate", &gate, &out)?;
                c.in_place("up", &up, &out)
            }
            Op::KeyedGate { q, k, v, out, .. } => {
                c.view("q", &q)?;
                c.same_shape("k", &k, &q)?;
                c.matrix("v", &v, q.rows, q.width)?;
                c.same_shape("out", &out, &q)?;
                let inputs = [("q", q), ("k", k), ("v", v)];
                inputs.iter().try_for_each(|(name, x)| c.not_written(name, x.buffer, &out))
            }
            Op::HeadGate { x, gate, .. } => {
                c.view("x", &x)?;
                let width = if gate.width == 1 { 1 } else { x.width };
                c.vectors("gate", &gate, x.rows, x.heads, width)?;
                c.not_written("gate", gate.buffer, &x)
            }
            Op::Add { x, y } => {
                c.matrix("x", &x, x.rows, x.width)?;
                c.same_shape("y", &y, &x)?;
                c.not_written("y", y.buffer, &x)
            }
            Op::ScatterRows { .. } => self.check_scatter_rows(c),
            Op::Scale { x, .. } | Op::Silu { x } => c.matrix("x", &x, x.rows, x.width),
            Op::StreamWeights { logits, streams, scale, base, iterations, .. } => {
                c.streams(streams)?;
                let all = streams * (streams + 2);
                if ![streams, all].contains(&logits.width) || iterations == 0 {
                    return c.wrong(format!(
                        "{} logits of {streams} streams, {iterations} iterations",
                        logits.width
                    ));
                }
                c.matrix("logits", &logits, logits.rows, logits.width)?;
                c.buffer("scale", scale, if logits.width == all { 3 } else { 1 })?;
                c.buffer("base", base, logits.width)?;
                c.not_written("scale", scale, &logits)?;
                c.not_written("base", base, &logits)
            }
            Op::Collapse { x, weights, out, .. } => {
                c.streams(x.heads)?;
                c.view("x", &x)?;
                c.matrix("out", &out, x.rows, x.width)?;
                if let Some(weights) = weights {
                    let width = if weights.width == 1 { 1 } else { x.width };
                    c.vectors("weights", &weights, x.rows, x.heads, width)?;
                    c.not_written("weights", weights.buffer, &out)?;
                }
                c.not_written("x", x.buffer, &out)
            }
            Op::Expand { x, y, gate, mixing, .. } => {
                c.streams(x.heads)?;
                c.view("x", &x)?;
                if x.head_stride != x.width {
                    return c.wrong("the streams of a row are not contiguous".into());
                }
                c.matrix("y", &y, x.rows, x.width)?;
                c.matrix("gate", &gate, x.rows, x.heads)?;
                c.not_written("y", y.buffer, &x)?;
                c.not_written("gate", gate.buffer, &x)?;
                let Some(mixing) = mixing else { return Ok(()) };
                c.vectors("mixing", &mixing, x.rows, x.heads, x.heads)?;
                c.not_written("mixing", mixing.buffer, &x)
            }
            Op::GatherColumns { x, orders, ids, out } => {
                c.matrix("x", &x, x.rows, x.width)?;
                c.matrix("orders", &orders, orders.rows, x.width)?;
                if orders.rows == 0 || x.width > EXACT_IDS {
                    return c.wrong(format!("{} orders of {} columns", orders.rows, x.width));
                }
                let mut rows = x.rows;
                if let Some(ids) = ids {
                    c.matrix("ids", &ids, x.rows, ids.width)?;
                    c.not_written("ids", ids.buffer, &out)?;
                    rows = c.product(&[x.rows, ids.width])?;
                }
                c.matrix("out", &out, rows, x.width)?;
                c.not_written("x", x.buffer, &out)?;
                c.not_written("orders", orders.buffer, &out)
            }
            Op::SoftCap { x, cap } => {
                if cap.is_nan() || cap <= 0.0 {
                    return c.wrong(format!("a cap of {cap}"));
                }
                c.matrix("x", &x, x.rows, x.width)
            }
            Op::TopK { logits, router, ids, weights } => {
                c.matrix("logits", &logits, logits.rows, logits.width)?;
                c.matrix("ids", &ids, logits.rows, ids.width)?;
                c.matrix("weights", &weights, logits.rows, ids.width)?;
                let Some(k) = ids.width.checked_sub(router.shared_count()).filter(|k| *k > 0)
                else {
                    return c.wrong("no experts are chosen".into());
                };
                if k > logits.width || logits.width > EXACT_IDS {
                    return c.wrong(format!("the {k} largest of {} logits", logits.width));
                }
                if let Some(gate) = router.shared.and_then(|shared| shared.gate) {
                    c.matrix("the shared expert's gate", &gate, logits.rows, 1)?;
                    c.not_written("the shared expert's gate", gate.buffer, &ids)?;
                    c.not_written("the shared expert's gate", gate.buffer, &weights)?;
                }
                for buffer in [router.correction, router.expert_scale].into_iter().flatten() {
                    c.buffer("the router's bias or scale", buffer, logits.width)?;
                    c.not_written("the router's bias or scale", buffer, &ids)?;
                    c.not_written("the router's bias or scale", buffer, &weights)?;
                }
                if let Some(ExpertGroups { count, chosen, .. }) = router.groups {
                    c.divides("groups", count, "experts", logits.width)?;
                    if chosen > count || logits.width / count * chosen < k {
                        return c.wrong(format!(
                            "{k} experts of {chosen} groups of {count} of {}",
                            logits.width
                        ));
                    }
                }
                if let Scoring::SparseMixer { band } = router.scoring
                    && (router.correction.is_some()
                        || router.normalize
                        || !band.is_finite()
                        || band < 0.0)
                {
                    return c.wrong(format!("a sparse mixer of band {band} in {router:?}"));
                }
                if router.given && (router.correction.is_some() || router.groups.is_some()) {
                    return c.wrong(format!("given ids with a correction or groups: {router:?}"));
                }
                c.not_written("logits", logits.buffer, &ids)?;
                c.not_written("logits", logits.buffer, &weights)?;
                c.not_written("ids", ids.buffer, &weights)
            }
            Op::TopLogits { logits, best } => {
                c.matrix("logits", &logits, logits.rows, logits.width)?;
                c.matrix("best", &best, logits.rows, best.width)?;
                let n = best.width / 2;
                if best.width % 2 > 0
                    || n > logits.width.min(MAX_TOP_LOGITS)
                    || logits.width > EXACT_IDS
                {
                    return c.wrong(format!(
                        "ids and values, {} in all, of {} logits",
                        best.width, logits.width
                    ));
                }
                c.not_written("logits", logits.buffer, &best)
            }
            Op::Experts { .. } => self.check_experts(c),
            Op::Combine { parts, weights, shared, out: x, .. } => {
                c.matrix("out", &x, x.rows, x.width)?;
                c.matrix("weights", &weights, x.rows, weights.width)?;
                c.matrix("parts", &parts, c.product(&[x.rows, weights.width])?, x.width)?;
                c.not_written("parts", parts.buffer, &x)?;
                c.not_written("weights", weights.buffer, &x)?;
                if let Some(shared) = shared {
                    c.matrix("shared.out", &shared.out, x.rows, x.width)?;
                    c.not_written("shared.out", shared.out.buffer, &x)?;
                    if let Some(gate) = shared.gate {
                        c.matrix("shared.gate", &gate, x.rows, 1)?;
                        c.not_written("shared.gate", gate.buffer, &x)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn check_experts(&self, c: OpCheck<'_>) -> Result<(), Error> {
        let &Op::Experts { x, shape, activation, experts, uses, inner, out, .. } = self else {
            return Ok(());
        };
        c.activation(activation)?;
        let (hidden, intermediate) = (x.width, inner.width);
        match shape.gate {
            Some(gate) if activation.has_gate() => {
                c.weight_shape("gate", gate, intermediate, hidden)?;
            }
            None if !activation.has_gate() => {}
            gate => return c.wrong(format!("{activation:?} of experts with the gate {gate:?}")),
        }
        c.weight_shape("up", shape.up, intermediate, hidden)?;
        c.weight_shape("down", shape.down, out.width, intermediate)?;
        c.matrix("x", &x, x.rows, hidden)?;
        c.matrix("inner", &inner, inner.rows, intermediate)?;
        c.matrix("out", &out, out.rows, hidden)?;
        c.not_written("x", x.buffer, &inner)?;
        c.not_written("x", x.buffer, &out)?;
        c.not_written("inner", inner.buffer, &out)?;
        if inner.rows < uses.len() {
            return c.wrong(format!("{} uses with {} scratch rows", uses.len(), inner.rows));
        }
        if experts == 0 {
            return c.wrong("no experts".into());
        }
        let bytes = shape.bytes()?;
        let large_enough = |slot: Slot| match c.handles.slot_bytes(slot)? {
            has if has < bytes => {
                c.wrong(format!("a slot of {has} bytes for an expert of {bytes}"))
            }
            _ => Ok(()),
        };
        let uses = match uses {
            ExpertUses::Listed(uses) => uses,
            ExpertUses::Routed { ids, table } => {
                c.matrix("ids", &ids, x.rows, ids.width)?;
                c.not_written("ids", ids.buffer, &inner)?;
                c.not_written("ids", ids.buffer, &out)?;
                if ids.rows * ids.width > out.rows {
                    return c.wrong(format!(
                        "{} outputs in {} rows",
                        ids.rows * ids.width,
                        out.rows
                    ));
                }
                return c
                    .handles
                    .table(table)?
                    .iter()
                    .flatten()
                    .copied()
                    .try_for_each(large_enough);
            }
        };
        for u in uses {
            if u.row >= x.rows || u.out_row >= out.rows {
                return c.wrong(format!(
                    "a use of row {} of {} for output row {} of {}",
                    u.row, x.rows, u.out_row, out.rows
                ));
            }
            large_enough(u.slot)?;
        }
        Ok(())
    }
}

impl OpCheck<'_> {
    /// Checks the number of streams of a residual.
    fn streams(&self, streams: usize) -> Result<(), Error> {
        match streams {
            1..=MAX_STREAMS => Ok(()),
            _ => self.wrong(format!("{streams} streams, not 1 to {MAX_STREAMS}")),
        }
    }

    #[cold]
    pub(super) fn wrong<T>(&self, what: String) -> Result<T, Error> {
        Err(Error::Shape(format!("{}: {what}", self.op)))
    }

    /// Checks the limit of the activation.
    fn activation(&self, activation: Activation) -> Result<(), Error> {
        match activation {
            Activation::ClampedSwiGlu { limit, .. }
            | Activation::ClippedSwiGlu { limit }
            | Activation::LimitedSwiGlu { limit }
                if limit.is_nan() || limit < 0.0 =>
            {
                self.wrong(format!("an activation with the limit {limit}"))
            }
            _ => Ok(()),
        }
    }

    /// Product of dimensions, checked for overflow.
    pub(super) fn product(&self, dimensions: &[usize]) -> Result<usize, Error> {
        match dimensions.iter().try_fold(1usize, |product, n| product.checked_mul(*n)) {
            Some(product) => Ok(product),
            None => self.wrong(format!("dimensions {dimensions:?} that overflow")),
        }
    }

    /// Checks that a view is not empty, is inside its buffer and has no overlapping vectors.
    pub(super) fn view(&self, what: &str, view: &View) -> Result<(), Error> {
        let len = self.handles.buffer_len(view.buffer)?;
        if view.heads == 0 || view.width == 0 {
            return self
                .wrong(format!("{what} is empty: {} heads of width {}", view.heads, view.width));
        }
        if !view.is_within(len) {
            return self
                .wrong(format!("{what} reaches beyond its buffer of {len} values: {view:?}"));
        }
        if !view.is_disjoint() {
            return self.wrong(format!("{what} has vectors that overlap: {view:?}"));
        }
        Ok(())
    }

    /// Checks a view and its rows, heads and width.
    pub(super) fn vectors(
        &self,
        what: &str,
        view: &View,
        rows: usize,
        heads: usize,
        width: usize,
    ) -> Result<(), Error> {
        if (view.rows, view.heads, view.width) != (rows, heads, width) {
            return self.wrong(format!(
                "{what} is ({}, {}, {}) where ({rows}, {heads}, {width}) belongs",
                view.rows, view.heads, view.width
            ));
        }
        self.view(what, view)
    }

    /// Checks a view of one head.
    pub(super) fn matrix(
        &self,
        what: &str,
        view: &View,
        rows: usize,
        width: usize,
    ) -> Result<(), Error> {
        self.vectors(what, view, rows, 1, width)
    }

    /// Checks that a view has the shape of another.
    pub(super) fn same_shape(&self, what: &str, view: &View, other: &View) -> Result<(), Error> {
        self.vectors(what, view, other.rows, other.heads, other.width)
    }

    /// Checks an input that may alias the output: the same view, or another buffer.
    pub(super) fn in_place(&self, what: &str, input: &View, out: &View) -> Result<(), Error> {
        if input.buffer == out.buffer && input != out {
            return self.wrong(format!("{what} and out are different windows of one buffer"));
        }
        Ok(())
    }

    /// Checks that an input is not in a buffer that the op writes.
    pub(super) fn not_written(
        &self,
        what: &str,
        input: Buffer,
        written: &View,
    ) -> Result<(), Error> {
        if input == written.buffer {
            return self.wrong(format!("{what} is in a buffer that the op writes"));
        }
        Ok(())
    }

    pub(super) fn divides(&self, what: &str, n: usize, other: &str, m: usize) -> Result<(), Error> {
        if n == 0 || !m.is_multiple_of(n) {
            return self.wrong(format!("{n} {what} do not divide {m} {other}"));
        }
        Ok(())
    }

    /// Checks that a buffer has at least `len` values.
    pub(super) fn buffer(&self, what: &str, buffer: Buffer, len: usize) -> Result<(), Error> {
        let has = self.handles.buffer_len(buffer)?;
        if has < len {
            return self.wrong(format!("{what} has {has} values where {len} belong"));
        }
        Ok(())
    }

    fn weight_shape(
        &self,
        what: &str,
        shape: MatrixShape,
        rows: usize,
        cols: usize,
    ) -> Result<(), Error> {
        if (shape.rows, shape.cols) != (rows, cols) {
            return self.wrong(format!(
                "{what} is ({}, {}) where ({rows}, {cols}) belongs",
                shape.rows, shape.cols
            ));
        }
        Ok(())
    }

    /// Checks per-head matrices, and returns their inputs and outputs.
    fn head_matrix(&self, matrix: HeadMatrix, heads: usize) -> Result<(usize, usize), Error> {
        let (shape, head_rows) = (self.handles.matrix_shape(matrix.weight)?, matrix.head_rows);
        let HeadRows { stride, first, count } = head_rows;
        if first.checked_add(count).is_none_or(|end| end > stride)
            || self.product(&[heads, stride])? != shape.rows
        {
            return self.wrong(format!("{head_rows:?} of {heads} heads in {} rows", shape.rows));
        }
        Ok(matrix.inputs_outputs(shape.cols))
    }

    /// Checks that spans cover `rows` rows and that no state occurs twice.
    pub(super) fn spans(&self, spans: &[Span], rows: usize) -> Result<(), Error> {
        let covered = spans.iter().try_fold(0usize, |sum, span| {
            span.position.checked_add(span.rows)?;
            sum.checked_add(span.rows)
        });
        if covered != Some(rows) {
            return self.wrong(format!("spans that do not cover the {rows} rows: {spans:?}"));
        }
        for (i, span) in spans.iter().enumerate() {
            if spans[..i].iter().any(|other| other.state == span.state) {
                return self.wrong("two spans of one state".into());
            }
        }
        Ok(())
    }

    /// Checks the shape of a span's KV cache. Returns its capacity in positions.
    pub(super) fn kv_positions(&self, span: &Span, shape: KvShape) -> Result<usize, Error> {
        let StateShape::KeyValue { kv_heads, key_width, value_width, positions } =
            self.handles.state_shape(span.state)?
        else {
            return self.wrong("a recurrent state where a KV cache belongs".into());
        };
        let has = KvShape { kv_heads, key_width, value_width };
        if has != shape {
            return self.wrong(format!("a state of {has:?} for {shape:?}"));
        }
        Ok(positions)
    }

    /// Checks spans of KV caches: shape and capacity.
    pub(super) fn kv_spans(
        &self,
        spans: &[Span],
        rows: usize,
        shape: KvShape,
        window: Option<usize>,
    ) -> Result<(), Error> {
        self.spans(spans, rows)?;
        for span in spans {
            let positions = self.kv_positions(span, shape)?;
            // A ring still holds the window before the first row when the last row is written.
            let wraps = window.is_some_and(|window| {
                positions.is_multiple_of(KV_BLOCK)
                    && window.checked_add(span.rows).is_some_and(|needed| needed <= positions)
            });
            if span.position + span.rows > positions && !wraps {
                return self.wrong(format!(
                    "{} rows at position {} of a state that holds {} positions",
                    span.rows, span.position, positions
                ));
            }
        }
        Ok(())
    }

    /// Checks spans of recurrent states of `len` values.
    pub(super) fn recurrent_spans(
        &self,
        spans: &[Span],
        rows: usize,
        len: usize,
    ) -> Result<(), Error> {
        self.spans(spans, rows)?;
        for span in spans {
            let StateShape::Recurrent { len: has } = self.handles.state_shape(span.state)? else {
                return self.wrong("a KV cache where a recurrent state belongs".into());
            };
            if has != len {
                return self.wrong(format!("a state of {has} values where {len} belong"));
            }
        }
        Ok(())
    }
}

impl View {
    /// Whether all vectors of the view are inside a buffer of `len` values.
    #[doc(hidden)]
    pub fn is_within(&self, len: usize) -> bool {
        if self.rows == 0 || self.heads == 0 {
            return true;
        }
        let last = (self.rows - 1).checked_mul(self.row_stride).and_then(|row| {
            (self.heads - 1)
                .checked_mul(self.head_stride)?
                .checked_add(row)?
                .checked_add(self.offset)
        });
        last.and_then(|last| last.checked_add(self.width)).is_some_and(|end| end <= len)
    }

    /// Whether the elements of the view are contiguous.
    #[doc(hidden)]
    pub const fn is_dense(&self) -> bool {
        (self.heads == 1 || self.head_stride == self.width)
            && (self.rows == 1 || self.row_stride == self.heads * self.width)
    }

    /// Checks that `len` values fill the view without gaps.
    #[doc(hidden)]
    pub fn check_dense(&self, len: usize) -> Result<(), Error> {
        let values = self.rows.checked_mul(self.heads).and_then(|n| n.checked_mul(self.width));
        match self.is_dense() && values == Some(len) {
            true => Ok(()),
            false => Err(Error::Shape(format!("{len} values are not those of {self:?}"))),
        }
    }

    /// Whether no two vectors of the view overlap. The view must be inside a buffer.
    #[doc(hidden)]
    pub fn is_disjoint(&self) -> bool {
        let nested = |(n, inner): (usize, usize), (m, outer): (usize, usize)| {
            (n <= 1 || inner >= self.width)
                && (m <= 1
                    || outer
                        >= n.saturating_sub(1).saturating_mul(inner).saturating_add(self.width))
        };
        let (rows, heads) = ((self.rows, self.row_stride), (self.heads, self.head_stride));
        self.rows == 0 || self.heads == 0 || nested(heads, rows) || nested(rows, heads)
    }
}
