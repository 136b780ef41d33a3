//! Text side of a checkpoint: tokenizer, chat template, sampling defaults and end tokens.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux_base::{Error, SessionError, TextFile, TextFiles};
use moeflux_sampling::{EndTokens, GenerationConfig};

use crate::{
    chat::{ChatOptions, ChatTemplate, ControlTokens, Message, ToolSet},
    dialect::{AnswerParser, AnswerTools, CallSyntax, Delta, Dialect},
    grammar::Grammars,
    tokenizer::{AroundText, Decoder, Tokenizer, TokenizerConfig},
};

/// Tokenizer, chat template and recommended sampling of a model.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    /// Special tokens of the tokenizer.
    pub(super) controls: ControlTokens,
    /// A missing or broken template is an error only when it is used.
    template: Result<ChatTemplate, TextProblem>,
    dialect: Dialect,
    /// Broken advice is an error only when it is used, too.
    generation: Result<GenerationConfig, TextProblem>,
    end: EndTokens,
    around: Option<AroundIds>,
    /// Placeholder of an image.
    image_token: Option<u32>,
    /// Maximum tokens of a text, so that a prompt that cannot fit takes no memory.
    pub(super) limit: usize,
    grammars: Grammars,
}

/// Problem of a text file, until the file is used.
#[derive(Clone, Debug)]
struct TextProblem {
    path: PathBuf,
    problem: String,
}

impl TextProblem {
    /// The problem in an error; other errors are put on `path`.
    fn new(error: Error, path: &Path) -> Self {
        match error {
            Error::Text { path, problem } => Self { path, problem },
            other => Self { path: path.into(), problem: other.to_string() },
        }
    }

    fn error(&self) -> Error {
        Error::Text { path: self.path.clone(), problem: self.problem.clone() }
    }
}

/// Ids that are put around a text in place of what `tokenizer.json` adds.
#[derive(Clone, Copy, Debug)]
struct AroundIds {
    bos: Option<u32>,
    eos: Option<u32>,
}

/// Excess of a tokenizer's ids over the model's vocabulary in which added tokens are looked up.
const MAX_EXCESS: usize = 4096;

impl Text {
    /// Reads a checkpoint's text files; `None` without a tokenizer. `vocab` is the vocabulary size
    /// of the model.
    ///
    /// # Errors
    /// A file is not read, or the tokenizer has tokens beyond the vocabulary.
    pub fn for_checkpoint(checkpoint: &dyn TextFiles, vocab: usize) -> Result<Option<Self>, Error> {
        let config_file = checkpoint.text_file("tokenizer_config.json");
        let (tokenizer, path) = if let Some(json) = checkpoint.tokenizer() {
            (Tokenizer::from_reader(json.reader, json.path)?, json.path.to_owned())
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
        // Added tokens beyond the vocabulary belong to other members of the family. Only a prompt
        // can have them, and there they are an error.
        let excess = vocab..tokenizer.vocab_size();
        let belongs = excess.len() <= MAX_EXCESS
            && excess.clone().all(|id| is_no_text(&tokenizer, id as u32));
        if !belongs {
            let problem = format!(
                "it has ids up to {}, but the model's vocabulary has {vocab} entries: tokenizer \
                 and model do not belong together",
                tokenizer.vocab_size() - 1
            );
            return Err(Error::Text { path, problem });
        }
        let folder = checkpoint.folder();
        let mut config = match config_file {
            Some(file) => TokenizerConfig::from_bytes(file.bytes, &file.path)
                .map_err(|error| TextProblem::new(error, folder)),
            None => Ok(TokenizerConfig::default()),
        };
        if let (Ok(config), Some(map)) =
            (&mut config, checkpoint.text_file("special_tokens_map.json"))
        {
            // A broken map leaves the tokens that tokenizer_config.json names.
            let _ = config.add_special_tokens(map.bytes, &map.path);
        }
        let generation = GenerationConfig::for_checkpoint(checkpoint)
            .map_err(|error| TextProblem::new(error, folder));
        let template = template(checkpoint, config.as_ref());
        let model_config = checkpoint.text_file("config.json").unwrap_or_default();
        let mut named = config.as_ref().map_or(Vec::new(), |c| c.end_tokens(&tokenizer));
        named.extend(template.as_ref().ok().and_then(|t| end_of_turn(t, &tokenizer)));
        let advised = generation.clone().unwrap_or_default();
        let source = template.as_ref().ok().map(ChatTemplate::source);
        let dialect = Dialect::detect(source, &tokenizer);
        let mut end =
            EndTokens::new(&advised, &model_config, &named, |id| tokenizer.is_special(id))?;
        end.extend(dialect.end_tokens(source, &tokenizer));
        let around = config.as_ref().ok().and_then(|config| around(config, &tokenizer));
        Ok(Some(Self {
            controls: ControlTokens::new(tokenizer.special_tokens(None)),
            tokenizer,
            template,
            dialect,
            generation,
            end,
            around,
            image_token: None,
            limit: usize::MAX,
            grammars: Grammars::new(0),
        }))
    }

    /// Text side of a model with these, for tests.
    #[cfg(test)]
    pub(super) fn for_template(template: ChatTemplate, tokenizer: Tokenizer) -> Self {
        Self {
            controls: ControlTokens::new(tokenizer.special_tokens(None)),
            dialect: Dialect::detect(Some(template.source()), &tokenizer),
            tokenizer,
            template: Ok(template),
            generation: Ok(GenerationConfig::default()),
            end: EndTokens::default(),
            around: None,
            image_token: None,
            limit: usize::MAX,
            grammars: Grammars::new(0),
        }
    }

    /// The text side with other end tokens, for tests.
    #[cfg(test)]
    pub(super) fn with_end(self, end: &[u32]) -> Self {
        let mut tokens = EndTokens::default();
        tokens.extend(end.iter().copied());
        Self { end: tokens, ..self }
    }

    /// Refuses prompts of more than `context` tokens.
    #[doc(hidden)]
    pub fn limit_prompts(&mut self, context: usize) {
        self.limit = context;
    }

    /// Sets the placeholder of an image. An id without an added token is none.
    #[doc(hidden)]
    pub fn set_image_token(&mut self, id: Option<u32>) {
        self.image_token = id.filter(|id| self.tokenizer.is_added(*id));
        self.controls = ControlTokens::new(self.tokenizer.special_tokens(self.image_token));
    }

    /// Placeholder of an image in prompts; `None` for a model that takes no images.
    pub fn image_token(&self) -> Option<u32> {
        self.image_token
    }

    /// Whether `id` is a special token, or the placeholder of an image.
    pub(super) fn is_control(&self, id: u32) -> bool {
        self.tokenizer.is_special(id) || self.image_token == Some(id)
    }

    /// Gives grammars these bytes of the memory plan.
    #[doc(hidden)]
    pub fn set_grammar_room(&mut self, bytes: u64) {
        self.grammars = Grammars::new(bytes);
    }

    pub(super) fn grammars(&self) -> &Grammars {
        &self.grammars
    }

    pub(super) fn dialect(&self) -> &Dialect {
        &self.dialect
    }

    /// Source of the template; empty without one.
    pub(super) fn template_source(&self) -> &str {
        self.template.as_ref().map_or("", ChatTemplate::source)
    }

    /// Tokens of a prompt, which must fit the context.
    pub(super) fn encode_prompt(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let ids = self.tokenizer.encode_within(text, add_special, self.limit)?;
        ids.ok_or_else(|| self.too_long(self.limit.saturating_add(1)))
    }

    pub(super) fn too_long(&self, tokens: usize) -> Error {
        SessionError::PromptTooLong { tokens, context: self.limit }.into()
    }

    /// The chat template.
    ///
    /// # Errors
    /// There is none, or it is no valid template.
    pub fn template(&self) -> Result<&ChatTemplate, Error> {
        self.template.as_ref().map_err(TextProblem::error)
    }

    /// Tokens of plain text, with the special tokens around it that the tokenizer adds, or that
    /// `tokenizer_config.json` asks for where the class of the tokenizer follows that.
    ///
    /// # Errors
    /// The tokenizer cannot represent the text, or it has more tokens than the context.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let Some(AroundIds { bos, eos }) = self.around else {
            return self.encode_prompt(text, true);
        };
        let ids = self.encode_prompt(text, false)?;
        Ok(bos.into_iter().chain(ids).chain(eos).collect())
    }

    /// Number of tokens of [`Text::encode`], also beyond the context.
    ///
    /// # Errors
    /// The tokenizer cannot represent the text.
    pub fn count(&self, text: &str) -> Result<usize, Error> {
        let around = self.around.map(|AroundIds { bos, eos }| bos.into_iter().chain(eos).count());
        let mut count = around.unwrap_or(0);
        let counted = self.tokenizer.encode_pieces(text, around.is_none(), &mut |ids| {
            count += ids.len();
            ControlFlow::Continue(())
        });
        counted.map(|_| count)
    }

    /// Tokens of plain text that continues another one, without special tokens around it.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_prompt(text, false)
    }

    /// Tokens of a word wherever an answer may have it: at the start of a text, behind a space, and
    /// behind a line end.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn word_tokens(&self, word: &str) -> Result<Vec<Vec<u32>>, Error> {
        const LINE_END: &str = "\n";
        let bare = if word.trim_start().is_empty() { word } else { word.trim_start() };
        let mut spellings =
            vec![self.encode_continuation(bare)?, self.encode_continuation(&format!(" {bare}"))?];
        let line_end = self.encode_continuation(LINE_END)?;
        let behind = self.encode_continuation(&format!("{LINE_END}{bare}"))?;
        spellings.extend(behind.strip_prefix(line_end.as_slice()).map(<[u32]>::to_vec));
        spellings.sort_unstable();
        spellings.dedup();
        spellings.retain(|tokens| !tokens.is_empty());
        Ok(spellings)
    }

    /// Special tokens before plain text, as [`Text::encode`] adds them.
    ///
    /// # Errors
    /// The tokenizer cannot represent any text.
    pub fn start_tokens(&self) -> Result<Vec<u32>, Error> {
        /// Text between the tokens before it and those behind it.
        const PROBE: &str = "a";
        if let Some(AroundIds { bos, .. }) = self.around {
            return Ok(bos.into_iter().collect());
        }
        let (mut whole, plain) =
            (self.encode_prompt(PROBE, true)?, self.encode_prompt(PROBE, false)?);
        let start = (0..whole.len()).find(|start| whole[*start..].starts_with(&plain));
        whole.truncate(start.unwrap_or(0));
        Ok(whole)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Incremental decoder from tokens to text.
    pub fn decoder(&self) -> Decoder {
        self.tokenizer.decoder()
    }

    /// Parser of an answer to `prompt`: which of its tokens are thoughts, which are text, and which
    /// call one of `tools`. Without tools, calls are text.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn parser(&self, prompt: &[u32], tools: &ToolSet) -> Result<AnswerParser, Error> {
        // Without tools the syntax does not matter.
        let calls = if tools.is_empty() { None } else { self.call_syntax() };
        self.dialect.parser(&self.tokenizer, prompt, AnswerTools { tools, calls })
    }

    /// Syntax of the model's calls: that of its template, or the one in which prompts describe
    /// calls where the template has no tools. `None` if the template has one that is not known.
    pub fn call_syntax(&self) -> Option<CallSyntax> {
        let described = || self.template.as_ref().ok()?.described_calls();
        self.dialect.call_syntax().or_else(described)
    }

    /// Message that the tokens of an answer to `prompt` make, without an end token.
    ///
    /// # Errors
    /// As [`Text::parser`].
    pub fn message(&self, prompt: &[u32], answer: &[u32]) -> Result<Message, Error> {
        let (mut reasoning, mut text) = (String::new(), String::new());
        let mut add = |delta: Delta<'_>| match delta {
            Delta::Reasoning(piece) => reasoning.push_str(piece),
            Delta::Text(piece) => text.push_str(piece),
            Delta::CallStart { .. } | Delta::CallArguments { .. } | Delta::CallEnd { .. } => {}
        };
        let mut parser = self.parser(prompt, &ToolSet::default())?;
        for token in answer {
            parser.push(*token)?.for_each(&mut add);
        }
        parser.finish()?.for_each(&mut add);
        Ok(Message::assistant(text).reasoning(reasoning))
    }

    /// Whether answers are text only, without thoughts and marks.
    pub fn answers_are_plain(&self) -> bool {
        self.dialect.is_plain()
    }

    /// Sampling that the model's authors recommend.
    ///
    /// # Errors
    /// `generation_config.json` is broken.
    pub fn generation(&self) -> Result<&GenerationConfig, Error> {
        self.generation.as_ref().map_err(TextProblem::error)
    }

    /// Tokens that end an answer.
    pub fn end(&self) -> &EndTokens {
        &self.end
    }
}

/// Chat template of a checkpoint: `chat_template.jinja`, `chat_template.json`, that of
/// `tokenizer_config.json`, or a built-in one.
fn template(
    checkpoint: &dyn TextFiles,
    config: Result<&TokenizerConfig, &TextProblem>,
) -> Result<ChatTemplate, TextProblem> {
    let config = config.map_err(Clone::clone)?;
    let broken = |error| TextProblem::new(error, checkpoint.folder());
    let jinja = checkpoint.text_file("chat_template.jinja");
    let json = checkpoint.text_file("chat_template.json").filter(|_| jinja.is_none());
    let source = match &json {
        Some(json) => {
            TokenizerConfig::chat_template_json(json.bytes, &json.path).map_err(broken)?
        }
        None => None,
    };
    let from_json = json
        .zip(source.as_ref())
        .map(|(json, source)| TextFile { bytes: source.as_bytes(), path: json.path });
    let template =
        ChatTemplate::from_files(jinja.or(from_json).as_ref(), config).map_err(broken)?;
    let template = match template {
        None => ChatTemplate::built_in(checkpoint, config).map_err(broken)?,
        some => some,
    };
    template.ok_or_else(|| broken(ChatTemplate::missing(checkpoint.folder())))
}

/// Whether an id is an added token, or none at all.
fn is_no_text(tokenizer: &Tokenizer, id: u32) -> bool {
    tokenizer.is_added(id) || tokenizer.decode(&[id], false).is_ok_and(|text| text.is_empty())
}

/// The special token that a template puts after an answer. `None` if it puts none there, or does
/// not render a plain question and answer.
fn end_of_turn(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<u32> {
    const ANSWER: &str = "(an answer)";
    let messages = [Message::user("(a question)"), Message::assistant(ANSWER)];
    let text = template.render(&messages, false, &ChatOptions::default()).ok()?;
    let (_, after) = text.rsplit_once(ANSWER)?;
    let first = *tokenizer.encode(after.trim_start(), false).ok()?.first()?;
    tokenizer.is_special(first).then_some(first)
}

/// Ids around a text, where `tokenizer_config.json` decides.
fn around(config: &TokenizerConfig, tokenizer: &Tokenizer) -> Option<AroundIds> {
    let AroundText { bos, eos, .. } = config.around?;
    let id = |role: &str| tokenizer.token_to_id(config.special_tokens.get(role)?);
    Some(AroundIds {
        bos: if bos { id("bos_token") } else { None },
        eos: if eos { id("eos_token") } else { None },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use moeflux_model::checkpoint::Checkpoint;

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

    #[test]
    fn end_tokens_are_all_that_any_file_names() {
        let json = include_bytes!("../../tales/model/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(json, Path::new("tokenizer.json")).unwrap();
        let tokenizer_config =
            TokenizerConfig::from_bytes(br#"{"eos_token": "<|im_end|>"}"#, Path::new("t.json"))
                .unwrap();
        let find = |generation_json: &str, config: &str| {
            let generation = GenerationConfig::from_bytes(
                generation_json.as_bytes(),
                Path::new("generation_config.json"),
            )
            .unwrap();
            let config = TextFile { bytes: config.as_bytes(), path: "model/config.json".into() };
            let named = tokenizer_config.end_tokens(&tokenizer);
            EndTokens::new(&generation, &config, &named, |id| tokenizer.is_special(id))
        };
        let ids = |generation, config| find(generation, config).unwrap().ids().to_vec();
        // Ids of config.json that are ordinary text are defaults of a class.
        assert_eq!(ids(r#"{"eos_token_id": [1, 2]}"#, r#"{"eos_token_id": 3}"#), [1, 2, 4095]);
        let special =
            r#"{"eos_token_id": [4094], "text_config": {"eos_token_id": [4095, 5, 4093]}}"#;
        assert_eq!(ids(r#"{"eos_token_id": 4095}"#, special), [4095, 4094, 4093]);
        let alone = |config: &str| {
            let config = TextFile { bytes: config.as_bytes(), path: "model/config.json".into() };
            let end = EndTokens::new(&GenerationConfig::default(), &config, &[], |_| false);
            end.unwrap().ids().to_vec()
        };
        assert_eq!(alone(r#"{"eos_token_id": 3, "text_config": {"eos_token_id": 4}}"#), [3, 4]);
        assert_eq!(
            alone(r#"{"eos_token_id": null, "text_config": {"eos_token_id": [4, 5]}}"#),
            [4, 5]
        );
        assert_eq!(ids("{}", "{}"), [4095]);
        let end = find("{}", "{}").unwrap();
        assert!(end.contains(4095) && !end.contains(0));
        let none = EndTokens::new(
            &GenerationConfig::default(),
            &TextFile { bytes: b"{}", path: "c.json".into() },
            &TokenizerConfig::default().end_tokens(&tokenizer),
            |_| true,
        );
        assert_eq!(none.unwrap(), EndTokens::default());
        for config in [
            r#"{"eos_token_id": "x"}"#,
            r#"{"text_config": 3}"#,
            r#"{"text_config": {"eos_token_id": {}}}"#,
            "3",
        ] {
            let text = find("{}", config).unwrap_err().to_string();
            assert!(text.starts_with("model/config.json: "), "{text}");
        }
    }
}
