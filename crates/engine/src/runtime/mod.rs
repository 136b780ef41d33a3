//! Runtime floor: the memory plan, the devices and the forward pass.
//!
//! `forward` turns token ids into embeddings, runs the layers and reads logits back; `layer` builds
//! each layer from ops; `control` cancels and observes steps; `plan` accounts for every byte before
//! it is allocated, in the lines of `pools`; `device` opens the device that computes.
//!
//! Must not know: requests, sampling, text beyond the tokenizer's size.

pub(crate) mod control;
pub(crate) mod device;
pub(crate) mod forward;
pub(crate) mod layer;
pub(crate) mod plan;
pub(crate) mod pools;
