//! Weight formats, ops and the device trait of moeflux, with the reference device.
//!
//! An [`Op`] is checked here once for all devices: shapes, views and handles. Devices for a
//! processor and for graphics adapters are the crates `moeflux-compute-cpu` and
//! `moeflux-compute-gpu`, and `moeflux-compute` opens them by name.
//!
//! Small functions that devices call for each row or block are `#[inline]`: devices are other
//! crates, and release builds have no link-time optimization.
//!
//! Knows: numbers, bytes in documented [`Format`]s, host memory. Must not know: files, names of
//! tensors, models, instruction sets, graphics APIs.

mod adapter;
mod device;
mod error;
mod format;
mod handle;
mod host;
mod matrix;
mod op;
mod op_check;
mod operands;
mod reference;
mod router;
#[doc(hidden)]
pub mod seam;
mod state;

pub use adapter::{Adapter, AdapterKind};
pub use device::{
    BankPlace, Commit, Counters, Device, DeviceMemory, DeviceOptions, HandOver, HandOverPort,
    HandOverShape, KernelTime, LateFailure, LateRead, LateValues, LayerSplit, MAX_RECORDED_STEPS,
    PipelineStore, PlannedMemory, Profiler, RecordAhead, RecordedStep, ScratchShape, SlotStore,
    StateStore, Ticket, ViewRead,
};
pub use error::Error;
pub use format::{
    ActivationType, Affine, BlockScale, BlockScaled, BlockSize, BlockType, Codec, Element,
    FileLayout, Format, InputMajor, MAX_ORDERED, MatrixFactor, MatrixOrders, OutputOrder, PerPlane,
    PlaneBytes, PlaneLayout, Scalar, ScaledBlocks, WordAxis, quant,
};
pub use handle::{Bank, Buffer, DeviceId, Slot, SlotTable, State, Weight};
pub use matrix::{
    Bytes, ExpertMatrices, ExpertOrders, ExpertShape, FilePlane, Matrix, MatrixShape,
};
pub use moeflux_base::{KvFormat, SPLITMIX_STEP, SplitMix64, splitmix_mix};
pub use op::Op;
pub use op_check::{MAX_SEGMENT_WIDTH, MAX_STREAMS, MAX_TOP_LOGITS};
pub use operands::{
    Activation, BATCH_INVARIANT_ROWS, ExpertUse, ExpertUses, GateFunction, HeadMatrix, HeadRows,
    IndexList, IndexQueries, KeySharing, LogDecay, NormGate, ROPE_AXES, RopePairs, RopePositions,
    Shared, Span, StepLimits, View,
};
pub use reference::ReferenceDevice;
pub use router::{ExpertGroups, GroupScore, Router, Scoring, SharedChoice};
pub use state::{KV_BLOCK, StateShape};
