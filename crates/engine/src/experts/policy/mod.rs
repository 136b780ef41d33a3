//! Eviction policies: LRU, LFU, S3-FIFO.

mod kind;
mod lfu;
mod lru;
mod policy;
mod queues;
mod s3_fifo;

pub(crate) use kind::POLICY_BYTES;
pub use kind::PolicyKind;
pub(crate) use policy::Policy;
