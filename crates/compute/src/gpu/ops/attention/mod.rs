//! Attention: append to the KV cache, split-KV kernels (flash-decoding), tiled kernels for prefill.

pub(in crate::gpu) mod attention;
pub(in crate::gpu) mod attention_decode;
pub(in crate::gpu) mod rows;

pub(super) use attention::{MAX_HEADS, TiledKernel, append_kv, encode, encode_append};
pub(in crate::gpu) use attention::{bind_kv, encode_sequence, encode_spans};
