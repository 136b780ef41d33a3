//! Runtime floor: the memory plan, the devices and the forward pass.
//!
//! `forward` turns token ids into embeddings, runs the layers and reads logits back; `spans` has
//! the tokens of each session in a step; `draft_head` drafts the tokens after it, run by `drafting`
//! from `kept_rows`; `recording` has the device record the `steps_ahead`; `layer` builds each layer
//! from ops; `control` cancels and observes steps; `plan` accounts for every byte before it is
//! allocated, in the lines of `pools`, and `plan_record` has it as JSON; `prefix_share` divides
//! memory between slots and prefix cache, by `prefill_cost`; `device` opens the device that
//! computes; `host_experts` computes experts on the processor beside a card, on `host_thread`,
//! `expert_probe` measures how fast both are, and `expert_places` gives experts their places in a
//! plan by that, `expert_placing` when a model is opened; `contents` has the images among the
//! tokens, `image_rows` what replaces an image's placeholders, `step_images` puts it there;
//! `pipeline_folder` keeps compiled kernels; `non_finite` finds the weight behind a NaN.
//!
//! Must not know: requests, sampling, text beyond the tokenizer's size.

mod card_budgets;
mod card_list;
mod card_speeds;
pub(crate) mod contents;
pub(crate) mod control;
pub(crate) mod device;
pub(crate) mod draft_head;
pub(crate) mod drafting;
mod expert_places;
pub(crate) mod expert_placing;
pub(crate) mod expert_probe;
pub(crate) mod forward;
pub(crate) mod host_experts;
mod host_processor;
pub(crate) mod host_thread;
mod image_rows;
pub(crate) mod kept_rows;
pub(crate) mod layer;
mod layer_cards;
pub(super) mod logits_request;
mod logits_row;
pub(crate) mod memory_request;
mod memory_size;
pub(crate) mod model_text;
pub(crate) mod non_finite;
mod open_device;
pub(crate) mod pipeline_folder;
pub(crate) mod plan;
mod plan_basis;
mod plan_errors;
mod plan_record;
pub(crate) mod pools;
pub(crate) mod prefill_cost;
mod prefix_share;
mod recording;
mod served_step;
mod slot_counts;
pub(crate) mod spans;
mod step_images;
mod steps_ahead;

pub use card_budgets::{CardBudgets, MAX_CARDS};
pub use card_speeds::CardSpeeds;
pub use contents::PromptImages;
pub use control::CancelToken;
pub use device::{ChosenDevice, Devices, WrapDevice};
pub use image_rows::ImageRows;
pub use layer::StepObserver;
pub use logits_request::Logits;
pub use memory_size::parse_size;
pub use moeflux_compute::{
    Adapter, AdapterKind, BankPlace, DeviceOptions, KernelTime, KvFormat, PipelineStore,
};
pub use pipeline_folder::PipelineFolder;
pub use plan::{CARD_CHUNK, DEFAULT_CHUNK, DEFAULT_CONTEXT, ImageMemory};
pub use pools::{LineName, Pool, PoolLine};
pub use prefix_share::PrefixDivision;
