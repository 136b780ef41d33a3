//! Checkpoint floor: a published model's files, opened in place.
//!
//! [`Checkpoint`] opens a folder, reads its small files and the tensor index of each large one. To
//! architectures it is a `TensorSource`.
//!
//! - The interface to architectures: `source.rs`. A source without files: `recorder.rs`.
//! - Which bytes make up a tensor, a matrix or an expert: `location.rs`.
//! - Names without what training tools put into them: `tensor_names.rs`.
//! - How a matrix or vector is found by name, and in which format: `tensors.rs`, for block-scaled
//!   formats `block_scaled.rs`, for integers `compressed_tensors.rs` and `input_major.rs`.
//! - RoPE scaling that a user asks for: `rope_scaling.rs`. How weights are read: `read.rs`.
//! - Which folder a path means: `model_path.rs`. Which models a folder has: `model_list.rs`. Which
//!   files of it hold tensors: `shards.rs`. Files and layouts that are recognised but not read:
//!   `foreign.rs`.
//! - File handles and mirrors on other disks: `data_file.rs`, `mirror_folders.rs`. Files that are
//!   still being downloaded: `arriving.rs`.
//! - The safetensors index, GGUF, packed models, the built-in model: `safetensors.rs`, `gguf`,
//!   `packed`, `embedded.rs`.
//!
//! Knows: files, tensor names, dtypes, formats. Must not know: architectures, devices, sessions.

mod arriving;
mod block_scaled;
mod compressed_tensors;
pub(crate) mod data_file;
mod embedded;
pub(crate) mod folder;
mod foreign;
pub(crate) mod frame;
pub(crate) mod gguf;
mod input_major;
mod input_order;
pub(crate) mod limits;
pub(crate) mod location;
mod matrix_request;
mod mirror_folders;
pub(crate) mod model_id;
mod model_list;
mod model_path;
pub mod packed;
mod quantization;
pub(crate) mod read;
pub(crate) mod read_ahead;
pub(crate) mod recorder;
mod rope_scaling;
pub(crate) mod row_table;
mod safetensors;
mod shards;
pub(crate) mod source;
pub(crate) mod tensor_names;
mod tensors;
pub(crate) mod text_config;

pub use arriving::{ArrivingBytes, ArrivingFile};
pub(crate) use data_file::DataFile;
pub use embedded::unpack_embedded;
pub(crate) use folder::tensor_at;
pub use folder::{Checkpoint, CheckpointOptions};
pub(crate) use frame::digest;
pub use gguf::{GgufPart, GgufSummary};
pub use location::{InputOrder, Integers, MatrixSource, Segment, VectorChange, VectorSource};
pub(crate) use location::{MatrixStack, TensorInfo};
pub use model_id::ModelId;
pub use model_list::{ListedModel, list_models};
pub use moeflux_base::TextFile;
pub use rope_scaling::RopeScaling;
pub use row_table::{RowFormat, RowScale, RowShard, RowTable, ScaleBlocks};
