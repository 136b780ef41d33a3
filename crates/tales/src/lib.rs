//! tales-18m: a small trained Mixture-of-Experts language model, for first runs and for tests.
//!
//! [`FILES`] are the files of its checkpoint, as `mlx-lm` writes them. The model tells some 300
//! fables word for word; its README says how it was made. Depends on nothing, so that any crate can
//! use it.
//!
//! Knows: bytes. Must not know: any other crate.

mod checkpoint;

pub use checkpoint::{FILES, FOLDER};
