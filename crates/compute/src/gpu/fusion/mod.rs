//! Ops that wait for the next one, to share a dispatch with it.
//!
//! A dispatch that depends on the one before costs some microseconds whatever it does, and a token has hundreds. So the
//! device holds back what may be joined: a norm and the products that meet it, a product and its sum with the residual
//! stream, the choice of experts and their first stage, their last stage and the sum of them, a sum and the norm that follows
//! it, norms and rotations of heads and the keys' way into their state, a convolution, the delta rule that takes what it
//! yields, and the norm of what that yields. Whatever else comes settles what waits first. Whether
//! ops join depends on nothing but their sequence.

use crate::gpu::{
    GpuDevice, elementwise, experts,
    heads::Heads,
    matvec::{self, Down, Norm, Product, Prologue},
    norm,
    recurrent::{Convolution, Rule},
    tiled,
    topk::Ranked,
};
use crate::{Error, Op, View};

/// What waits.
#[derive(Default)]
pub(in crate::gpu) enum Pending {
    #[default]
    Nothing,
    /// The norm of few rows. Products sum their squares in another order than a norm by itself, so not on the exact path.
    Norm(Norm),
    /// Products of few rows, of which one may be normed on its way, with matrices of one format.
    Products(Option<Prologue>, Vec<Product>),
    /// `x += y`.
    Add { x: View, y: View },
    /// The choice of one row's experts.
    Choice(Box<Ranked>),
    /// The last stage of experts.
    Down(Box<Down>),
    /// Norms and rotations in place.
    Heads(Heads),
    /// A convolution, on the fast path: what it yields is not written where a delta rule takes it.
    Convolution(Box<Convolution>),
    /// A delta rule behind such, perhaps with the norm of what it yields.
    Rule(Box<Rule>),
}

impl GpuDevice {
    /// Joins an op with what waits, or lets it wait; false if it is to run by itself, after what waits has.
    pub(in crate::gpu) fn join(&mut self, op: &Op<'_>) -> Result<bool, Error> {
        if self.join_pending(op)? {
            return Ok(true);
        }
        self.settle()?;
        self.pending = match *op {
            Op::MatMul { .. } => match self.product_of(op)? {
                Some(product) => Pending::Products(None, vec![product]),
                None => return Ok(false),
            },
            Op::Add { x, y } => Pending::Add { x, y },
            Op::Conv1d { .. } if !self.exact => match Convolution::of(op) {
                Some(convolution) => Pending::Convolution(convolution),
                None => return Ok(false),
            },
            Op::TopK { logits, .. } if logits.rows == 1 => match Ranked::of(op) {
                Some(ranked) => Pending::Choice(Box::new(ranked)),
                None => return Ok(false),
            },
            Op::RmsNorm { x, weight: Some(weight), eps, out }
                if !self.exact
                    && x.rows <= matvec::NORMED
                    && x.heads == 1
                    && x.buffer != out.buffer =>
            {
                Pending::Norm(Norm { x, weight, eps, out })
            }
            Op::RmsNorm { .. } | Op::Rope { .. } => {
                self.pending = Pending::Heads(Heads::default());
                let joined = self.join_pending(op)?;
                if !joined {
                    self.pending = Pending::Nothing;
                }
                return Ok(joined);
            }
            _ => return Ok(false),
        };
        Ok(true)
    }

    fn join_pending(&mut self, op: &Op<'_>) -> Result<bool, Error> {
        match (std::mem::take(&mut self.pending), op) {
            (Pending::Norm(norm), Op::MatMul { .. }) => {
                match self.product_of(op)?.filter(|product| product.norms(&norm)) {
                    Some(product) => {
                        self.pending = Pending::Products(Some(Prologue::Norm(norm)), vec![product]);
                        Ok(true)
                    }
                    None => {
                        self.pending = Pending::Norm(norm);
                        Ok(false)
                    }
                }
            }
            (Pending::Products(norm, mut all), Op::MatMul { .. }) => {
                let joined = match self.product_of(op)? {
                    Some(product)
                        if product.joins(&all) && !matches!(norm, Some(Prologue::Squares(_))) =>
                    {
                        all.push(product);
                        true
                    }
                    _ => false,
                };
                self.pending = Pending::Products(norm, all);
                Ok(joined)
            }
            (Pending::Products(norm, all), &Op::Glu { activation, gate, up, out }) => {
                if !matvec::is_gated(&all, [gate, up]) {
                    self.pending = Pending::Products(norm, all);
                    return Ok(false);
                }
                if let Some(Prologue::Norm(norm)) = norm {
                    norm.run(self)?;
                }
                matvec::gated(self, &all, activation, out)?;
                Ok(true)
            }
            (Pending::Products(norm, all), &Op::Add { x, y }) => {
                if all.len() == 1 && all[0].adds(norm.as_ref(), x, y) {
                    matvec::products(self, norm.as_ref(), &all, Some(x))?;
                    return Ok(true);
                }
                self.pending = Pending::Products(norm, all);
                Ok(false)
            }
            (Pending::Choice(ranked), Op::Experts { .. }) => {
                experts::experts(self, op, Some(&ranked))?;
                Ok(true)
            }
            (Pending::Down(down), &Op::Combine { parts, weights, shared, add: true, out })
                if down.makes(parts, out) && shared.is_none_or(|s| s.out.buffer != out.buffer) =>
            {
                down.run_summed(self, (weights, shared), out)?;
                Ok(true)
            }
            (Pending::Add { x, y }, &Op::RmsNorm { x: of, weight: Some(weight), eps, out })
                if of == x && out.buffer != x.buffer =>
            {
                norm::run(self, (x, out, Some(y)), Some(weight), (None, eps), [0, 1])?;
                Ok(true)
            }
            (Pending::Convolution(convolution), Op::DeltaNet { .. }) => {
                let rule = Rule::of(op, convolution);
                let joined = rule.is_ok();
                self.pending = rule.map_or_else(Pending::Convolution, Pending::Rule);
                Ok(joined)
            }
            (Pending::Rule(mut rule), Op::GatedRmsNorm { .. }) => {
                let joined = rule.norms(op);
                self.pending = Pending::Rule(rule);
                Ok(joined)
            }
            (Pending::Rule(rule), Op::MatMul { .. }) => {
                let product = match rule.squares(self) {
                    Some(squares) => self
                        .product_of(op)?
                        .filter(|p| p.divides(self, &squares))
                        .zip(Some(squares)),
                    None => None,
                };
                let Some((product, squares)) = product else {
                    self.pending = Pending::Rule(rule);
                    return Ok(false);
                };
                rule.run_gated(self)?;
                self.pending = Pending::Products(Some(Prologue::Squares(squares)), vec![product]);
                Ok(true)
            }
            (Pending::Heads(mut heads), op) => {
                let joined = self.join_heads(&mut heads, op)?;
                if !joined || !matches!(op, Op::Attention { .. }) {
                    self.pending = Pending::Heads(heads);
                }
                Ok(joined)
            }
            (pending, _) => {
                self.pending = pending;
                Ok(false)
            }
        }
    }

    /// The product with few rows that an op is, if the shapes are ones for products that wait.
    fn product_of(&self, op: &Op<'_>) -> Result<Option<Product>, Error> {
        match *op {
            Op::MatMul { x, weight, bias, exact, out } if x.rows < tiled::ROWS => {
                Product::new(self, x, (weight, bias), exact || self.exact, out)
            }
            _ => Ok(None),
        }
    }

    /// Runs what waits.
    pub(in crate::gpu) fn settle(&mut self) -> Result<(), Error> {
        match std::mem::take(&mut self.pending) {
            Pending::Nothing => Ok(()),
            Pending::Norm(norm) => norm.run(self),
            Pending::Products(norm, all) => matvec::products(self, norm.as_ref(), &all, None),
            Pending::Add { x, y } => elementwise::run(self, &Op::Add { x, y }),
            Pending::Choice(ranked) => ranked.run(self),
            Pending::Down(down) => down.run(self),
            Pending::Heads(heads) => self.settle_heads(&heads),
            Pending::Convolution(convolution) => convolution.run(self),
            Pending::Rule(rule) => rule.run(self),
        }
    }
}
