//! Chat templates: messages to prompt text, by the checkpoint's Jinja template.

mod caps;
mod content;
mod literal;
mod message;
pub(super) mod normal_form;
mod python;
mod render;
mod template;
mod template_message;
mod tools;

pub(crate) use literal::{ControlTokens, FoundToken, Literal};
pub use message::{Message, MessageImage};
pub use render::{count_allocation, count_deallocation};
pub(crate) use template::RenderedChat;
pub use template::{ChatOptions, ChatTemplate};
pub use tools::{ParameterType, Tool, ToolCall, ToolSet};
