//! Weight formats, ops and devices: the numerical core of moeflux.
//!
//! This crate knows nothing of files, tensor names, models or tokens. A caller loads [`Weight`]s,
//! fills [`Slot`]s with bytes in a documented [`Format`], and runs [`Op`]s on a [`Device`].

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "gpu"),
    allow(dead_code, reason = "the GPU device is the only user of some helpers")
)]

mod adapter;
mod cpu;
mod device;
mod error;
mod format;
#[cfg(feature = "gpu")]
mod gpu;
mod group;
mod handle;
mod host;
mod matrix;
mod op;
mod op_check;
mod open;
mod operands;
mod random;
mod reference;
mod router;
mod state;

#[cfg(not(feature = "gpu"))]
pub use adapter::adapters;
pub use adapter::{Adapter, AdapterKind};
pub use cpu::{
    CpuPeak, Isa, LogitTally, LogitWeights, cpu_scratch_bytes, logits_between, logits_extent,
};
pub use device::{
    BankPlace, Commit, Counters, Device, DeviceMemory, DeviceOptions, KernelTime, LateFailure,
    LateRead, LateValues, LayerSplit, PipelineStore, PlannedMemory, Profiler, RecordAhead,
    ScratchShape, SlotStore, StateStore, Ticket, ViewRead,
};
pub use error::Error;
pub use format::{
    ActivationType, Affine, BlockScale, BlockScaled, BlockSize, BlockType, Codec, Element,
    FileLayout, Format, InputMajor, MAX_ORDERED, MatrixFactor, MatrixOrders, OutputOrder, PerPlane,
    PlaneBytes, PlaneLayout, Scalar, ScaledBlocks, WordAxis, quant,
};
#[cfg(feature = "gpu")]
pub use gpu::adapters;
#[cfg(feature = "gpu")]
#[doc(hidden)]
pub use gpu::open_gpu_of;
pub use group::group_cards;
pub use handle::{Bank, Buffer, DeviceId, Slot, SlotTable, State, Weight};
pub use matrix::{
    Bytes, ExpertMatrices, ExpertOrders, ExpertShape, FilePlane, Matrix, MatrixShape,
};
pub use op::Op;
pub use op_check::{MAX_STREAMS, MAX_TOP_LOGITS};
pub use open::open;
pub use operands::{
    Activation, ExpertUse, ExpertUses, GateFunction, HeadMatrix, HeadRows, IndexList, IndexQueries,
    KeySharing, LogDecay, NormGate, RopePairs, Shared, Span, StepLimits, View,
};
pub use random::{SPLITMIX_STEP, SplitMix64, splitmix_mix};
pub use router::{ExpertGroups, GroupScore, Router, Scoring, SharedChoice};
pub use state::{KV_BLOCK, KvFormat, StateShape};
