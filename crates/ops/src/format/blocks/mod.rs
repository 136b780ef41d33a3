//! Block formats of ggml, as GGUF files have them: one plane of blocks, each with its scales.

mod bits;
mod block_type;
mod bytes;
mod codebook;
pub(crate) mod grids;
mod k_quants;

pub use self::bits::e8m0_half;
pub use self::grids::PACKED as GRIDS;
pub use block_type::BlockType;
pub(super) use block_type::formats;
