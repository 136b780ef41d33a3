//! Fusing rules of query and key heads: norm, RoPE, KV append and attention.

use moeflux_ops::{BATCH_INVARIANT_ROWS, Buffer, Error, Op, RopePairs, View};

use crate::{
    ops::{
        OpContext,
        attention::{
            self,
            attention_decode::{DecodeKernel, NewKv},
            rows::{SpanRows, accepts_row, accepts_rows, encode_rows},
        },
        qk_norm_rope::{HeadNorm, KvAppend, MAX_HEAD_WIDTH, QkHeads, RopeTable},
    },
    recorder::UPLOAD_WORDS,
};

/// Fuses an op with pending norms and RoPE; false if it must be encoded alone, after them.
/// [`Op::Attention`] encodes the pending heads; other fused ops are added to them.
pub(super) fn fuse_heads(
    ctx: &mut OpContext<'_>,
    heads: &mut QkHeads,
    op: &Op<'_>,
) -> Result<bool, Error> {
    match *op {
        Op::RmsNorm { x, weight, per_head: false, eps, out } if x == out => {
            Ok(fuse_norm(heads, x, weight, eps))
        }
        Op::Rope { x, frequencies, pairs, scale, positions, out }
            if x == out && x.width <= MAX_HEAD_WIDTH && pairs != RopePairs::SplitHalves =>
        {
            let interleaved = pairs == RopePairs::Interleaved;
            let even = x.width.is_multiple_of(2);
            if !even || heads.interleaved.is_some_and(|i| i != interleaved) {
                return Ok(false);
            }
            // Reserving upload space may submit the tables that pending heads use.
            let table_words = frequencies.len() * x.rows * 2;
            // Alone, positions of several axes take several tables.
            if table_words > UPLOAD_WORDS {
                return Ok(false);
            }
            if heads.sets.iter().any(|set| set.rope.is_some())
                && !ctx.recorder.has_upload_room(table_words)
            {
                return Ok(false);
            }
            let Some(set) = heads.entry(x).filter(|set| set.rope.is_none()) else {
                return Ok(false);
            };
            let offset = ctx.recorder.angle_table(frequencies, scale, positions)?;
            set.rope = Some(RopeTable { pairs: frequencies.len(), offset });
            heads.interleaved = Some(interleaved);
            Ok(true)
        }
        Op::Attention { q, k, v: Some(v), spans, .. } => {
            let even = v.width.is_multiple_of(2) && k.width.is_multiple_of(2);
            let [queries, keys] = heads.sets[..] else { return Ok(false) };
            if keys.view != k || !even || v.width > MAX_HEAD_WIDTH {
                return Ok(false);
            }
            let new_kv = NewKv {
                norms: [queries.norm, keys.norm],
                rope: queries.rope,
                interleaved: heads.interleaved.unwrap_or(false),
                ..NewKv::new(k, v)
            };
            // Not on the exact path: a row must have the same bits as in a batch.
            let in_attention = !ctx.exact && queries.view == q && queries.rope == keys.rope;
            if in_attention && accepts_rows(ctx, op, spans) {
                encode_rows(ctx, op, &SpanRows::all(spans), Some(&new_kv))?;
                return Ok(true);
            }
            // A few rows of a sequence have the bits of single ones: each reads the rows before it
            // from the KV cache.
            let single = SpanRows::single(spans);
            let each_alone = |row: &SpanRows| accepts_row(ctx, op, row);
            if in_attention && k.rows <= BATCH_INVARIANT_ROWS && single.iter().all(each_alone) {
                for row in &single {
                    encode_rows(ctx, op, std::slice::from_ref(row), Some(&new_kv))?;
                }
                return Ok(true);
            }
            let &[span] = spans else { return Ok(false) };
            let kv = attention::bind_kv(ctx, span.state)?;
            let rows = SpanRows { span, first_row: 0 };
            if in_attention && DecodeKernel::accepts_new_kv(ctx, op, &span) {
                attention::encode_sequence(ctx, &kv, rows, op, Some(&new_kv))?;
            } else {
                heads.encode_with_append(ctx, Some(KvAppend { v, span }))?;
                attention::encode_spans(ctx, op, &[rows])?;
            }
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Adds a norm in place to pending heads; false if it must be encoded alone.
fn fuse_norm(heads: &mut QkHeads, x: View, weight: Option<Buffer>, eps: f32) -> bool {
    if x.width > MAX_HEAD_WIDTH || !x.width.is_multiple_of(2) {
        return false;
    }
    match heads.entry(x) {
        Some(set) if set.norm.is_none() && set.rope.is_none() => {
            set.norm = Some(HeadNorm { weight, eps });
            true
        }
        _ => false,
    }
}
