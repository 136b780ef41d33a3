//! Tokenizers of checkpoints with `tiktoken.model` instead of `tokenizer.json`: Kimi and Moonlight.

mod tiktoken;
