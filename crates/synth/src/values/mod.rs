//! Random values, and the bytes of tensors made of them.
//!
//! Every byte is a function of seed, tensor name and offset alone. So layers do not depend on the
//! number of other layers, or on how a writer splits its work.

mod blocks;
mod mxfp4;
mod quantize;
mod values;

pub(super) use blocks::BlockParams;
pub(super) use mxfp4::Mxfp4Scales;
pub(super) use quantize::quantizer;
pub(super) use values::{AFFINE_GROUP, AffineParams, Lead, RandomStream, TensorValues};
