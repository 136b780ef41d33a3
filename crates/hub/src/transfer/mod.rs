//! Several connections that fetch ranges of several files.

mod guest;
mod transfer;

pub(crate) use transfer::{FileToFetch, Transfer};
