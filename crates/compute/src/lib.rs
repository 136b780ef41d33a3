//! Weight formats, ops and devices: the numerical core of moeflux.
//!
//! This crate knows nothing of files, tensor names, models or tokens. A caller loads [`Weight`]s,
//! fills [`Slot`]s with bytes in a documented [`Format`], and runs [`Op`]s on a [`Device`].
//!
//! Formats, ops and the device trait are in `moeflux-ops`. Each device is a crate above it, and
//! [`open()`] is the only function that names both.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(feature = "gpu"))]
mod adapters;
mod group;
pub mod open;

#[cfg(not(feature = "gpu"))]
pub use adapters::adapters;
pub use group::group_cards;
pub use moeflux_compute_cpu::{
    CpuPeak, Isa, LogitTally, LogitWeights, cpu_scratch_bytes, logits_between, logits_extent,
};
#[cfg(feature = "gpu")]
pub use moeflux_compute_gpu::adapters;
#[cfg(feature = "gpu")]
#[doc(hidden)]
pub use moeflux_compute_gpu::open_gpu_of;
pub use moeflux_ops::{
    Activation, ActivationType, Adapter, AdapterKind, Affine, BATCH_INVARIANT_ROWS, Bank,
    BankPlace, BlockScale, BlockScaled, BlockSize, BlockType, Buffer, Bytes, Codec, Commit,
    Counters, Device, DeviceId, DeviceMemory, DeviceOptions, Element, Error, ExpertGroups,
    ExpertMatrices, ExpertOrders, ExpertShape, ExpertUse, ExpertUses, FileLayout, FilePlane,
    Format, GateFunction, GroupScore, HandOver, HandOverPort, HandOverShape, HeadMatrix, HeadRows,
    IndexList, IndexQueries, InputMajor, KV_BLOCK, KernelTime, KeySharing, KvFormat, LateFailure,
    LateRead, LateValues, LayerSplit, LogDecay, MAX_ORDERED, MAX_RECORDED_STEPS, MAX_SEGMENT_WIDTH,
    MAX_STREAMS, MAX_TOP_LOGITS, Matrix, MatrixFactor, MatrixOrders, MatrixShape, NormGate, Op,
    OutputOrder, PerPlane, PipelineStore, PlaneBytes, PlaneLayout, PlannedMemory, Profiler,
    ROPE_AXES, RecordAhead, RecordedStep, RopePairs, RopePositions, Router, SPLITMIX_STEP, Scalar,
    ScaledBlocks, Scoring, ScratchShape, Shared, SharedChoice, Slot, SlotStore, SlotTable, Span,
    SplitMix64, State, StateShape, StateStore, StepLimits, Ticket, View, ViewRead, Weight,
    WordAxis, quant, splitmix_mix,
};
pub use open::open;
