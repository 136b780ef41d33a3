//! Kinds of files that may come from a stranger.

/// Parser of one kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Parser {
    /// `config.json`, up to the blueprint.
    Config,
    /// `model.safetensors`.
    Safetensors,
    /// A GGUF file, up to the blueprint.
    Gguf,
    /// `model.safetensors.index.json`.
    ShardIndex,
    /// `experts.moeflux`.
    Packed,
    /// `mirrors.txt`.
    Mirrors,
    /// A saved session.
    Snapshot,
    /// A routing trace.
    Trace,
    /// A recorded division of experts.
    ExpertPlan,
    /// `tokenizer.json`, with a text there and back.
    Tokenizer,
    /// `tiktoken.model`.
    Tiktoken,
    /// `tokenizer_config.json`, with its template.
    TokenizerConfig,
    /// `chat_template.jinja`, with a conversation.
    Template,
    /// `generation_config.json`.
    GenerationConfig,
    /// An image in any format that is read.
    Image,
    /// `preprocessor_config.json` that also names the model, with an image.
    ImageProcessor,
}
