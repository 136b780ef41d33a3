//! Mamba-2 mixers: projection, convolution, recurrence, norm.

use moeflux_base::Error;
use moeflux_ops::StepLimits;
use serde_json::Value;

use super::{config::Require, scope::Scope};
use crate::{
    blueprint::{Mamba2Blueprint, Mamba2Shape},
    checkpoint::{VectorChange, source::TensorSource},
};

/// Config keys of a mixer's sizes, for error messages.
pub(crate) struct Mamba2Keys {
    pub(crate) heads: &'static str,
    pub(crate) head_width: &'static str,
    pub(crate) groups: &'static str,
    pub(crate) state_width: &'static str,
    pub(crate) conv_width: &'static str,
}

/// Parameters of the mixers of a model.
#[derive(Clone, Copy)]
pub(crate) struct Mamba2Params {
    pub(crate) hidden: usize,
    pub(crate) shape: Mamba2Shape,
    /// Whether the convolution has a bias.
    pub(crate) conv_bias: bool,
    pub(crate) limits: StepLimits,
    /// Factor on the output.
    pub(crate) scale: f32,
}

impl Mamba2Params {
    /// Checks the sizes.
    pub(crate) fn check(&self, require: &Require<'_>, keys: &Mamba2Keys) -> Result<(), Error> {
        let Mamba2Shape { heads, head_width, groups, state_width, conv_width } = self.shape;
        require.sizes(&[
            (keys.heads, heads),
            (keys.head_width, head_width),
            (keys.groups, groups),
            (keys.state_width, state_width),
            (keys.conv_width, conv_width),
        ])?;
        require.that(heads.is_multiple_of(groups), || {
            let Mamba2Keys { heads: key, groups: divisor, .. } = keys;
            format!("\"{key}\" is {heads}, not a multiple of \"{divisor}\", {groups}")
        })?;
        require.that(conv_width > 1, || {
            format!("\"{}\" is {conv_width}: at least 2 are supported", keys.conv_width)
        })
    }

    /// The mixer of a module.
    pub(crate) fn mixer(&self, mixer: &Scope<'_>) -> Result<Mamba2Blueprint, Error> {
        let (shape, hidden) = (self.shape, self.hidden);
        let (inner, channels) = (shape.inner(), shape.channels());
        let conv_bias = self.conv_bias.then(|| mixer.vector("conv1d.bias", channels));
        Ok(Mamba2Blueprint {
            shape,
            in_proj: mixer.matrix("in_proj", shape.outputs(), hidden)?,
            conv1d: mixer.array("conv1d.weight", &[channels, shape.conv_width, 1])?,
            conv_bias: conv_bias.transpose()?,
            a_log: mixer.log_decays("A_log", shape.heads, VectorChange::LogOfNegative)?,
            d: mixer.vector("D", shape.heads)?,
            dt_bias: mixer.vector("dt_bias", shape.heads)?,
            limits: self.limits,
            norm: mixer.vector("norm.weight", inner)?,
            scale: self.scale,
            out_proj: mixer.matrix("out_proj", hidden, inner)?,
        })
    }
}

/// Bounds of the time steps, of a config's `time_step_limit`; without it there are none. Infinity
/// is no number in JSON: it is read as text, or as the map that transformers writes.
pub(crate) fn step_limits(
    source: &dyn TensorSource,
    limits: Option<&[Value]>,
) -> Result<StepLimits, Error> {
    let Some(limits) = limits else { return Ok(StepLimits::default()) };
    let is_infinite = |value: &Value| {
        let text = value.get("__float__").unwrap_or(value);
        text == "Infinity"
    };
    let number = |value: &Value| match is_infinite(value) {
        true => Some(f32::INFINITY),
        false => value.as_f64().map(|limit| limit as f32),
    };
    let bounds = match limits {
        [min, max] => number(min).zip(number(max)),
        _ => None,
    };
    let limits = bounds.map(|(min, max)| StepLimits { min, max });
    let limits = limits.filter(|limits| limits.min >= 0.0 && limits.max >= limits.min);
    let problem = || "\"time_step_limit\" is not a least and a largest time step".to_owned();
    Require(source).that(limits.is_some(), problem)?;
    Ok(limits.unwrap_or_default())
}
