//! Ops that wait to be fused with the next one.

use moeflux_ops::{BATCH_INVARIANT_ROWS, Error, Op, View};

use super::{
    super::ops::{
        OpContext, elementwise,
        gemv::{self, DownProjection, ExpertSum, GemvProduct, NormPrologue, Prologue},
        matmul, moe,
        norm::{NormDispatch, NormKind},
        qk_norm_rope::QkHeads,
        recurrent::{ConvolvedDeltaRule, DecodeConv},
        topk::RouterTopK,
    },
    heads,
};

/// Pending op or ops.
#[derive(Default)]
enum PendingOp {
    #[default]
    None,
    /// Norm of a few rows. Products sum the squares in another order than a separate norm, so only
    /// on the fast path.
    Norm(NormPrologue),
    /// Products of a few rows with matrices of one format, and the prologue of the first.
    Products(Option<Prologue>, Vec<GemvProduct>),
    /// `x += y`.
    Add { x: View, y: View },
    /// Router top-k of a few rows.
    Router(Box<RouterTopK>),
    /// Down projection of experts.
    Down(Box<DownProjection>),
    /// Norms and RoPE in place.
    Heads(QkHeads),
    /// Convolution, on the fast path: a delta rule that reads its output computes it itself.
    Conv(Box<DecodeConv>),
    /// Delta rule that reads the pending convolution's output, optionally followed by a gated norm.
    DeltaRule(Box<ConvolvedDeltaRule>),
}

/// Fusing rules and the pending op.
#[derive(Default)]
pub(crate) struct Fuser {
    pending: PendingOp,
}

impl Fuser {
    /// Tries to fuse `op` with the pending op, or to make it the pending one. Returns false if it
    /// must be encoded alone; the pending op is flushed then.
    pub(crate) fn fuse(&mut self, ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<bool, Error> {
        if self.fuse_pending(ctx, op)? {
            return Ok(true);
        }
        self.flush(ctx)?;
        self.pending = match *op {
            Op::MatMul { .. } => match matmul::gemv_product(ctx, op)? {
                Some(product) => PendingOp::Products(None, vec![product]),
                None => return Ok(false),
            },
            Op::Add { x, y } => PendingOp::Add { x, y },
            Op::Conv1d { .. } if !ctx.exact => match DecodeConv::from_op(op) {
                Some(convolution) => PendingOp::Conv(convolution),
                None => return Ok(false),
            },
            Op::TopK { logits, .. } if logits.rows <= BATCH_INVARIANT_ROWS => {
                match RouterTopK::from_op(op) {
                    Some(router) => PendingOp::Router(Box::new(router)),
                    None => return Ok(false),
                }
            }
            Op::RmsNorm { x, weight: Some(weight), per_head: false, eps, out }
                if !ctx.exact && x.heads == 1 && x.buffer != out.buffer =>
            {
                PendingOp::Norm(NormPrologue { x, weight, eps, out })
            }
            Op::RmsNorm { .. } | Op::Rope { .. } => {
                self.pending = PendingOp::Heads(QkHeads::default());
                let fused = self.fuse_pending(ctx, op)?;
                if !fused {
                    self.pending = PendingOp::None;
                }
                return Ok(fused);
            }
            _ => return Ok(false),
        };
        Ok(true)
    }

    /// Makes a down projection pending.
    pub(crate) fn hold_down(&mut self, down: Box<DownProjection>) {
        self.pending = PendingOp::Down(down);
    }

    /// Drops the pending op without encoding it.
    pub(crate) fn clear(&mut self) {
        self.pending = PendingOp::None;
    }

    /// Fuses `op` with the pending op; false if they cannot be fused.
    fn fuse_pending(&mut self, ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<bool, Error> {
        match (std::mem::take(&mut self.pending), op) {
            (PendingOp::Norm(norm), Op::MatMul { .. }) => {
                let product = matmul::gemv_product(ctx, op)?;
                match product.filter(|product| product.accepts_norm(ctx, &norm)) {
                    Some(product) => {
                        let prologue = Some(Prologue::Norm(norm));
                        self.pending = PendingOp::Products(prologue, vec![product]);
                        Ok(true)
                    }
                    None => {
                        self.pending = PendingOp::Norm(norm);
                        Ok(false)
                    }
                }
            }
            (PendingOp::Products(prologue, mut products), Op::MatMul { .. }) => {
                let fused = match matmul::gemv_product(ctx, op)? {
                    Some(product)
                        if product.can_share(ctx, &products)
                            && !matches!(prologue, Some(Prologue::HeadNorm(_))) =>
                    {
                        products.push(product);
                        true
                    }
                    _ => false,
                };
                self.pending = PendingOp::Products(prologue, products);
                Ok(fused)
            }
            (PendingOp::Products(prologue, products), &Op::Glu { activation, gate, up, out }) => {
                if !gemv::is_glu(&products, [gate, up]) {
                    self.pending = PendingOp::Products(prologue, products);
                    return Ok(false);
                }
                if let Some(Prologue::Norm(norm)) = prologue {
                    norm.encode(ctx)?;
                }
                gemv::encode_glu(ctx, &products, activation, out)?;
                Ok(true)
            }
            (PendingOp::Products(prologue, products), &Op::Add { x, y }) => {
                if products.len() == 1 && products[0].accepts_residual(prologue.as_ref(), x, y) {
                    gemv::encode_products(ctx, prologue.as_ref(), &products, Some(x))?;
                    return Ok(true);
                }
                self.pending = PendingOp::Products(prologue, products);
                Ok(false)
            }
            (PendingOp::Router(router), Op::Experts { .. }) => {
                if let Some(down) = moe::encode(ctx, op, Some(&router))? {
                    self.hold_down(down);
                }
                Ok(true)
            }
            (PendingOp::Down(down), &Op::Combine { parts, weights, shared, add: true, out })
                if down.accepts_sum(parts, out)
                    && shared.is_none_or(|s| s.out.buffer != out.buffer) =>
            {
                down.encode_with_sum(ctx, ExpertSum { weights, shared, out })?;
                Ok(true)
            }
            (
                PendingOp::Add { x, y },
                &Op::RmsNorm { x: normed, weight: Some(weight), per_head: false, eps, out },
            ) if normed == x && out.buffer != x.buffer => {
                NormDispatch {
                    kind: NormKind::AddRms,
                    x,
                    out,
                    operand: Some(y),
                    weight: Some(weight),
                    per_head: false,
                    bias: None,
                    eps,
                }
                .encode(ctx)?;
                Ok(true)
            }
            (PendingOp::Conv(convolution), Op::DeltaNet { .. }) => {
                let rule = ConvolvedDeltaRule::from_op(op, convolution);
                let fused = rule.is_ok();
                self.pending = rule.map_or_else(PendingOp::Conv, PendingOp::DeltaRule);
                Ok(fused)
            }
            (PendingOp::DeltaRule(mut rule), Op::GatedRmsNorm { .. }) => {
                let fused = rule.fuse_norm(op);
                self.pending = PendingOp::DeltaRule(rule);
                Ok(fused)
            }
            (PendingOp::DeltaRule(rule), Op::MatMul { .. }) => {
                let product = match rule.head_norm(ctx) {
                    Some(norm) => matmul::gemv_product(ctx, op)?
                        .filter(|product| product.accepts_head_norm(ctx, &norm))
                        .zip(Some(norm)),
                    None => None,
                };
                let Some((product, norm)) = product else {
                    self.pending = PendingOp::DeltaRule(rule);
                    return Ok(false);
                };
                rule.encode_without_division(ctx)?;
                let prologue = Some(Prologue::HeadNorm(norm));
                self.pending = PendingOp::Products(prologue, vec![product]);
                Ok(true)
            }
            (PendingOp::Heads(mut heads), op) => {
                let fused = heads::fuse_heads(ctx, &mut heads, op)?;
                if !fused || !matches!(op, Op::Attention { .. }) {
                    self.pending = PendingOp::Heads(heads);
                }
                Ok(fused)
            }
            (pending, _) => {
                self.pending = pending;
                Ok(false)
            }
        }
    }

    /// Encodes the pending op.
    pub(crate) fn flush(&mut self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        match std::mem::take(&mut self.pending) {
            PendingOp::None => Ok(()),
            PendingOp::Norm(norm) => norm.encode(ctx),
            PendingOp::Products(prologue, products) => {
                gemv::encode_products(ctx, prologue.as_ref(), &products, None)
            }
            PendingOp::Add { x, y } => elementwise::encode(ctx, &Op::Add { x, y }),
            PendingOp::Router(router) => router.encode(ctx),
            PendingOp::Down(down) => down.encode(ctx),
            PendingOp::Heads(heads) => heads.encode(ctx),
            PendingOp::Conv(convolution) => convolution.encode(ctx),
            PendingOp::DeltaRule(rule) => rule.encode(ctx),
        }
    }
}
