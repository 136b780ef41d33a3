//! Names for the crates above, which are no part of the public interface.

pub use crate::{
    bans::TokenBans,
    logprobs::LogSoftmax,
    sampler::{TokenPick, USUAL_CANDIDATES},
};
