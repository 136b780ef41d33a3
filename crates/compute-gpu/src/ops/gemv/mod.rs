//! GEMV dispatch: products of a few rows of activations with weights, bound by memory bandwidth.
//!
//! [`experts`] has the products of routed experts.

pub(crate) mod experts;
pub(crate) mod gemv;

pub(crate) use self::experts::{DownProjection, ExpertSum};
pub(super) use gemv::{ActivationFormat, encode_matmul, row_groups, section_cols};
pub(crate) use gemv::{
    GemvProduct, HeadNormPrologue, MatMulOperands, NormPrologue, Prologue, encode_glu,
    encode_products, is_glu,
};
