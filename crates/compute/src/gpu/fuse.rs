//! Ops that wait for the next one, to share a dispatch with it.
//!
//! A dispatch that depends on the one before costs some microseconds whatever it does, and a token has hundreds. So the
//! device holds back what may be joined: a norm and the products that meet it, a product and its sum with the residual
//! stream, the last stage of experts and the sum of them, the sum and the norm that follows it, norms and rotations of heads and the keys' way into their state. Whatever
//! else comes settles what waits first. Whether ops join depends on nothing but their sequence.

use super::{
    Constants, GpuDevice, Kernel, Params, attention, elementwise, kernel,
    matvec::{self, Down, Norm, Product},
    norm,
};
use crate::{Buffer, Error, Op, RopePairs, Span, View};

static HEADS: Kernel = kernel!("heads", ["common", "heads"], [Write, Read, Write]);

/// Numbers of the widest vector whose norm may wait for a rotation.
const WIDE: usize = 512;

/// What waits.
#[derive(Default)]
pub(super) enum Pending {
    #[default]
    Nothing,
    /// The norm of one row.
    Norm(Norm),
    /// Products of one row, that may be normed on its way, with matrices of one format.
    Products(Option<Norm>, Vec<Product>),
    /// `x += y`.
    Add { x: View, y: View },
    /// The last stage of experts.
    Down(Box<Down>),
    /// Norms and rotations in place.
    Heads(Heads),
}

/// Vectors that are normed and rotated in place.
#[derive(Clone, Copy)]
struct Vectors {
    view: View,
    norm: Option<(Option<Buffer>, f32)>,
    /// Number of pairs, and where their table of angles begins.
    rope: Option<(usize, u32)>,
}

/// Up to two sets of vectors, of the same rows.
#[derive(Default)]
pub(super) struct Heads {
    all: Vec<Vectors>,
    interleaved: Option<bool>,
}

impl Heads {
    /// The vectors of a view, if they are among these or can come to them.
    fn of(&mut self, view: View) -> Option<&mut Vectors> {
        if let Some(i) = self.all.iter().position(|v| v.view == view) {
            return self.all.get_mut(i);
        }
        let new = self.all.iter().all(|v| v.view.rows == view.rows && v.view.buffer != view.buffer);
        if self.all.len() >= 2 || !new {
            return None;
        }
        self.all.push(Vectors { view, norm: None, rope: None });
        self.all.last_mut()
    }

    /// Joins a norm in place; false if it cannot.
    fn norm(&mut self, x: View, weight: Option<Buffer>, eps: f32) -> bool {
        let fits = |x: &View| x.width <= WIDE && x.width.is_multiple_of(2);
        match if fits(&x) { self.of(x) } else { None } {
            Some(v) if v.norm.is_none() && v.rope.is_none() => {
                v.norm = Some((weight, eps));
                true
            }
            _ => false,
        }
    }
}

impl GpuDevice {
    /// Joins an op with what waits, or lets it wait; false if it is to run by itself, after what waits has.
    pub(super) fn join(&mut self, op: &Op<'_>) -> Result<bool, Error> {
        if self.join_pending(op)? {
            return Ok(true);
        }
        self.settle()?;
        self.pending = match *op {
            Op::MatMul { x, weight, bias, exact, out } if x.rows == 1 => {
                match Product::new(self, x, (weight, bias), !exact && !self.exact, out)? {
                    Some(product) => Pending::Products(None, vec![product]),
                    None => return Ok(false),
                }
            }
            Op::Add { x, y } => Pending::Add { x, y },
            Op::RmsNorm { x, weight: Some(weight), eps, out }
                if x.rows == 1 && x.heads == 1 && x.buffer != out.buffer =>
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
            (Pending::Norm(norm), &Op::MatMul { x, weight, bias, exact, out }) if x == norm.out => {
                let product = Product::new(self, x, (weight, bias), !exact && !self.exact, out)?;
                match product.filter(|product| product.norms(&norm)) {
                    Some(product) => {
                        self.pending = Pending::Products(Some(norm), vec![product]);
                        Ok(true)
                    }
                    None => {
                        self.pending = Pending::Norm(norm);
                        Ok(false)
                    }
                }
            }
            (Pending::Products(norm, mut all), &Op::MatMul { x, weight, bias, exact, out })
                if x.rows == 1 =>
            {
                let product = Product::new(self, x, (weight, bias), !exact && !self.exact, out)?;
                let joined = match product {
                    Some(product) if product.joins(&all) => {
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
                if let Some(Norm { x, weight, eps, out }) = norm {
                    norm::run(self, (x, out, None), Some(weight), (None, eps), [0, 0])?;
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

    fn join_heads(&mut self, heads: &mut Heads, op: &Op<'_>) -> Result<bool, Error> {
        match *op {
            Op::RmsNorm { x, weight, eps, out } if x == out => Ok(heads.norm(x, weight, eps)),
            Op::Rope { x, frequencies, pairs, scale, spans, out } if x == out && x.width <= WIDE => {
                let interleaved = pairs == RopePairs::Interleaved;
                let even = x.width.is_multiple_of(2);
                if !even || heads.interleaved.is_some_and(|i| i != interleaved) {
                    return Ok(false);
                }
                // Making room may hand over the tables that waiting vectors use.
                if heads.all.iter().any(|v| v.rope.is_some())
                    && !self.has_room(frequencies.len() * x.rows * 2)
                {
                    return Ok(false);
                }
                let Some(vectors) = heads.of(x).filter(|v| v.rope.is_none()) else { return Ok(false) };
                let table = self.angles(frequencies, scale, spans)?;
                vectors.rope = Some((frequencies.len(), table));
                heads.interleaved = Some(interleaved);
                Ok(true)
            }
            Op::Attention { k, v: Some(v), spans: &[span], .. } => {
                let even = v.width.is_multiple_of(2) && k.width.is_multiple_of(2);
                if heads.all.len() != 2 || heads.all[1].view != k || !even || v.width > WIDE {
                    return Ok(false);
                }
                self.run_heads(heads, Some((v, span)))?;
                let kv = self.key_values(span.state)?;
                attention::attend_span(self, &kv, (&span, 0), op)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Runs what waits.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        match std::mem::take(&mut self.pending) {
            Pending::Nothing => Ok(()),
            Pending::Norm(Norm { x, weight, eps, out }) => {
                norm::run(self, (x, out, None), Some(weight), (None, eps), [0, 0])
            }
            Pending::Products(norm, all) => matvec::products(self, norm.as_ref(), &all, None),
            Pending::Add { x, y } => elementwise::run(self, &Op::Add { x, y }),
            Pending::Down(down) => down.run(self),
            Pending::Heads(heads) => match heads.all.is_empty() {
                true => Ok(()),
                false => self.run_heads(&heads, None),
            },
        }
    }

    fn run_heads(&mut self, heads: &Heads, append: Option<(View, Span)>) -> Result<(), Error> {
        let one = heads.all[0];
        // A second set that is not there has no heads.
        let other = heads.all.get(1).copied();
        let mut params = Params::new();
        for (vectors, heads) in
            [(one, one.view.heads), (other.unwrap_or(one), other.map_or(0, |o| o.view.heads))]
        {
            let Vectors { view, norm, rope } = vectors;
            let weight = norm.and_then(|(weight, _)| weight).map(|w| self.store.start(w)).transpose()?;
            params = params
                .view(self.store.place(&view)?, &view)
                .n(heads)
                .n(view.width)
                .u(weight.unwrap_or(0))
                .f(norm.map_or(1.0, |(_, eps)| eps))
                .n(rope.map_or(0, |(pairs, _)| pairs))
                .u(rope.map_or(0, |(_, table)| table));
        }
        let kv = append.map(|(_, span)| self.key_values(span.state)).transpose()?;
        let v = append.map_or(one.view, |(v, _)| v);
        let position = append.map_or(0, |(_, span)| span.position);
        let positions = kv.as_ref().map_or(1, |kv| kv.positions);
        params = params
            .view(self.store.place(&v)?, &v)
            .n(one.view.rows)
            .n(position % positions)
            .n(positions)
            .u(kv.as_ref().map_or(0, |kv| kv.values))
            .n(v.width);
        let team = self.target().team;
        let threads = team * 4;
        let kind = |v: &Vectors| match v.norm {
            None => 0,
            Some((None, _)) => 1,
            Some((Some(_), _)) => 2,
        };
        let most = one.view.width.max(other.map_or(0, |o| o.view.width)).max(v.width);
        let constants = Constants::new(&[
            ("WG", threads),
            ("MOST", most as u32),
            ("ONE_NORM", kind(&one)),
            ("OTHER_NORM", other.as_ref().map_or(0, kind)),
            ("INTERLEAVED", heads.interleaved.unwrap_or(false).into()),
            ("HALF", self.half()),
            ("APPEND", append.is_some().into()),
        ]);
        let of_row = one.view.heads + other.map_or(0, |o| o.view.heads) * (1 + usize::from(append.is_some()));
        let groups = (one.view.rows * of_row).div_ceil((threads / team) as usize);
        let upload = self.upload.clone();
        // Without a state nothing is written there; the report stands in for it.
        let state = kv.map_or_else(|| self.report.clone(), |kv| kv.memory);
        self.dispatch(&HEADS, constants, &[&self.activations(), &upload, &state], &params, groups)
    }
}
