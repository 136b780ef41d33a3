//! A checkpoint's config and tensor names become a [`Blueprint`](blueprint::Blueprint).

#[doc(inline)]
pub use moeflux_model::supported_architectures;
#[doc(inline)]
pub use moeflux_model::{blueprint, ngram};
