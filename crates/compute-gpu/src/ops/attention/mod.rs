//! Attention: append to the KV cache, split-KV kernels (flash-decoding), tiled kernels for prefill.

pub(crate) mod attention;
pub(crate) mod attention_decode;
pub(crate) mod rows;

pub(super) use attention::{MAX_HEADS, TiledKernel, append_kv, encode, encode_append};
pub(crate) use attention::{bind_kv, encode_sequence, encode_spans};
