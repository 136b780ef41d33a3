//! A chat template and its rendering.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    str,
    sync::{Arc, OnceLock},
    time::Duration,
};

use minijinja::{
    AutoEscape, Environment, Value,
    syntax::SyntaxConfig,
    value::{Rest, Serde},
};
use minijinja_contrib::globals;
use moeflux_base::{Error, TextFile, TextFiles, seam::json, setters};
use serde::{Deserialize, Serialize};

use super::{
    caps::{TemplateCaps, ToolsText},
    literal::Literal,
    message::{Message, MessageImage},
    normal_form::NormalForm,
    python,
    render::{RenderFailure, RenderLimits, on_limited_thread},
    template_message::TemplateMessage,
    tools::ToolSet,
};
use crate::{dialect::CallSyntax, tokenizer::TokenizerConfig};

/// Placeholder for an answer, to find the text that follows it. No template contains it.
const ANSWER_PLACEHOLDER: &str = "(what was answered)";

/// Maximum bytes of a template's source. Published ones have less than a tenth.
const MAX_SOURCE: usize = 1 << 20;

/// Fuel of one rendering: instructions, and 64 bytes of text each. It doubles as a bound on
/// memory: 64 MiB.
const BASE_FUEL: u64 = 1 << 20;

/// Further fuel per byte of the messages and variables.
const FUEL_PER_BYTE: u64 = 8;

/// Memory of one rendering in a program that counts it, without that of its input.
const BASE_MEMORY: usize = 64 << 20;

/// Further memory per byte of the messages and variables.
const MEMORY_PER_BYTE: usize = 16;

/// Wall time of one rendering. Those of long conversations take milliseconds, and more on a machine
/// with much other work.
const DEADLINE: Duration = Duration::from_secs(30);

/// Built-in templates. The first line of each names its `model_type`.
const BUILT_IN: [&str; 1] = [include_str!("dsml.jinja")];

/// Variables of a template besides the messages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ChatOptions {
    /// Whether the model thinks before it answers, for templates with that option
    /// (`enable_thinking`, and `thinking` in DeepSeek's). Default: the template's default.
    pub thinking: Option<bool>,
    /// Further variables by the template's names (gpt-oss: `reasoning_effort`). They override all
    /// others.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Tools that the model may call.
    pub tools: ToolSet,
}

setters!(ChatOptions {
    thinking: impl Into<Option<bool>>,
    tools: ToolSet,
    variables: serde_json::Map<String, serde_json::Value>,
});

/// Text of a conversation.
#[derive(Debug)]
pub(crate) struct RenderedChat {
    pub(crate) text: String,
    /// Images of the messages, in the order of their placeholders in the text.
    pub(crate) images: Vec<MessageImage>,
}

/// A chat template: Jinja with the Python methods and helpers that `transformers` provides
/// (`raise_exception`, `strftime_now` in UTC, `tojson` without HTML escapes, loop controls,
/// `{% generation %}`).
///
/// Templates come from strangers. Fuel bounds the work of a rendering and the text that it makes;
/// it has a deadline, and where the program counts its allocations
/// ([`count_allocation`](super::count_allocation)), a limit of memory.
#[derive(Debug)]
pub struct ChatTemplate {
    compiled: Arc<TemplateSource>,
    special_tokens: BTreeMap<String, String>,
    path: PathBuf,
    /// Capabilities, found at the first conversation.
    caps: OnceLock<TemplateCaps>,
    /// Limit that a rendering exceeded. Its thread is left behind, so there is no second one.
    exceeded: OnceLock<&'static str>,
}

/// Source of a template with the environment that compiles it.
#[derive(Debug)]
struct TemplateSource {
    env: Environment<'static>,
    source: String,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` become variables, such as `bos_token` with the value
    /// `<s>`; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::Text`] if the source is not a valid template.
    pub fn new(
        source: &str,
        path: &Path,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<ChatTemplate, Error> {
        if source.len() > MAX_SOURCE {
            let problem = format!("it has {} bytes, more than {MAX_SOURCE}", source.len());
            return Err(advise(path, &problem));
        }
        let env = environment().map_err(|e| advise(path, &e))?;
        let compiled = Arc::new(TemplateSource { env, source: python::rewritten(source) });
        let template = ChatTemplate {
            compiled,
            special_tokens: special_tokens.clone(),
            path: path.to_path_buf(),
            caps: OnceLock::new(),
            exceeded: OnceLock::new(),
        };
        template.limited(0, |compiled| compiled.compile().map(drop))?;
        Ok(template)
    }

    /// Source of the template, as it is compiled.
    pub fn source(&self) -> &str {
        &self.compiled.source
    }

    /// The template of a checkpoint: its `chat_template.jinja`, or else the template in
    /// `tokenizer_config.json`. `None` without either, see [`ChatTemplate::missing`].
    ///
    /// # Errors
    /// [`Error::Text`] if the source is not a valid template or not UTF-8.
    pub fn from_files(
        jinja: Option<&TextFile<'_>>,
        config: &TokenizerConfig,
    ) -> Result<Option<ChatTemplate>, Error> {
        let (source, path) = match (jinja, &config.chat_template) {
            (Some(TextFile { bytes, path }), _) => {
                (str::from_utf8(bytes).map_err(|e| advise(path, &e))?, path.as_path())
            }
            (None, Some(source)) => (source.as_str(), config.path.as_path()),
            (None, None) => return Ok(None),
        };
        ChatTemplate::new(source, path, &config.special_tokens).map(Some)
    }

    /// Built-in template for models that are published without one. Their encoding is code.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub(crate) fn built_in(
        checkpoint: &dyn TextFiles,
        config: &TokenizerConfig,
    ) -> Result<Option<ChatTemplate>, Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct ModelConfig {
            model_type: String,
        }
        let Some(file) = checkpoint.text_file("config.json") else { return Ok(None) };
        let model: ModelConfig = json::parse(file.bytes).unwrap_or_default();
        let mark = format!(" model_type {}:", model.model_type);
        let is_for = |source: &&&str| source.lines().next().is_some_and(|l| l.contains(&mark));
        BUILT_IN
            .iter()
            .find(is_for)
            .map(|source| ChatTemplate::new(source, &config.path, &config.special_tokens))
            .transpose()
    }

    /// Problem with a conversation.
    pub(crate) fn problem(&self, problem: String) -> Error {
        Error::Text { path: self.path.clone(), problem }
    }

    /// Error for a checkpoint in `folder` that lacks a template.
    pub fn missing(folder: &Path) -> Error {
        let problem = "the checkpoint has no chat template (chat_template.jinja, or chat_template \
                       in tokenizer_config.json); it may be a base model: --raw gives it the \
                       prompt unchanged";
        Error::Text { path: folder.to_path_buf(), problem: problem.into() }
    }

    /// Renders `messages` as they are. With `add_generation_prompt` the text ends at the start of
    /// the assistant's answer.
    ///
    /// # Errors
    /// [`Error::Text`] if the template fails or rejects the messages (`raise_exception`), with its
    /// reason; also if the images of a message are not in its content.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let form = NormalForm::as_is(messages, &options.tools).map_err(|p| self.problem(p))?;
        self.render_form(&form, add_generation_prompt, options, &Literal::AS_IS)
    }

    /// Renders a conversation in the form that the template takes, so that no text is lost: see
    /// [`NormalForm`]. Strings of the conversation and of the options become `literal`.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; also if a message has a result of a tool without a call, or
    /// images that the template does not take.
    pub(crate) fn render_conversation(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        options: &ChatOptions,
        literal: &Literal<'_>,
    ) -> Result<RenderedChat, Error> {
        let caps = match messages {
            // Only the template can say that it needs some.
            [] => &TemplateCaps::ALL,
            _ => self.caps()?,
        };
        let render = |caps: &TemplateCaps| {
            let form = NormalForm::new(messages, &options.tools, caps, literal)
                .map_err(|problem| self.problem(problem))?;
            let text = self.render_form(&form, add_generation_prompt, options, literal)?;
            Ok(RenderedChat { text, images: form.images() })
        };
        let rendered = render(caps);
        match &rendered {
            // A template may reject what no probe has.
            Err(_) if !messages.is_empty() && caps.plain() != *caps => {
                render(&caps.plain()).or(rendered)
            }
            _ => rendered,
        }
    }

    /// Syntax in which prompts describe calls, as the template shows no tools. `None` if it shows
    /// them itself.
    pub(crate) fn described_calls(&self) -> Option<CallSyntax> {
        let caps = self.caps().ok().filter(|caps| !caps.tools)?;
        Some(match caps.tools_text {
            ToolsText::Tags => CallSyntax::Json,
            ToolsText::Headings => CallSyntax::Deepseek,
        })
    }

    /// Capabilities of the template.
    ///
    /// # Errors
    /// Rendering exceeds a limit.
    fn caps(&self) -> Result<&TemplateCaps, Error> {
        if let Some(caps) = self.caps.get() {
            return Ok(caps);
        }
        let variables = self.variables(true, &ChatOptions::default(), &Literal::AS_IS);
        let caps = self.limited(0, move |compiled| {
            Ok(TemplateCaps::probe(&|messages, tools| {
                let mut variables = variables.clone();
                insert_messages(&mut variables, messages, tools);
                compiled.render(variables, BASE_FUEL).ok()
            }))
        })?;
        Ok(self.caps.get_or_init(|| caps))
    }

    fn render_form(
        &self,
        form: &NormalForm,
        add_generation_prompt: bool,
        options: &ChatOptions,
        literal: &Literal<'_>,
    ) -> Result<String, Error> {
        let mut variables = BTreeMap::new();
        insert_messages(&mut variables, &form.messages, &form.tools);
        variables.append(&mut self.variables(add_generation_prompt, options, literal));
        let given = serde_json::Value::Object(options.variables.clone()).to_string().len();
        let input = form.len().saturating_add(given);
        let fuel = BASE_FUEL.saturating_add((input as u64).saturating_mul(FUEL_PER_BYTE));
        self.limited(input, move |compiled| compiled.render(variables, fuel))
    }

    /// Variables of a rendering besides messages and tools.
    fn variables(
        &self,
        add_generation_prompt: bool,
        options: &ChatOptions,
        literal: &Literal<'_>,
    ) -> BTreeMap<String, Value> {
        let mut variables: BTreeMap<String, Value> = BTreeMap::new();
        let mut insert = |name: &str, value: Value| variables.insert(name.to_owned(), value);
        for (role, token) in &self.special_tokens {
            insert(role, Value::from(token));
        }
        insert("add_generation_prompt", Value::from(add_generation_prompt));
        // `transformers` always defines it, and templates compare it with none.
        insert("documents", Value::from(()));
        if let Some(thinking) = options.thinking {
            for name in ["enable_thinking", "thinking"] {
                insert(name, Value::from(thinking));
            }
        }
        for (name, value) in &options.variables {
            insert(name, Value::from(Serde(literal.json(value.clone()))));
        }
        variables
    }

    /// Runs a part of a rendering within its limits. `input` is the size of messages and variables.
    fn limited<T: Send + 'static>(
        &self,
        input: usize,
        run: impl FnOnce(&TemplateSource) -> Result<T, minijinja::Error> + Send + 'static,
    ) -> Result<T, Error> {
        if let Some(exceeded) = self.exceeded.get() {
            return Err(advise(&self.path, exceeded));
        }
        let memory = BASE_MEMORY.saturating_add(input.saturating_mul(MEMORY_PER_BYTE));
        let limits = RenderLimits { memory, time: DEADLINE };
        let compiled = self.compiled.clone();
        // An error may hold values of the template. Nested ones are dropped by recursion, for which
        // the rendering thread has the stack.
        let run = move || run(&compiled).map_err(|e| e.to_string());
        let exceeded = match on_limited_thread(limits, run) {
            Ok(rendered) => return rendered.map_err(|e| advise(&self.path, &e)),
            Err(RenderFailure::Thread(error)) => return Err(advise(&self.path, &error)),
            Err(RenderFailure::Panic) => return Err(advise(&self.path, &"its renderer panicked")),
            Err(RenderFailure::Memory) => "it takes more than 64 MiB",
            Err(RenderFailure::Time) => "it takes longer than 30 seconds",
        };
        Err(advise(&self.path, self.exceeded.get_or_init(|| exceeded)))
    }

    /// Renders the text after an answer: the end of the answer, `question` as `literal` text, and
    /// the start of the next answer.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; also if the template does not include answers verbatim.
    pub(crate) fn render_follow_up(
        &self,
        question: &str,
        options: &ChatOptions,
        literal: &Literal<'_>,
    ) -> Result<String, Error> {
        let messages = [
            Message::user("(a question)"),
            Message::assistant(ANSWER_PLACEHOLDER),
            Message::user(literal.text(question)),
        ];
        let form = NormalForm::as_is(&messages, &options.tools).map_err(|p| self.problem(p))?;
        let rendered = self.render_form(&form, true, options, literal)?;
        // The first match is the answer, even if the question contains the placeholder.
        match rendered.split_once(ANSWER_PLACEHOLDER) {
            Some((_, follow_up)) => Ok(follow_up.to_owned()),
            None => {
                let problem = "the chat template does not show previous answers, so a conversation \
                               cannot be continued; --raw runs without the template";
                Err(self.problem(problem.into()))
            }
        }
    }
}

/// Adds messages and tools to the variables of a rendering.
fn insert_messages(
    variables: &mut BTreeMap<String, Value>,
    messages: &[TemplateMessage],
    tools: &[serde_json::Value],
) {
    let messages = messages.iter().map(TemplateMessage::value).collect();
    variables.insert("messages".to_owned(), messages);
    // `transformers` always defines them, and templates compare them with none.
    let tools = if tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) };
    variables.insert("tools".to_owned(), tools);
}

impl TemplateSource {
    /// Compiles the template, once per answer: a compiled template borrows its source.
    fn compile(&self) -> Result<minijinja::Template<'_, '_>, minijinja::Error> {
        self.env.template_from_named_str("chat template", &self.source)
    }

    fn render(
        &self,
        variables: BTreeMap<String, Value>,
        fuel: u64,
    ) -> Result<String, minijinja::Error> {
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        env.template_from_named_str("chat template", &self.source)?.render(Value::from(variables))
    }
}

fn advise(path: &Path, problem: &dyn fmt::Display) -> Error {
    let problem = format!("the chat template fails: {problem}; --raw runs without the template");
    Error::Text { path: path.to_path_buf(), problem }
}

/// Jinja environment with the settings of `transformers`.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    // Errors name the undefined value, also in release builds.
    env.set_debug(true);
    env.set_formatter(|out, state, value| match value.as_str() {
        Some(text) => out.write_str(text).map_err(minijinja::Error::from),
        None => out.write_str(&python::python_str(state, value)?).map_err(minijinja::Error::from),
    });
    env.set_unknown_method_callback(python::call_method);
    python::add_filters(&mut env);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_function("range", python::range);
    env.add_function("joiner", globals::joiner);
    env.add_function("cycler", |items: Rest<Value>| globals::cycler(items.to_vec()));
    env.add_function("raise_exception", python::raise_exception);
    env.add_function("strftime_now", python::strftime_now);
    Ok(env)
}
#[cfg(test)]
mod tests;
