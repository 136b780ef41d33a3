//! Blueprint of a model: its layers with their shapes, and the location of each weight.
//!
//! A file of `families` builds it. Everything after that (the
//! memory plan, loading, the forward pass, `inspect`) reads only the blueprint and does not depend
//! on the architecture.

mod compressed;
mod delta_net;
mod input_orders;
mod layer;
mod mamba2;
mod model;
mod ngram_memory;
mod parts;
mod rope;
mod short_conv;
pub(crate) mod states;
mod streams;
mod vision;
mod weight_list;

pub(crate) use self::{compressed::entry_positions, input_orders::InputOrders};
pub use self::{
    compressed::{
        CompressedBlueprint, CompressedShape, CompressorBlueprint, EntryIndexerBlueprint,
        PartialRope,
    },
    ngram_memory::NgramMemoryBlueprint,
    short_conv::ShortConvBlueprint,
    streams::{GatedMix, MatrixMix, StreamInput, StreamMix},
};
pub use self::{
    delta_net::{DeltaNetBlueprint, DeltaNetShape, ProjectionSource},
    layer::{
        BodyBlueprint, FeedForwardBlueprint, LayerBlueprint, MixerBlueprint, NormKind, NormSource,
        SubBlockBlueprint, SubBlockInput,
    },
    mamba2::{Mamba2Blueprint, Mamba2Shape},
    model::{Blueprint, DrafterBlueprint, ImageInputs},
    rope::{Llama3Scaling, LongRope, RopeShape, Yarn},
};
pub use parts::{
    BlockIndexerBlueprint, FixedRoutes, GateSource, GqaBlueprint, GqaIndexer, GqaShape,
    IndexerBlueprint, LatentExperts, LatentHeads, LatentQuery, LayerExperts, LinearSource,
    MlaBlueprint, MlaIndexer, MlaShape, MlpBlueprint, MoeBlueprint, OutputGate, QueryTemperature,
    RouterBlueprint, RouterNorm, SharedBlueprint, SparseBlueprint,
};
pub use vision::{
    DeepstackMerger, LayerNormSource, PatchEmbedding, PatchLayout, PositionTable, VisionBlock,
    VisionBlueprint, VisionMerger,
};
