//! The device trait and its options. Each further duty of a device is a separate trait.

mod device;
mod hand_over;
mod late_values;
mod layer_split;
mod pipeline_store;
mod planned_memory;
mod profiler;
mod record_ahead;
mod slot_store;
mod state_store;

pub use device::{Device, DeviceOptions, Ticket, ViewRead};
pub use hand_over::{HandOver, HandOverPort, HandOverShape};
pub use late_values::{LateFailure, LateRead, LateValues};
pub use layer_split::LayerSplit;
pub use layer_split::check_cards;
pub use pipeline_store::PipelineStore;
pub use planned_memory::{DeviceMemory, PlannedMemory, ScratchShape};
pub use profiler::{Counters, KernelTime, Profiler};
pub use record_ahead::{MAX_RECORDED_STEPS, RecordAhead, RecordedStep};
pub use slot_store::{BankPlace, SlotStore};
pub use state_store::{Commit, StateStore};
