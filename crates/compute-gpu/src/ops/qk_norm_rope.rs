//! Norm and RoPE of query and key heads in place, with an optional append to the KV cache.

use moeflux_ops::{Buffer, Error, Span, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{HeadSetParams, QkNormRopeParams, ViewParams},
        store::Store,
    },
    attention,
    context::OpContext,
};

pub(crate) static QK_NORM_ROPE: Kernel =
    kernel!("qk_norm_rope", "attention/qk_norm_rope", QkNormRopeParams, [Write, Read, Write]);

/// Width of the widest head whose norm can be fused with RoPE.
pub(crate) const MAX_HEAD_WIDTH: usize = 512;

/// RMSNorm of heads.
#[derive(Clone, Copy)]
pub(crate) struct HeadNorm {
    pub(crate) weight: Option<Buffer>,
    pub(crate) eps: f32,
}

impl HeadNorm {
    /// Code in kernels: 0 for no norm, 1 without a weight, 2 with a weight.
    pub(super) fn code(norm: Option<Self>) -> u32 {
        norm.map_or(0, |norm| 1 + u32::from(norm.weight.is_some()))
    }

    /// Weight of an optional norm.
    pub(super) fn weight(norm: Option<Self>) -> Option<Buffer> {
        norm.and_then(|norm| norm.weight)
    }
}

/// RoPE table in the upload buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RopeTable {
    /// Number of rotated pairs of a head.
    pub(crate) pairs: usize,
    /// Offset in words.
    pub(crate) offset: u32,
}

/// Heads that are normed and rotated in place.
#[derive(Clone, Copy)]
pub(crate) struct HeadSet {
    pub(crate) view: View,
    pub(crate) norm: Option<HeadNorm>,
    pub(crate) rope: Option<RopeTable>,
}

impl HeadSet {
    fn params(&self, store: &Store) -> Result<HeadSetParams, Error> {
        let &Self { view, norm, rope } = self;
        Ok(HeadSetParams {
            view: ViewParams::new(store, &view)?,
            heads: view.heads as u32,
            width: view.width as u32,
            weight: store.optional_offset(HeadNorm::weight(norm))?,
            eps: norm.map_or(1.0, |norm| norm.eps),
            pairs: rope.map_or(0, |rope| rope.pairs as u32),
            table: rope.map_or(0, |rope| rope.offset),
        })
    }
}

/// Up to two sets of heads with the same rows: queries, then keys.
#[derive(Default)]
pub(crate) struct QkHeads {
    pub(crate) sets: Vec<HeadSet>,
    /// Whether RoPE pairs are interleaved; `None` without RoPE.
    pub(crate) interleaved: Option<bool>,
}

/// Append of one span's keys, the second set of heads, and values to the KV cache.
#[derive(Clone, Copy)]
pub(crate) struct KvAppend {
    pub(crate) v: View,
    pub(crate) span: Span,
}

impl QkHeads {
    /// Set of a view, added if it is new; `None` if it cannot be added.
    pub(crate) fn entry(&mut self, view: View) -> Option<&mut HeadSet> {
        if let Some(i) = self.sets.iter().position(|set| set.view == view) {
            return self.sets.get_mut(i);
        }
        let compatible =
            |set: &HeadSet| set.view.rows == view.rows && set.view.buffer != view.buffer;
        if self.sets.len() >= 2 || !self.sets.iter().all(compatible) {
            return None;
        }
        self.sets.push(HeadSet { view, norm: None, rope: None });
        self.sets.last_mut()
    }

    /// Encodes the norms and RoPE, if there are any.
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        match self.sets.is_empty() {
            true => Ok(()),
            false => self.encode_with_append(ctx, None),
        }
    }

    /// Encodes the norms and RoPE of at least one set, and an append to the KV cache.
    pub(crate) fn encode_with_append(
        &self,
        ctx: &mut OpContext<'_>,
        append: Option<KvAppend>,
    ) -> Result<(), Error> {
        let first = self.sets[0];
        let second = self.sets.get(1).copied();
        let store = &*ctx.store;
        // A missing second set has no heads.
        let second_heads = second.map_or(0, |set| set.view.heads);
        let kv = append.map(|append| attention::bind_kv(ctx, append.span.state)).transpose()?;
        let v = append.map_or(first.view, |append| append.v);
        let position = append.map_or(0, |append| append.span.position);
        let positions = kv.as_ref().map_or(1, |kv| kv.positions);
        let params = QkNormRopeParams {
            q: first.params(store)?,
            k: HeadSetParams {
                heads: second_heads as u32,
                ..second.unwrap_or(first).params(store)?
            },
            v: ViewParams::new(store, &v)?,
            rows: first.view.rows as u32,
            position: (position % positions) as u32,
            capacity: positions as u32,
            v_offset: kv.as_ref().map_or(0, |kv| kv.values),
            v_width: v.width as u32,
        };
        let team = ctx.target().team;
        let threads = team * 4;
        let max_width = first.view.width.max(second.map_or(0, |set| set.view.width)).max(v.width);
        let constants = Constants::new(&[
            ("WG", threads),
            ("MAX_WIDTH", max_width as u32),
            ("Q_NORM", HeadNorm::code(first.norm)),
            ("K_NORM", HeadNorm::code(second.and_then(|set| set.norm))),
            ("INTERLEAVED", self.interleaved.unwrap_or(false).into()),
            ("KV_F16", ctx.kv_half()),
            ("APPEND", append.is_some().into()),
        ]);
        let heads_per_row = first.view.heads + second_heads * (1 + usize::from(append.is_some()));
        let groups = (first.view.rows * heads_per_row).div_ceil((threads / team) as usize);
        let upload = ctx.recorder.upload_buffer().clone();
        // Without an append the state is not written; the report buffer is bound in its place.
        let state = kv.map_or_else(|| ctx.recorder.report().clone(), |kv| kv.buffer);
        let buffers = [store.activations(), &upload, &state];
        ctx.recorder.dispatch(&QK_NORM_ROPE, &constants, &buffers, &params, groups)
    }
}
