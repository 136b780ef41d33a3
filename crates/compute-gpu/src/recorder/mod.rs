//! Command recording: dispatches, copies and uploads, and their submission to the queue.
//!
//! Compiling a pipeline takes the driver tens of milliseconds, and a step uses a dozen or more.
//! Missing pipelines compile on worker threads. The dispatch that needs one, and all that follow,
//! are queued until the pass ends.
//!
//! Knows kernels, buffers and the wgpu queue. Must not know of ops, handles, weights or states.

mod dispatch;
mod encode_threads;
mod hand_over;
mod late;
mod profile;
mod recorder;
mod step;
mod step_parts;
mod transfer;
mod upload;
mod wait;

pub(crate) use self::{
    hand_over::{HandOverSize, HandOvers},
    late::LateRange,
    step::RecordedCommands,
    transfer::{BufferRef, REPORT_BYTES},
    upload::UPLOAD_WORDS,
};
pub(crate) use recorder::Recorder;
