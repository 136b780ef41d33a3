//! Norms: RMSNorm, gated RMSNorm, LayerNorm, residual addition fused with RMSNorm.

use moeflux_ops::{Buffer, Error, NormGate, Op, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{NormParams, ViewParams},
    },
    context::OpContext,
};

pub(crate) static NORM: Kernel = kernel!("norm", "elementwise/norm", NormParams, [Write]);

/// Width up to which one team norms a vector.
const MAX_TEAM_WIDTH: usize = 256;

/// Norm that the kernel computes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormKind {
    Rms,
    /// `x += operand`, then RMSNorm of `x`.
    AddRms,
    /// RMSNorm gated by `operand`.
    GatedRms(NormGate),
    Layer,
}

impl NormKind {
    /// `KIND` of the kernel.
    const fn code(self) -> u32 {
        match self {
            Self::Rms | Self::AddRms => 0,
            Self::GatedRms(NormGate::Silu) => 1,
            Self::Layer => 2,
            Self::GatedRms(NormGate::Sigmoid) => 3,
            Self::GatedRms(NormGate::SiluBeforeNorm) => 4,
        }
    }
}

/// Norm of each vector of a view.
pub(crate) struct NormDispatch {
    pub(crate) kind: NormKind,
    pub(crate) x: View,
    pub(crate) out: View,
    /// Second input of [`NormKind::AddRms`] and [`NormKind::GatedRms`].
    pub(crate) operand: Option<View>,
    pub(crate) weight: Option<Buffer>,
    /// Whether each head has its weights.
    pub(crate) per_head: bool,
    /// Bias of [`NormKind::Layer`].
    pub(crate) bias: Option<Buffer>,
    pub(crate) eps: f32,
}

impl NormDispatch {
    pub(crate) fn encode(&self, ctx: &mut OpContext<'_>) -> Result<(), Error> {
        let &Self { kind, x, out, operand, weight, per_head, bias, eps } = self;
        let store = &*ctx.store;
        let operand = operand.unwrap_or(x);
        let vectors = x.rows * x.heads;
        let params = NormParams {
            x: ViewParams::new(store, &x)?,
            out: ViewParams::new(store, &out)?,
            other: ViewParams::new(store, &operand)?,
            weight: store.optional_offset(weight)?,
            bias: store.optional_offset(bias)?,
            vectors: vectors as u32,
            heads: x.heads as u32,
            width: x.width as u32,
            eps,
        };
        let threads = vector_threads(ctx, x.width);
        let constants = Constants::new(&[
            ("WG", threads),
            ("THREAD_VALUES", x.width.div_ceil(threads as usize) as u32),
            ("KIND", kind.code()),
            ("WEIGHTED", weight.is_some().into()),
            ("HEAD_WEIGHTS", per_head.into()),
            ("BIASED", bias.is_some().into()),
            ("ADD", (kind == NormKind::AddRms).into()),
        ]);
        let buffers = [store.activations()];
        ctx.recorder.dispatch(&NORM, &constants, &buffers, &params, vectors)
    }
}

/// Threads for a vector. A wide one is often the only one, so it gets many threads.
fn vector_threads(ctx: &OpContext<'_>, width: usize) -> u32 {
    if width <= MAX_TEAM_WIDTH {
        ctx.target().team.max(32)
    } else if width < 1024 {
        256
    } else {
        ctx.max_threads().min(1024)
    }
}

/// Encodes [`Op::RmsNorm`], [`Op::GatedRmsNorm`] or [`Op::LayerNorm`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let dispatch = match *op {
        Op::RmsNorm { x, weight, per_head, eps, out } => NormDispatch {
            kind: NormKind::Rms,
            x,
            out,
            operand: None,
            weight,
            per_head,
            bias: None,
            eps,
        },
        Op::GatedRmsNorm { x, gate, function, weight, eps, out } => NormDispatch {
            kind: NormKind::GatedRms(function),
            x,
            out,
            operand: Some(gate),
            weight: Some(weight),
            per_head: function == NormGate::SiluBeforeNorm,
            bias: None,
            eps,
        },
        Op::LayerNorm { x, weight, bias, eps, out } => NormDispatch {
            kind: NormKind::Layer,
            x,
            out,
            operand: None,
            weight: Some(weight),
            per_head: false,
            bias,
            eps,
        },
        _ => return Ok(()),
    };
    dispatch.encode(ctx)
}
