//! GGUF: keys and names of tensors that several families have.
//!
//! A [`KeyRow`](row::KeyRow) is read in both directions: files become configs, and `synth` makes
//! files of configs. `architecture.rs` is the list of an architecture's rows, `writer.rs` keeps the
//! keys of a file in order. The others have rows: `model.rs` the keys of every model, `heads.rs`
//! grouped-query attention and windows, `experts.rs` feed-forward parts, `latent.rs` latent
//! attention and indexers, `kda.rs`, `mamba2.rs`, `delta_net.rs` and `streams.rs` their namesakes.

pub(crate) mod architecture;
pub(crate) mod delta_net;
pub(crate) mod experts;
pub(crate) mod heads;
pub(crate) mod kda;
pub(crate) mod key;
pub(crate) mod latent;
pub(crate) mod mamba2;
pub(crate) mod model;
pub(crate) mod prelude;
pub(crate) mod row;
pub(crate) mod streams;
pub(crate) mod writer;
