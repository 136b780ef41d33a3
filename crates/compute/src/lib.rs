//! Weight formats, ops and devices: the numerical core of moeflux.
//!
//! This crate knows nothing of files, tensor names, models or tokens. A caller loads [`Weight`]s,
//! fills [`Slot`]s with bytes in a documented [`Format`], and runs [`Op`]s on a [`Device`].

mod cpu;
mod device;
mod error;
mod format;
mod gpu;
mod host;
mod matrix;
mod op;
mod op_check;
mod random;
mod reference;
mod state;

pub use cpu::{CpuPeak, Isa, LogitTally, LogitWeights, logits_between, logits_extent};
pub use device::{
    BankPlace, Counters, Device, DeviceMemory, DeviceOptions, KernelTime, Profiler, ScratchShape,
    SlotStore, StateStore, Ticket, open,
};
pub use error::Error;
pub use format::{BlockScale, Element, Format, PlaneBytes, Scalar, quant};
#[doc(hidden)]
pub use gpu::open_gpu_of;
pub use gpu::{Adapter, AdapterKind, adapters};
pub use matrix::{Bytes, ExpertShape, Matrix, MatrixShape};
pub use op::{
    Activation, Buffer, ExpertGroups, ExpertUse, ExpertUses, HeadMatrix, HeadRows, Op, RopePairs,
    Router, Scoring, Shared, SharedChoice, Slot, SlotTable, Span, State, View, Weight,
};
pub use op_check::MAX_TOP_LOGITS;
pub use random::{SPLITMIX_STEP, SplitMix64, splitmix_mix};
pub use state::{KV_BLOCK, KvFormat, StateShape};
