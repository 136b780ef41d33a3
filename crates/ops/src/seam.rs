//! Names for the devices and the group of cards, which no other crate should use.

pub use crate::device::check_cards;
pub use crate::format::blocks::e8m0_half;
pub use crate::format::blocks::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
pub use crate::format::{E4M3, GRIDS};
pub use crate::host::{Host, HostDevice, HostKvCache, HostRecurrent, KvKind, dequantize_q8};
pub use crate::matrix::{Lent, MatrixLocation, anonymous};
pub use crate::op_check::{HandleTable, stale};
pub use crate::operands::SpanPart;
