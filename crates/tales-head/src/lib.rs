//! Head for multi-token prediction of tales-18m, the model of `moeflux-tales`: drafts its next
//! tokens. A separate crate, as both together are too large for a registry.
//!
//! Knows: bytes. Must not know: any other crate.

mod drafter;

pub use drafter::{FILES, FOLDER};
