//! Host memory: buffers, weights, slots and states of the devices that compute on the host.

mod host;
mod kv_formats;
mod states;
mod stores;
mod values;

pub(crate) use host::Host;
pub(crate) use kv_formats::dequantize_q8;
pub(crate) use states::{HostKvCache, HostRecurrent, KvKind};
pub(crate) use stores::HostDevice;
