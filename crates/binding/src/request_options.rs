//! Options of an answer.

use std::hash::{BuildHasher, Hasher};

use moeflux::{
    ChatOptions, GenerateRequest, Sampling,
    text::{AnswerForm, CallConstraint, Constraint, Text, Tool, ToolSet},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::fault::Fault;

/// Options of an answer, as in JSON. The defaults of sampling come from the model's
/// `generation_config.json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RequestOptions {
    /// Maximum tokens. Default: to the end of the context.
    pub max_tokens: Option<usize>,
    /// Temperature.
    pub temperature: Option<f32>,
    /// Number of the likeliest tokens that may be chosen; 0 for all.
    pub top_k: Option<usize>,
    /// Probability of the likeliest tokens that may be chosen.
    pub top_p: Option<f32>,
    /// Minimum probability, as a share of the likeliest token's.
    pub min_p: Option<f32>,
    /// Penalty of tokens that occurred.
    pub repetition_penalty: Option<f32>,
    /// Penalty of tokens of the answer that occurred.
    pub presence_penalty: Option<f32>,
    /// Penalty of tokens of the answer by their number.
    pub frequency_penalty: Option<f32>,
    /// Seed. Default: a random one.
    pub seed: Option<u64>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Biases of logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Number of the likeliest tokens whose log-probabilities are returned with each token's own.
    pub logprobs: Option<usize>,
    /// Whether the tokens of the prompt have log-probabilities.
    pub prompt_logprobs: bool,
    /// Form of the text.
    pub form: Option<Form>,
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether the model calls them.
    pub tool_choice: ToolChoice,
    /// Whether there is at most one call.
    pub single_call: bool,
    /// Whether keywords of a schema that cannot be enforced are left out.
    pub lenient: bool,
    /// Whether the model thinks before it answers.
    pub thinking: Option<bool>,
    /// Maximum tokens of thoughts.
    pub thinking_budget: Option<usize>,
    /// Variables of the chat template.
    pub template: Map<String, Value>,
    /// Whether the answer is text as it is: the prompt is no conversation.
    pub raw: bool,
}

/// Calls that an answer makes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(from = "String")]
pub enum ToolChoice {
    /// As the model decides.
    #[default]
    Auto,
    /// None.
    None,
    /// At least one.
    Required,
    /// Calls of this tool.
    Tool(String),
}

impl From<String> for ToolChoice {
    fn from(name: String) -> Self {
        match &*name {
            "auto" => Self::Auto,
            "none" => Self::None,
            "required" | "any" => Self::Required,
            _ => Self::Tool(name),
        }
    }
}

/// Form of an answer's text.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Form {
    /// JSON by a schema.
    Json(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a grammar in Lark.
    Lark(String),
    /// Text of a grammar in GBNF.
    Gbnf(String),
}

impl Form {
    fn answer_form(&self) -> Result<AnswerForm, Fault> {
        Ok(match self {
            Self::Json(schema) => AnswerForm::Json(schema.clone()),
            Self::Regex(pattern) => AnswerForm::Regex(pattern.clone()),
            Self::Lark(grammar) => AnswerForm::Lark(grammar.clone()),
            Self::Gbnf(grammar) => AnswerForm::Gbnf(grammar.clone()),
            Self::Choice(options) if options.is_empty() => {
                return Err(Fault::Invalid("a choice needs at least one text".to_owned()));
            }
            Self::Choice(options) => AnswerForm::choice(options),
        })
    }
}

impl RequestOptions {
    /// Request of an answer to `prompt`.
    ///
    /// # Errors
    /// A value is out of range, or the form cannot be followed.
    pub(crate) fn request(&self, text: &Text, prompt: &[u32]) -> Result<GenerateRequest, Fault> {
        let known = &text.generation()?.sampling;
        let sampling = Sampling::default()
            .temperature(self.temperature.unwrap_or(known.temperature))
            .top_k(self.top_k.unwrap_or(known.top_k))
            .top_p(self.top_p.unwrap_or(known.top_p))
            .min_p(self.min_p.unwrap_or(known.min_p))
            .repetition_penalty(self.repetition_penalty.unwrap_or(known.repetition_penalty))
            .presence_penalty(self.presence_penalty.unwrap_or(known.presence_penalty))
            .frequency_penalty(self.frequency_penalty.unwrap_or(known.frequency_penalty))
            .seed(self.seed.unwrap_or_else(random_word));
        let mut request = GenerateRequest::default()
            .sampling(sampling)
            .max_tokens(self.max_tokens)
            .end_tokens(self.stop_tokens.clone())
            .stop(self.stop.clone())
            .logit_bias(self.logit_bias.clone())
            .logprobs(self.logprobs)
            .prompt_logprobs(self.prompt_logprobs)
            .tools(self.callable());
        let mut constraint = Constraint::default();
        constraint.raw = self.raw;
        constraint.lenient = self.lenient;
        constraint.calls = self.calls()?;
        // An answer of calls has no form.
        if constraint.calls.as_ref().is_none_or(|calls| !calls.required) {
            constraint.form = self.form.as_ref().map(Form::answer_form).transpose()?;
        }
        if let Some(grammar) = text.grammar(&constraint)? {
            request.masks.push(grammar.mask(text, prompt)?);
        }
        if let Some(tokens) = self.thinking_budget {
            request.masks.extend(text.thinking_budget(prompt, tokens)?);
        }
        Ok(request)
    }

    /// Options of the chat template.
    pub fn chat(&self) -> ChatOptions {
        let thinking = self.thinking.or(self.thinking_budget.map(|tokens| tokens > 0));
        ChatOptions::default()
            .thinking(thinking)
            .tools(self.callable())
            .variables(self.template.clone())
    }

    /// Tools that the answer may call.
    pub(crate) fn callable(&self) -> ToolSet {
        match self.tool_choice {
            ToolChoice::None => ToolSet::default(),
            _ => ToolSet { tools: self.tools.clone() },
        }
    }

    fn calls(&self) -> Result<Option<CallConstraint>, Fault> {
        let mut tools = self.callable().tools;
        if let ToolChoice::Tool(name) = &self.tool_choice {
            tools.retain(|tool| tool.name == *name);
            if tools.is_empty() {
                return Err(Fault::Invalid(format!("tool_choice is {name:?}: no such tool")));
            }
        }
        let required = matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Tool(_));
        match (tools.is_empty(), required) {
            (true, true) => Err(Fault::Invalid("tool_choice is required: send tools".to_owned())),
            (true, false) => Ok(None),
            (false, _) => {
                let mut calls = CallConstraint::new(ToolSet { tools });
                (calls.required, calls.single) = (required, self.single_call);
                Ok(Some(calls))
            }
        }
    }
}

/// Random number of 32 bits: short to copy, and exact in every JSON parser.
pub(crate) fn random_word() -> u64 {
    // Hashers of the standard library have random keys.
    std::collections::hash_map::RandomState::new().build_hasher().finish() & 0xFFFF_FFFF
}
