//! GEMV dispatch: products of a few rows of activations with weights, bound by memory bandwidth.
//!
//! [`experts`] has the products of routed experts.

pub(in crate::gpu) mod experts;
pub(in crate::gpu) mod gemv;

pub(in crate::gpu) use self::experts::{DownProjection, ExpertSum};
pub(super) use gemv::{ActivationFormat, encode_matmul, row_groups, section_cols};
pub(in crate::gpu) use gemv::{
    GemvProduct, HeadNormPrologue, MatMulOperands, NormPrologue, Prologue, encode_glu,
    encode_products, is_glu,
};
