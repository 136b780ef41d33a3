//! Grammars of answers: forms, constraints and their compiled masks.

use std::{
    cell::RefCell,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use llguidance::{Matcher, api::GrammarWithLexer};
use moeflux_base::{Error, GrammarError, setters};
use moeflux_sampling::{EndTokens, MaskSource, TokenMask};

use super::{
    calls::{CallGrammar, ToolRules},
    channels,
    compile::Compiler,
    compiled_cache::CompiledCache,
    form::{AnswerForm, CallConstraint, Constraint, GrammarNote, invalid},
    lark::{LarkWriter, json_schema},
    mask::{AnswerPhase, GrammarMask},
    schema::SchemaRules,
};
use crate::{dialect::AnswerFrame, text::Text};

setters!(CallConstraint { required: bool, single: bool, lenient: bool });

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
pub struct Grammar(pub(super) Arc<CompiledGrammar>);

pub(super) struct CompiledGrammar {
    /// Before its first token.
    matcher: Mutex<Matcher>,
    pub(super) compiler: Arc<Compiler>,
    /// Marks in the answer's text at which the grammar begins; empty if it begins with the text.
    pub(super) marks: Vec<String>,
    /// Tokens that open calls.
    pub(super) call_marks: Vec<u32>,
    /// Names of messages in channels that are free.
    pub(super) free_channels: &'static [&'static str],
    pub(super) end_tokens: EndTokens,
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

    pub(super) fn matcher(&self) -> Matcher {
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
#[cfg(test)]
mod tests;
