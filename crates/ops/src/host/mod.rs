//! Host memory: buffers, weights, slots and states of the devices that compute on the host.

mod host;
mod kv_formats;
mod states;
mod stores;
mod values;

pub use host::Host;
pub use kv_formats::dequantize_q8;
pub use states::{HostKvCache, HostRecurrent, KvKind};
pub use stores::HostDevice;
