//! Grammars: answers that follow a JSON schema, a regular expression, a grammar, or the syntax of
//! calls of tools.
//!
//! - JSON schemas with the keywords that the compiler takes: `schema/`.
//! - Compilation within limits, and the place of a keyword that cannot be enforced: `compile.rs`;
//!   results for the next request: `compiled_cache.rs`.
//! - The vocabulary as a trie of bytes: `vocabulary.rs`.
//! - Calls of tools in a model's syntax: `calls.rs`, their parameters: `parameters.rs`, by a writer
//!   of grammars, `lark.rs`.
//! - llama.cpp's notation of grammars: `gbnf.rs`.
//! - The mask of one answer, which lets thoughts be free: `mask.rs`; messages in channels:
//!   `channels.rs`.
//! - The thread that computes masks while the model computes logits: `ahead.rs`.

mod ahead;
mod calls;
mod channels;
mod compile;
mod compiled_cache;
mod gbnf;
mod lark;
mod mask;
mod parameters;
mod schema;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::{
    cell::RefCell,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use llguidance::{Matcher, api::GrammarWithLexer};
use serde_json::{Value, json};

use self::{
    calls::{CallGrammar, ToolRules},
    compile::Compiler,
    compiled_cache::CompiledCache,
    lark::{LarkWriter, json_schema},
    mask::{AnswerPhase, GrammarMask},
    schema::SchemaRules,
};
use crate::{
    base::{
        error::{Error, GrammarError},
        setters::setters,
    },
    text::{
        chat::ToolSet,
        dialect::AnswerFrame,
        sampling::{EndTokens, MaskSource, TokenMask},
        text::Text,
    },
};

/// Form of an answer's text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum AnswerForm {
    /// JSON that this schema accepts. Every keyword is enforced, or refused, unless
    /// [`Constraint::lenient`] says otherwise. An object that lists properties has no others, if
    /// the schema says nothing of them and [`Constraint::open_objects`] is not set.
    Json(Value),
    /// Text that this regular expression matches as a whole, in the syntax of Rust's `regex`.
    Regex(String),
    /// Text of this grammar, in llguidance's variant of Lark.
    Lark(String),
    /// Text of this grammar, in GBNF, the notation of llama.cpp. Where a rule is recursive, each
    /// run of its parts without recursion takes the longest match.
    Gbnf(String),
}

impl AnswerForm {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    fn schema(&self) -> Option<&Value> {
        match self {
            Self::Json(schema) => Some(schema),
            _ => None,
        }
    }
}

/// Calls of tools that an answer makes.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CallConstraint {
    /// The tools.
    pub tools: ToolSet,
    /// Whether the answer is at least one call, each with arguments by its tool's schema. If not,
    /// only the arguments of strict tools follow their schemas, wherever calls begin.
    pub required: bool,
    /// Whether there is at most one call.
    pub single: bool,
    /// Whether keywords of strict tools that cannot be enforced are left out, with a note.
    pub lenient: bool,
}

setters!(CallConstraint { required: bool, single: bool, lenient: bool });

impl CallConstraint {
    /// Calls of `tools`, which may be none.
    pub fn new(tools: ToolSet) -> Self {
        Self { tools, ..Self::default() }
    }
}

/// Constraint of an answer behind its thoughts.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Constraint {
    /// Form of the text. An answer of calls has none.
    pub form: Option<AnswerForm>,
    /// Calls. With a form, the answer has that form, or is calls.
    pub calls: Option<CallConstraint>,
    /// Whether the answer is text as it is, without the thoughts and marks of the model's dialect.
    pub raw: bool,
    /// Whether keywords of the form's schema that cannot be enforced are left out, with a note.
    pub lenient: bool,
    /// Whether an object may have properties that its schema does not list, if it says nothing of
    /// them, as the specification has it.
    pub open_objects: bool,
}

/// A keyword of a schema that is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrammarNote {
    /// Path of the keyword in the schema; for a tool it begins with the tool's name.
    pub path: String,
    /// The consequence, such as `is not enforced`.
    pub text: String,
}

impl GrammarNote {
    /// Most notes of each kind for a schema.
    pub(crate) const MOST: usize = 8;
}

impl fmt::Display for GrammarNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, text } = self;
        if path.is_empty() { f.write_str(text) } else { write!(f, "{path} {text}") }
    }
}

setters!(Constraint {
    form: impl Into<Option<AnswerForm>>,
    calls: impl Into<Option<CallConstraint>>,
    raw: bool,
    lenient: bool,
    open_objects: bool,
});

/// Grammars of a model: their memory, and the trie of its vocabulary, made at the first use.
pub(crate) struct Grammars {
    /// Bytes of the plan for grammars.
    room: u64,
    compiler: OnceLock<Result<Arc<Compiler>, String>>,
    compiled: Mutex<CompiledCache>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("room", &self.room).finish_non_exhaustive()
    }
}

impl Grammars {
    /// Grammars of a model whose plan has `room` bytes for them.
    pub(crate) fn new(room: u64) -> Self {
        Self { room, compiler: OnceLock::new(), compiled: Mutex::default() }
    }

    fn compiled(&self) -> MutexGuard<'_, CompiledCache> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn compiler(&self, text: &Text) -> Result<&Arc<Compiler>, GrammarError> {
        if self.room == 0 {
            return Err(GrammarError::NoRoom);
        }
        let compiler = self.compiler.get_or_init(|| Compiler::new(text.tokenizer()).map(Arc::new));
        compiler.as_ref().map_err(|problem| invalid("", problem.clone()))
    }
}

/// A compiled constraint. Clones share it.
#[derive(Clone)]
pub struct Grammar(Arc<CompiledGrammar>);

struct CompiledGrammar {
    /// Before its first token.
    matcher: Mutex<Matcher>,
    compiler: Arc<Compiler>,
    /// Marks in the answer's text at which the grammar begins; empty if it begins with the text.
    marks: Vec<String>,
    /// Tokens that open calls.
    call_marks: Vec<u32>,
    /// Names of messages in channels that are free.
    free_channels: &'static [&'static str],
    end_tokens: EndTokens,
    raw: bool,
    notes: Vec<GrammarNote>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("marks", &self.0.marks).finish_non_exhaustive()
    }
}

impl Text {
    /// Compiles a constraint; `None` if it allows every answer. The first call makes the trie of
    /// the vocabulary, which takes a second for a large one.
    ///
    /// # Errors
    /// [`GrammarError`]: the plan has no room; the constraint is not valid, has a keyword that
    /// cannot be enforced, or takes too long; the model has no syntax of calls.
    pub fn grammar(&self, constraint: &Constraint) -> Result<Option<Grammar>, Error> {
        let calls = constraint.calls.as_ref();
        let calls = calls.filter(|calls| {
            calls.required
                || constraint.form.is_some() && !calls.tools.is_empty()
                || calls.tools.iter().any(|tool| tool.strict)
        });
        if constraint.form.is_none() && calls.is_none() {
            return Ok(None);
        }
        let compiler = self.grammars().compiler(self)?;
        let key = CompiledCache::key(constraint);
        if let Some(kept) = key.as_ref().and_then(|key| self.grammars().compiled().get(key)) {
            return Ok(Some(kept));
        }
        let syntax = match calls {
            Some(_) => Some(self.call_syntax().ok_or_else(|| {
                invalid("", "the model's chat template has no calls of tools that are known")
            })?),
            None => None,
        };
        let rules =
            SchemaRules { lenient: constraint.lenient, open_objects: constraint.open_objects };
        let mut lark = LarkWriter::new(compiler.vocabulary().clone());
        let mut notes = Vec::new();
        let schema = constraint.form.as_ref().and_then(AnswerForm::schema);
        let answer = match (schema, &constraint.form) {
            (Some(schema), _) => {
                json_schema(schema)?;
                let normal = compiler.schema(schema, rules, false)?;
                notes = normal.notes;
                Some(lark.json(json_schema(&normal.schema)?))
            }
            (None, Some(form)) => Some(lark.form(form)?),
            (None, None) => None,
        };
        let has_channels = !constraint.raw && self.dialect().has_channels();
        let mut notes_of_calls = Vec::new();
        let calls = match (calls, syntax) {
            (Some(form), Some(syntax)) => {
                let template = self.template_source();
                let notes = RefCell::new(Vec::new());
                let schemas = SchemaRules { lenient: form.lenient, ..rules };
                let rules = ToolRules { form, template, compiler, schemas, notes };
                let calls = CallGrammar::write(syntax, &rules, &mut lark)?;
                notes_of_calls = rules.notes.into_inner();
                Some(calls)
            }
            _ => None,
        };
        let is_watch = answer.is_none() && constraint.calls.as_ref().is_some_and(|c| !c.required);
        let (mut marks, mut free_channels): (Vec<String>, &'static [&'static str]) = (vec![], &[]);
        let openings = calls.as_ref().map_or(&[][..], |calls| calls.openings);
        let call_marks = openings.iter().filter_map(|mark| compiler.vocabulary().mark(mark));
        let call_marks = call_marks.collect();
        let start = match (has_channels, &answer, &calls) {
            (true, answer, calls) => {
                let calls = calls.as_ref().map(|calls| calls.rest.as_str());
                free_channels = if is_watch { channels::FREE_CHANNELS } else { channels::THOUGHTS };
                channels::expression(&mut lark, answer.as_deref(), calls, free_channels)
            }
            (false, answer, Some(calls)) => {
                if is_watch {
                    marks.extend(calls.openings.iter().map(|mark| (*mark).to_owned()));
                    calls.rest.clone()
                } else {
                    let all = calls.all(&lark);
                    answer.as_ref().map_or(all.clone(), |answer| format!("{answer} | {all}"))
                }
            }
            (false, Some(answer), None) => answer.clone(),
            (false, None, None) => return Ok(None),
        };
        let main = GrammarWithLexer::from_lark(lark.text(&start));
        let bytes = lark.schema_bytes();
        let matcher = compiler.compile(lark.with_main(main), schema, rules, bytes)?;
        notes.append(&mut notes_of_calls);
        let grammar = Grammar(Arc::new(CompiledGrammar {
            matcher: Mutex::new(matcher),
            compiler: Arc::clone(compiler),
            marks,
            call_marks,
            free_channels,
            end_tokens: self.end().clone(),
            raw: constraint.raw,
            notes,
        }));
        if let Some(key) = key {
            self.grammars().compiled().insert(key, grammar.clone());
        }
        Ok(Some(grammar))
    }
}

impl Grammar {
    /// Mask of an answer to `prompt`, which may open thoughts: those are free, up to their end.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn mask(&self, text: &Text, prompt: &[u32]) -> Result<Arc<dyn MaskSource>, Error> {
        let frame = match self.0.raw {
            true => AnswerFrame::Text,
            false => text.dialect().frame(text.tokenizer(), prompt)?,
        };
        Ok(Arc::new(AnswerGrammar { grammar: self.clone(), frame }))
    }

    /// Keywords of schemas that are not enforced: formats that are not known, keywords that
    /// constrain nothing where they stand, and all that lenient rules leave out.
    pub fn notes(&self) -> &[GrammarNote] {
        &self.0.notes
    }

    fn matcher(&self) -> Matcher {
        self.0.matcher.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Grammar of the answer to one prompt.
#[derive(Debug)]
struct AnswerGrammar {
    grammar: Grammar,
    frame: AnswerFrame,
}

impl MaskSource for AnswerGrammar {
    fn start(&self) -> Result<Box<dyn TokenMask>, Error> {
        let phase = AnswerPhase::first(&self.frame, !self.grammar.0.marks.is_empty());
        Ok(Box::new(GrammarMask::new(self.grammar.clone(), self.frame.clone(), phase)))
    }
}

/// A problem of a constraint at a path of its schema.
fn invalid(path: impl Into<String>, problem: impl Into<String>) -> GrammarError {
    GrammarError::Invalid { path: path.into(), problem: problem.into() }
}
