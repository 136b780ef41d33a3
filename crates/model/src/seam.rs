//! Names for the crates above, which are no part of the public interface.

pub use crate::blank_weights::{blank_weights, check_tails};
pub use crate::blueprint::states::{LayerState, MAX_STATES, StateEntries, WrittenEntries};
pub use crate::checkpoint::data_file::{DataFile, read_at};
pub use crate::checkpoint::folder::tensor_at;
pub use crate::checkpoint::gguf::types::{recipe_number, type_number};
pub use crate::checkpoint::limits::TEXT_FILES;
pub use crate::checkpoint::location::{ShardLocation, TensorInfo};
pub use crate::checkpoint::packed::{
    DENSE, DENSE_PART, DenseFile, Digests, EXPERTS, ExpertTensor, JOURNAL, Origin, PackedExtent,
    PackedHeader, PackedLayer, PackedPart, SmallFile, describe_matrices,
};
pub use crate::checkpoint::read::READ_THREADS;
pub use crate::checkpoint::read_ahead::{ReadAhead, ReadMatrix};
pub use crate::checkpoint::recorder::{RecordedTensor, Recorder};
pub use crate::checkpoint::source::{SourceChanges, TensorSource};
pub use crate::checkpoint::text_config::{text_config, text_config_mut};
pub use crate::checkpoint::{
    frame::{ALIGN, Frame, FrameError, digest},
    model_id::hex_digest,
};
pub use crate::config_notes::config_notes;
pub use crate::families::{
    ModelRow, Preset, PresetSizes, gguf_architectures, model_rows, presets, supported,
};
pub use crate::ngram::NgramSettings;
pub use crate::packed_experts::layout_digest;
pub use crate::parts::gguf::{
    architecture::{GgufArchitecture, GgufVector},
    writer::{KeyList, KeyValue},
};
pub use crate::parts::ngram_memory::{NgramBase, base_for_rows};
