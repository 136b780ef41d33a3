//! Byte pair encoding (BPE) in flat memory.
//!
//! A model of the `tokenizers` library, with the same results. The library holds each token twice
//! and each merge as four numbers in a hash map: ten times the memory of the tables here. Dropout,
//! a setting of training, is ignored.

mod byte_pairs;
mod merge_table;
mod token_table;

pub(crate) use byte_pairs::{BytePairSettings, BytePairs};
pub(crate) use merge_table::MergeList;
pub(crate) use token_table::TokenList;
