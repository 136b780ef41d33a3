//! Norms and rotations of queries and keys that wait for attention, or for each other.

use super::{
    Constants, GpuDevice, Kernel, Params, attention,
    attention_decode::{Decode, NewKv},
    kernel,
};
use crate::{Buffer, Error, Op, RopePairs, Span, View};

pub(in crate::gpu) static HEADS: Kernel =
    kernel!("qk_norm_rope", "attention/qk_norm_rope", [Write, Read, Write]);

/// Numbers of the widest vector whose norm may wait for a rotation.
const WIDE: usize = 512;

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
    /// Joins an op with norms and rotations that wait; false if it is to run by itself, after they have.
    pub(super) fn join_heads(&mut self, heads: &mut Heads, op: &Op<'_>) -> Result<bool, Error> {
        match *op {
            Op::RmsNorm { x, weight, eps, out } if x == out => Ok(heads.norm(x, weight, eps)),
            Op::Rope { x, frequencies, pairs, scale, spans, out }
                if x == out && x.width <= WIDE =>
            {
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
                let Some(vectors) = heads.of(x).filter(|v| v.rope.is_none()) else {
                    return Ok(false);
                };
                let table = self.angles(frequencies, scale, spans)?;
                vectors.rope = Some((frequencies.len(), table));
                heads.interleaved = Some(interleaved);
                Ok(true)
            }
            Op::Attention { q, k, v: Some(v), spans: &[span], .. } => {
                let even = v.width.is_multiple_of(2) && k.width.is_multiple_of(2);
                if heads.all.len() != 2 || heads.all[1].view != k || !even || v.width > WIDE {
                    return Ok(false);
                }
                let kv = self.key_values(span.state)?;
                let [one, other] = [heads.all[0], heads.all[1]];
                // On the exact path a row's bits are those that it has beside others.
                let inside = !self.exact && Decode::takes(self, op, &span);
                if inside && one.view == q && one.rope == other.rope {
                    let own = NewKv {
                        norms: [one.norm, other.norm],
                        rope: one.rope,
                        interleaved: heads.interleaved.unwrap_or(false),
                        ..NewKv::new(k, v)
                    };
                    attention::attend(self, &kv, (&span, 0), op, Some(&own))?;
                } else {
                    self.run_heads(heads, Some((v, span)))?;
                    attention::attend_span(self, &kv, (&span, 0), op)?;
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Runs norms and rotations that waited for nothing.
    pub(super) fn settle_heads(&mut self, heads: &Heads) -> Result<(), Error> {
        match heads.all.is_empty() {
            true => Ok(()),
            false => self.run_heads(heads, None),
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
            let weight =
                norm.and_then(|(weight, _)| weight).map(|w| self.store.start(w)).transpose()?;
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
            ("MAX_WIDTH", most as u32),
            ("Q_NORM", kind(&one)),
            ("K_NORM", other.as_ref().map_or(0, kind)),
            ("INTERLEAVED", heads.interleaved.unwrap_or(false).into()),
            ("KV_F16", self.half()),
            ("APPEND", append.is_some().into()),
        ]);
        let of_row = one.view.heads
            + other.map_or(0, |o| o.view.heads) * (1 + usize::from(append.is_some()));
        let groups = (one.view.rows * of_row).div_ceil((threads / team) as usize);
        let upload = self.upload.clone();
        // Without a state nothing is written there; the report stands in for it.
        let state = kv.map_or_else(|| self.report.clone(), |kv| kv.memory);
        self.dispatch(&HEADS, constants, &[&self.activations(), &upload, &state], &params, groups)
    }
}
