//! Compilation of grammars within limits of time and memory.

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{InferenceCapabilities, TokEnv, TokTrie, TokenId, TokenizerEnv},
};
use serde_json::Value;

use super::{
    AnswerForm, ahead::MaskThread, invalid, lark::json_schema, vocabulary::GrammarVocabulary,
};
use crate::{
    base::error::{Error, GrammarError},
    text::tokenizer::Tokenizer,
};

/// Longest time of a compilation. Usual schemas take milliseconds.
const COMPILE_TIME: Duration = Duration::from_millis(900);

/// Most compilations at once, for which others wait as long as one may take. One that takes too
/// long goes on until the library ends it.
const MAX_COMPILING: usize = 4;

/// Stack of the thread that compiles. Rules nest as deep as the schema.
const COMPILE_STACK: usize = 64 << 20;

/// Most states of a grammar's lexer, of 1 to 2 KiB each.
const LEXER_STATES: usize = 20_000;

/// Most schemas that are tried to find the keyword that cannot be enforced.
const MAX_TRIES: usize = 64;

/// Longest problem in characters.
const MAX_PROBLEM: usize = 300;

/// Keywords whose value is a schema, a list of schemas, or a map of names to schemas.
const SUBSCHEMAS: [&str; 12] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "anyOf",
    "oneOf",
    "allOf",
    "$defs",
    "definitions",
    "not",
];

/// Keyword that names the dialect of a whole schema. All parts have it while they are tried.
const DIALECT: &str = "$schema";

/// Keywords that hold schemas for references, or only describe.
const NOT_ENFORCED: [&str; 9] = [
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "title",
    "description",
    "default",
    "examples",
    "x-guidance",
];

/// The trie and the model's tokenizer as the library's. Any tokens may spell a text that the
/// grammar forces.
struct TrieTokenizer {
    trie: Arc<TokTrie>,
    tokenizer: Tokenizer,
}

impl TokenizerEnv for TrieTokenizer {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let text = std::str::from_utf8(bytes).ok();
        let tokens = text.and_then(|text| self.tokenizer.encode(text, false).ok());
        // Some tokenizers add a space, and marks are no text.
        let tokens = tokens.filter(|tokens| self.trie.decode_raw(tokens) == bytes);
        tokens.unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Compiler of grammars over a vocabulary.
pub(super) struct Compiler {
    factory: Arc<ParserFactory>,
    vocabulary: GrammarVocabulary,
    compiling: Arc<Compiling>,
    masks: MaskThread,
}

impl Compiler {
    /// # Errors
    /// The library's, as text.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let vocabulary = GrammarVocabulary::new(tokenizer);
        let (trie, tokenizer) = (Arc::clone(&vocabulary.trie), tokenizer.clone());
        let env: TokEnv = Arc::new(TrieTokenizer { trie, tokenizer });
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[])
            .map_err(|error| error.to_string())?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = LEXER_STATES;
        limits.verbose_errors = false;
        let masks = MaskThread::default();
        Ok(Self { factory: Arc::new(factory), vocabulary, compiling: Arc::default(), masks })
    }

    /// The thread that computes masks.
    pub(super) fn masks(&self) -> &MaskThread {
        &self.masks
    }

    pub(super) fn vocabulary(&self) -> &GrammarVocabulary {
        &self.vocabulary
    }

    /// Compiles a grammar. `form` is the part that the client wrote, in which the problem is looked
    /// for.
    ///
    /// # Errors
    /// The grammar is not valid, has a keyword that cannot be enforced, or takes too long.
    pub(super) fn compile(
        &self,
        grammar: TopLevelGrammar,
        form: Option<&AnswerForm>,
    ) -> Result<Matcher, Error> {
        let form = form.cloned();
        self.limited(move |factory| {
            let problem = match started(factory, grammar) {
                Ok(matcher) => return Ok(matcher),
                Err(problem) => problem,
            };
            Err(match form {
                Some(AnswerForm::Json(schema)) => blame(factory, &schema, problem),
                _ => invalid("", problem),
            })
        })
    }

    /// Compiles a schema to find out whether it can be enforced.
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub(super) fn check_schema(&self, schema: &Value) -> Result<(), Error> {
        let grammar = TopLevelGrammar::from_json_schema(json_schema(schema)?);
        self.compile(grammar, Some(&AnswerForm::Json(schema.clone()))).map(|_| ())
    }

    /// Runs a compilation on a thread with a large stack, within the time limit.
    fn limited<T: Send + 'static>(
        &self,
        compile: impl FnOnce(&ParserFactory) -> Result<T, GrammarError> + Send + 'static,
    ) -> Result<T, Error> {
        let slot = CompileSlot::take(&self.compiling).ok_or(GrammarError::Busy)?;
        let factory = Arc::clone(&self.factory);
        let (result, results) = mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name("grammar".into())
            .stack_size(COMPILE_STACK)
            .spawn(move || {
                let _slot = slot;
                // The caller may have given up.
                let _ = result.send(compile(&factory));
            })
            .map_err(Error::thread("that compiles a grammar"))?;
        match results.recv_timeout(COMPILE_TIME) {
            Ok(compiled) => Ok(compiled?),
            Err(RecvTimeoutError::Timeout) => {
                Err(GrammarError::TooSlow { milliseconds: COMPILE_TIME.as_millis() }.into())
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(invalid("", "the compiler failed on this grammar").into())
            }
        }
    }
}

/// Number of the compilations that run.
#[derive(Default)]
struct Compiling {
    running: Mutex<usize>,
    ended: Condvar,
}

/// Place among the compilations. Given back when it is dropped.
struct CompileSlot(Arc<Compiling>);

impl CompileSlot {
    /// Waits for a place; `None` if none is free in time.
    fn take(compiling: &Arc<Compiling>) -> Option<Self> {
        let running = compiling.running.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |running: &mut usize| *running >= MAX_COMPILING;
        let waited = compiling.ended.wait_timeout_while(running, COMPILE_TIME, is_full);
        let (mut running, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *running += 1;
        Some(Self(Arc::clone(compiling)))
    }
}

impl Drop for CompileSlot {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}

/// A matcher before its first token, or the problem in one line.
fn started(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, String> {
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    // The first mask finds what the lexer cannot take.
    let first = match matcher.get_error() {
        Some(problem) => Err(problem),
        None => match matcher.is_accepting() {
            Ok(true) => Ok(()),
            Ok(false) => matcher.clone().compute_mask().map(|_| ()).map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        },
    };
    first.map(|()| matcher).map_err(|problem| one_line(&problem))
}

/// The first line of a problem, at a bearable length.
fn one_line(problem: &str) -> String {
    let line = problem.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("invalid");
    line.chars().take(MAX_PROBLEM).collect()
}

/// The error of a schema that does not compile, with the path of the keyword.
fn blame(factory: &ParserFactory, schema: &Value, problem: String) -> GrammarError {
    let mut bare = schema.clone();
    let had_dialect = bare.as_object_mut().is_some_and(|map| map.shift_remove(DIALECT).is_some());
    let mut search = KeywordSearch { factory, root: &bare, tries: 1 };
    let found = match had_dialect && search.problem(&bare).is_none() {
        true => FailedSchema::keyword("", DIALECT, &problem),
        false => {
            KeywordSearch { factory, root: schema, tries: MAX_TRIES }.descend(schema, "", problem)
        }
    };
    invalid(found.path, found.problem)
}

/// A schema that does not compile alone.
struct FailedSchema {
    path: String,
    problem: String,
}

impl FailedSchema {
    /// A schema at `path` whose keyword cannot be enforced.
    fn keyword(path: &str, keyword: &str, problem: &str) -> Self {
        let problem = format!("cannot be enforced: {problem}");
        Self { path: join(path, keyword), problem }
    }
}

/// Search for the smallest part of a schema that does not compile.
struct KeywordSearch<'a> {
    factory: &'a ParserFactory,
    root: &'a Value,
    tries: usize,
}

impl KeywordSearch<'_> {
    fn descend(&mut self, schema: &Value, path: &str, problem: String) -> FailedSchema {
        let Some(map) = schema.as_object() else {
            return FailedSchema { path: path.to_owned(), problem };
        };
        for keyword in SUBSCHEMAS {
            let Some(value) = map.get(keyword) else { continue };
            for (name, child) in children(keyword, value) {
                let path = join(path, &name);
                if let Some(problem) = self.problem(child) {
                    return self.descend(child, &path, problem);
                }
            }
        }
        // Without the keyword the rest compiles; or of several the first one alone does not.
        let keywords = map.iter().filter(|(key, _)| !NOT_ENFORCED.contains(&key.as_str()));
        let keywords: Vec<_> = keywords.collect();
        for (keyword, _) in &keywords {
            if self.compiles_without(schema, keyword) {
                return FailedSchema::keyword(path, keyword, &problem);
            }
        }
        for (keyword, value) in keywords {
            let alone = serde_json::Map::from_iter([(keyword.clone(), value.clone())]);
            if let Some(problem) = self.problem(&Value::Object(alone)) {
                return FailedSchema::keyword(path, keyword, &problem);
            }
        }
        FailedSchema { path: path.to_owned(), problem }
    }

    /// Whether a part has this keyword, and compiles without it.
    fn compiles_without(&mut self, schema: &Value, keyword: &str) -> bool {
        let mut rest = schema.as_object().cloned().unwrap_or_default();
        let has_keyword = rest.shift_remove(keyword).is_some() && self.tries > 0;
        has_keyword && self.problem(&Value::Object(rest)).is_none()
    }

    /// Problem of a part alone, with the definitions of the whole.
    fn problem(&mut self, schema: &Value) -> Option<String> {
        self.tries = self.tries.checked_sub(1)?;
        let mut alone = schema.as_object()?.clone();
        for keyword in ["$defs", "definitions", "$schema"] {
            if let Some(definitions) = self.root.get(keyword) {
                alone.entry(keyword).or_insert_with(|| definitions.clone());
            }
        }
        let alone = json_schema(&Value::Object(alone)).ok()?;
        started(self.factory, TopLevelGrammar::from_json_schema(alone)).err()
    }
}

/// Schemas in the value of a keyword, with their paths.
fn children<'a>(keyword: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    match value {
        Value::Array(list) => {
            list.iter().enumerate().map(|(i, child)| (format!("{keyword}[{i}]"), child)).collect()
        }
        Value::Object(map)
            if matches!(keyword, "properties" | "patternProperties" | "$defs" | "definitions") =>
        {
            map.iter().map(|(name, child)| (format!("{keyword}.{name}"), child)).collect()
        }
        child => vec![(keyword.to_owned(), child)],
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilations_beyond_the_limit_wait_for_others() {
        let compiling = Arc::new(Compiling::default());
        let mut slots: Vec<_> = (0..MAX_COMPILING).map(|_| CompileSlot::take(&compiling)).collect();
        assert!(slots.iter().all(Option::is_some));
        assert!(CompileSlot::take(&compiling).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| CompileSlot::take(&compiling).is_some());
            slots.pop();
            assert!(waiting.join().unwrap());
        });
        assert_eq!(*compiling.running.lock().unwrap(), MAX_COMPILING - 1);
    }
}
