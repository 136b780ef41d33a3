//! Names that the tables of most architectures need.

pub(crate) use moeflux_base::Error;
pub(crate) use serde_json::json;

pub(crate) use super::{
    architecture::{GgufArchitecture, PLAIN},
    experts::{
        BLOCK_SPARSE, EXPERT_AS_MLP, EXPERT_BY_NAME, EXPERT_WIDTH, EXPERTS, GROUPED_SIZES,
        LOCAL_EXPERTS, MLP_WIDTH, NORMALIZED, POST_ATTENTION_NORM, ROUTED_SCALE, SHARED_EXPERT,
        SHARED_EXPERTS, SHARED_MLP, SIGMOID_ROUTER, SIGMOID_SCORES, SOFTMAX_EXPERTS,
        SOFTMAX_ROUTER, TOP_K,
    },
    heads::HEADS,
    key,
    model::MODEL,
    row::{Fixed, KeyRow, fixed, group, integer, number, reads, size, uniform, writes},
    writer::{KeyValue, KeyWriter, Place},
};
pub(crate) use crate::checkpoint::gguf::{
    keys::{Config, Keys, add},
    names::{NameRow, row},
};
