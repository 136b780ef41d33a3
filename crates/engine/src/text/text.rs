//! Text side of a checkpoint: tokenizer, chat template, sampling defaults and end tokens.

use std::path::PathBuf;

use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    text::{
        chat::{ChatOptions, ChatTemplate, Message},
        sampling::{EndTokens, GenerationConfig},
        tokenizer::{Decoder, Tokenizer, TokenizerConfig},
    },
};

/// Tokenizer, chat template and recommended sampling of a model.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    /// A missing or broken template is an error only when it is used.
    template: Result<ChatTemplate, (PathBuf, String)>,
    generation: GenerationConfig,
    end: EndTokens,
}

impl Text {
    /// Reads a checkpoint's text files; `None` without a tokenizer. `vocab` is the vocabulary size
    /// of the model.
    pub(crate) fn for_checkpoint(
        checkpoint: &Checkpoint,
        vocab: usize,
    ) -> Result<Option<Self>, Error> {
        let config_file = checkpoint.text_file("tokenizer_config.json");
        let (tokenizer, path) = if let Some(json) = checkpoint.text_file("tokenizer.json") {
            (Tokenizer::from_bytes(json.bytes, &json.path)?, json.path)
        } else if let Some(ranks) = checkpoint.text_file("tiktoken.model") {
            let Some(config) = &config_file else {
                let problem = "it names no special tokens, and tokenizer_config.json, which does, \
                               is missing: download it";
                return Err(Error::Text { path: ranks.path, problem: problem.into() });
            };
            (Tokenizer::from_tiktoken(&ranks, config)?, ranks.path)
        } else {
            return Ok(None);
        };
        if tokenizer.vocab_size() > vocab {
            let problem = format!(
                "it has ids up to {}, but the model's vocabulary has {vocab} entries: tokenizer \
                 and model do not belong together",
                tokenizer.vocab_size() - 1
            );
            return Err(Error::Text { path, problem });
        }
        let config = match config_file {
            Some(file) => TokenizerConfig::from_bytes(file.bytes, &file.path),
            None => Ok(TokenizerConfig::default()),
        };
        let generation = GenerationConfig::for_checkpoint(checkpoint)?;
        let model_config = checkpoint.text_file("config.json").unwrap_or_default();
        let eos_token = config.as_ref().ok().and_then(|config| config.eos_token(&tokenizer));
        let end = EndTokens::new(&generation, &model_config, eos_token)?;
        let jinja = checkpoint.text_file("chat_template.jinja");
        let template = config
            .and_then(|config| ChatTemplate::from_files(jinja.as_ref(), &config))
            .and_then(|template| template.ok_or_else(|| ChatTemplate::missing(checkpoint.folder())))
            .map_err(|error| match error {
                Error::Text { path, problem } => (path, problem),
                other => (checkpoint.folder().into(), other.to_string()),
            });
        Ok(Some(Self { tokenizer, template, generation, end }))
    }

    /// Tokens of a conversation, up to the start of the assistant's answer.
    ///
    /// # Errors
    /// There is no chat template, or it fails.
    pub fn chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode(&self.template()?.render(messages, true, options)?, false)
    }

    /// Tokens that continue after an answer without its end token: the end of the answer,
    /// `question`, and the prompt for the next answer. Continues conversations of which only the
    /// tokens are known, such as saved sessions.
    ///
    /// # Errors
    /// As [`Text::chat`] and [`ChatTemplate::render_follow_up`].
    pub fn chat_follow_up(&self, question: &str, options: &ChatOptions) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode(&self.template()?.render_follow_up(question, options)?, false)
    }

    fn template(&self) -> Result<&ChatTemplate, Error> {
        let broken = |(path, problem): &(PathBuf, String)| Error::Text {
            path: path.clone(),
            problem: problem.clone(),
        };
        self.template.as_ref().map_err(broken)
    }

    /// Tokens of plain text, with the special tokens that the tokenizer adds around it.
    ///
    /// # Errors
    /// The tokenizer cannot represent the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode(text, true)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Incremental decoder from tokens to text.
    pub fn decoder(&self) -> Decoder {
        self.tokenizer.decoder()
    }

    /// Sampling that the model's authors recommend.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Tokens that end an answer.
    pub fn end(&self) -> &EndTokens {
        &self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follow_up_has_the_tokens_of_the_whole_conversation() {
        let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        let text = Text::for_checkpoint(&checkpoint, 4096).unwrap().unwrap();
        let options = ChatOptions::default();
        let asked = vec![Message::system("Be brief."), Message::user("Who was it?")];
        let answered = [asked.clone(), vec![Message::assistant("The Fox.")]].concat();
        let question = "And what did the Vixen say?";
        let whole =
            text.chat(&[answered, vec![Message::user(question)]].concat(), &options).unwrap();
        let start =
            [text.chat(&asked, &options).unwrap(), text.encode("The Fox.").unwrap()].concat();
        assert_eq!(whole, [start, text.chat_follow_up(question, &options).unwrap()].concat());
        assert!(text.end().contains(text.chat_follow_up("", &options).unwrap()[0]));
    }
}
