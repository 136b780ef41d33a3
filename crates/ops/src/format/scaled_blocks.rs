//! Blocks of ggml with a factor on the whole matrix, which GGUF files have beside the tensor.

use super::{
    blocks::BlockType,
    codec::{ActivationType, BlockSize, Codec, PerPlane, PlaneLayout},
    format::Format,
    plain::{Scalar, random_value},
};
use crate::error::Error;

/// Blocks of a type times one f32: a plane of blocks, and a plane of one value for all rows.
///
/// NVFP4 needs the factor, as its scales of 8 bits have a small range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaledBlocks(pub BlockType);

/// The formats of this family.
#[inline]
pub(super) fn formats() -> Vec<Format> {
    vec![Format::ScaledBlocks(ScaledBlocks(BlockType::NVFP4))]
}

impl Codec for ScaledBlocks {
    fn name(&self) -> String {
        format!("{}-scaled", self.0.name())
    }

    fn description(&self) -> String {
        format!("{} with a factor", self.0.description())
    }

    fn block(&self) -> BlockSize {
        BlockSize { rows: usize::MAX, ..self.0.block() }
    }

    fn planes(&self, cols: usize) -> PerPlane<PlaneLayout> {
        let [blocks, ..] = self.0.planes(cols);
        let row_bytes = Scalar::F32.bytes();
        let factor = PlaneLayout { row_bytes, block_rows: usize::MAX, align: row_bytes };
        [blocks, factor, PlaneLayout::NONE]
    }

    fn check(&self, cols: usize) -> Result<(), Error> {
        self.0.check(cols)
    }

    fn activations(&self) -> ActivationType {
        ActivationType::F32
    }

    fn dequantize(&self, [blocks, factor, none]: PerPlane<&[u8]>, out: &mut [f32]) {
        self.0.dequantize([blocks, &[], none], out);
        let factor = Scalar::F32.get(factor, 0);
        out.iter_mut().for_each(|weight| *weight *= factor);
    }

    fn random(&self, [blocks, factor, none]: PerPlane<&mut [u8]>, next: &mut dyn FnMut() -> u64) {
        self.0.random([blocks, &mut [], none], next);
        if !factor.is_empty() {
            Scalar::F32.put(0.75 + 0.25 * random_value(next), factor);
        }
    }
}
