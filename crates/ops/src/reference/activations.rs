//! Activations of gated linear units and of MLPs without a gate.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::operands::Activation;

/// `1 / (1 + exp(-x))`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

pub(super) fn glu(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::SwiGlu => silu(gate) * up,
        Activation::GeGlu => gelu_tanh(gate) * up,
        Activation::ClampedSwiGlu { alpha, limit } => {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(alpha * gate) * (up + 1.0)
        }
        Activation::ClippedSwiGlu { limit } => {
            silu(gate.clamp(f32::NEG_INFINITY, limit)) * up.clamp(-limit, limit)
        }
        Activation::LimitedSwiGlu { limit } => {
            silu(gate).clamp(f32::NEG_INFINITY, limit) * up.clamp(-limit, limit)
        }
        Activation::Relu2 => up.clamp(0.0, f32::INFINITY).powi(2),
        Activation::Gelu => gelu(up),
        Activation::GeluTanh => gelu_tanh(up),
        Activation::QuickGelu => up * sigmoid(1.702 * up),
    }
}

fn gelu_tanh(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())) as f32
}

/// `x P(X <= x)` for a standard normal `X`.
fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    let tail = 0.5 * erfc(x.abs() * FRAC_1_SQRT_2);
    (x * if x > 0.0 { 1.0 - tail } else { tail }) as f32
}

/// Complementary error function of `x >= 0`: the Maclaurin series of erf for small `x`, else the
/// continued fraction (Abramowitz and Stegun, 7.1.5 and 7.1.14).
fn erfc(x: f64) -> f64 {
    if x < 3.0 {
        let (mut sum, mut power) = (0.0, x);
        for n in 0..100 {
            sum += power / f64::from(2 * n + 1);
            power *= -x * x / f64::from(n + 1);
        }
        1.0 - 2.0 / PI.sqrt() * sum
    } else {
        let fraction = (1..100).rev().fold(x, |fraction, k| x + 0.5 * f64::from(k) / fraction);
        (-x * x).exp() / PI.sqrt() / fraction
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erfc_is_that_of_tables() {
        for (x, expected) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_1),
            (2.999, 2.223_016_859_983_405_8e-5),
            (3.0, 2.209_049_699_858_543_8e-5),
            (5.0, 1.537_459_794_428_035_1e-12),
        ] {
            let error = erfc(x) / expected - 1.0;
            assert!(error.abs() < 1e-9, "erfc({x}): {error:e}");
        }
    }

    #[test]
    fn gelu_far_from_zero_is_zero_or_its_argument() {
        assert_eq!([-1e3, 0.0, 1e3].map(gelu), [0.0, 0.0, 1e3]);
        assert!(gelu(f32::NAN).is_nan());
    }
}
