//! What a checkpoint brings to turn text into tokens and back.

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

/// Tokenizer, chat template and the makers' advice on sampling.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    /// A template that is absent or broken matters only to those who use it.
    template: Result<ChatTemplate, (PathBuf, String)>,
    generation: GenerationConfig,
    end: EndTokens,
}

impl Text {
    /// Reads a checkpoint's text files; `None` without a tokenizer. `vocab` is the model's.
    pub(crate) fn of(checkpoint: &Checkpoint, vocab: usize) -> Result<Option<Self>, Error> {
        let config_file = checkpoint.text("tokenizer_config.json");
        let (tokenizer, path) = if let Some((bytes, path)) = checkpoint.text("tokenizer.json") {
            (Tokenizer::from_bytes(bytes, &path)?, path)
        } else if let Some((ranks, path)) = checkpoint.text("tiktoken.model") {
            let Some((config, config_path)) = &config_file else {
                let problem = "it names no special tokens; tokenizer_config.json, which does, is not there: download it";
                return Err(Error::Text { path, problem: problem.into() });
            };
            (Tokenizer::from_tiktoken((ranks, &path), (config, config_path))?, path)
        } else {
            return Ok(None);
        };
        if tokenizer.vocab_size() > vocab {
            let problem = format!(
                "it has ids up to {}, but the model's vocabulary has {vocab} entries: tokenizer and model do not \
                 belong together",
                tokenizer.vocab_size() - 1
            );
            return Err(Error::Text { path, problem });
        }
        let config = match config_file {
            Some((bytes, path)) => TokenizerConfig::from_bytes(bytes, &path),
            None => Ok(TokenizerConfig::default()),
        };
        let generation = match checkpoint.text("generation_config.json") {
            Some((bytes, path)) => GenerationConfig::from_bytes(bytes, &path)?,
            None => GenerationConfig::default(),
        };
        let (model_config, model_config_path) = checkpoint.text("config.json").unwrap_or_default();
        let end = EndTokens::new(
            &generation,
            model_config,
            &model_config_path,
            config.as_ref().unwrap_or(&TokenizerConfig::default()),
            &tokenizer,
        )?;
        let jinja = checkpoint.text("chat_template.jinja");
        let template = config
            .and_then(|config| {
                ChatTemplate::from_files(jinja.as_ref().map(|(b, p)| (*b, p.as_path())), &config)
            })
            .and_then(|template| template.ok_or_else(|| ChatTemplate::missing(checkpoint.folder())))
            .map_err(|error| match error {
                Error::Text { path, problem } => (path, problem),
                other => (checkpoint.folder().into(), other.to_string()),
            });
        Ok(Some(Self { tokenizer, template, generation, end }))
    }

    /// Tokens of a conversation, up to where the assistant's answer begins.
    ///
    /// # Errors
    /// There is no chat template, or it fails.
    pub fn chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode(&self.template()?.render(messages, true, options)?, false)
    }

    /// Tokens that ask `question` behind an answer whose end token is not there yet: what ends it, the question, and what comes
    /// before the next answer. A conversation goes on with them of which only the tokens are known, as those of a saved session.
    ///
    /// # Errors
    /// As [`Text::chat`]; also as [`ChatTemplate::render_on`].
    pub fn chat_on(&self, question: &str, options: &ChatOptions) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode(&self.template()?.render_on(question, options)?, false)
    }

    fn template(&self) -> Result<&ChatTemplate, Error> {
        let broken = |(path, problem): &(PathBuf, String)| Error::Text {
            path: path.clone(),
            problem: problem.clone(),
        };
        self.template.as_ref().map_err(broken)
    }

    /// Tokens of a text as it is, with the special tokens that the tokenizer itself puts around it.
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

    /// Turns tokens into text as they come.
    pub fn decoder(&self) -> Decoder {
        self.tokenizer.decoder()
    }

    /// What the model's makers advise for sampling.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The tokens that end an answer.
    pub fn end(&self) -> &EndTokens {
        &self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_behind_an_answer_goes_on_as_the_whole_conversation_does() {
        let checkpoint = Checkpoint::embedded().unwrap();
        let text = Text::of(&checkpoint, 4096).unwrap().unwrap();
        let options = ChatOptions::default();
        let asked = vec![Message::system("Be brief."), Message::user("Who was it?")];
        let answered = [asked.clone(), vec![Message::assistant("The Fox.")]].concat();
        let question = "And what did the Vixen say?";
        let whole =
            text.chat(&[answered, vec![Message::user(question)]].concat(), &options).unwrap();
        let begun =
            [text.chat(&asked, &options).unwrap(), text.encode("The Fox.").unwrap()].concat();
        assert_eq!(whole, [begun, text.chat_on(question, &options).unwrap()].concat());
        assert!(text.end().contains(text.chat_on("", &options).unwrap()[0]));
    }
}
