//! Compilation of grammars within limits of time and memory.

use std::{
    collections::VecDeque,
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
use moeflux_base::{Error, GrammarError};
use serde_json::Value;

use super::{
    ahead::MaskThread,
    form::{GrammarNote, invalid},
    lark::json_schema,
    schema::{self, SchemaPlace, SchemaRules},
    vocabulary::GrammarVocabulary,
};
use crate::tokenizer::Tokenizer;

/// Longest time of a compilation. Usual schemas take milliseconds.
const COMPILE_TIME: Duration = Duration::from_millis(900);

/// Most compilations at once. One that takes too long goes on until the library ends it.
const MAX_COMPILING: usize = 4;

/// Most bytes of schemas that are compiled at once, over all threads. A longer one is taken apart
/// alone. A byte of a schema without descriptions takes some 400 bytes to compile, so that all
/// compilations together stay within the plan's line for grammars.
const MAX_COMPILED_BYTES: usize = 40 << 10;

/// Most bytes of the schemas of one grammar, without descriptions.
pub(super) const MAX_GRAMMAR_BYTES: usize = 48 << 10;

/// Longest wait for other compilations, in the order of arrival.
const QUEUE_TIME: Duration = Duration::from_secs(20);

/// Stack of the thread that compiles. Rules nest as deep as the schema.
const COMPILE_STACK: usize = 64 << 20;

/// Most states of a grammar's lexer, of 1 to 2 KiB each.
const LEXER_STATES: usize = 20_000;

/// Most schemas that are tried to find the keyword that cannot be enforced.
const MAX_TRIES: usize = 64;

/// Most keywords of a schema that lenient rules leave out.
const MAX_RELAXED: usize = 64;

/// Longest problem in characters.
const MAX_PROBLEM: usize = 300;

/// Keywords that only describe.
const DESCRIPTIONS: [&str; 5] = ["title", "description", "default", "examples", "$comment"];

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

/// A schema with the keywords that the library takes.
pub(super) struct NormalSchema {
    pub(super) schema: Value,
    pub(super) notes: Vec<GrammarNote>,
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

    /// Compiles a grammar. `schema` is the part that the client wrote, in which the problem is
    /// looked for. `bytes` is the length of all schemas in the grammar.
    ///
    /// # Errors
    /// The grammar is not valid, has a keyword that cannot be enforced, or takes too long.
    pub(super) fn compile(
        &self,
        grammar: TopLevelGrammar,
        schema: Option<&Value>,
        rules: SchemaRules,
        bytes: usize,
    ) -> Result<Matcher, Error> {
        check_length(bytes)?;
        let schema = schema.cloned();
        self.limited(bytes, move |factory| {
            let problem = match started(factory, grammar) {
                Ok(matcher) => return Ok(matcher),
                Err(problem) => problem,
            };
            Err(match schema {
                Some(schema) => blame(factory, &schema, rules, problem),
                None => invalid("", problem),
            })
        })
    }

    /// The schema with the keywords that the library takes, and notes of the others.
    /// Lenient rules, and `checks`, compile it to find out whether it can be enforced.
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub(super) fn schema(
        &self,
        schema: &Value,
        rules: SchemaRules,
        checks: bool,
    ) -> Result<NormalSchema, Error> {
        let bytes = bare_length(schema);
        // Far more than could be left, before it is copied.
        if bytes > 4 * MAX_GRAMMAR_BYTES {
            check_length(bytes)?;
        }
        let mut schema = schema.clone();
        self.limited(bytes, move |factory| {
            let mut notes = schema::notes(&schema);
            for _ in 0..MAX_RELAXED {
                let problem = match enforced(factory, &schema, rules, checks || rules.lenient) {
                    Ok(schema) => return Ok(NormalSchema { schema, notes }),
                    Err(problem) => problem,
                };
                let GrammarError::Invalid { path, problem: reason } = &problem else {
                    return Err(problem);
                };
                let place = SchemaPlace::find(&schema, path).filter(|_| rules.lenient);
                if place.and_then(|place| place.remove(&mut schema)).is_none() {
                    return Err(problem);
                }
                let text = reason.trim_start_matches("cannot be enforced: ");
                let text = format!("is not enforced: {text}");
                notes.insert(0, GrammarNote { path: path.clone(), text });
            }
            Err(invalid("", "the schema has too many keywords that cannot be enforced"))
        })
    }

    /// Runs a compilation on a thread with a large stack, within the time limit.
    fn limited<T: Send + 'static>(
        &self,
        bytes: usize,
        compile: impl FnOnce(&ParserFactory) -> Result<T, GrammarError> + Send + 'static,
    ) -> Result<T, Error> {
        let slot =
            CompileSlot::take(&self.compiling, bytes, QUEUE_TIME).ok_or(GrammarError::Busy)?;
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

/// The compilations that run, and the ones that wait.
#[derive(Default)]
struct Compiling {
    queue: Mutex<CompileQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct CompileQueue {
    running: usize,
    /// Bytes of the schemas that are being compiled.
    bytes: usize,
    /// Numbers of the waiting ones, in the order of arrival.
    waiting: VecDeque<u64>,
    next: u64,
}

/// Place among the compilations. Given back when it is dropped.
struct CompileSlot {
    compiling: Arc<Compiling>,
    bytes: usize,
}

impl CompileSlot {
    /// Waits for a place, behind all that came before; `None` if none is free in time.
    fn take(compiling: &Arc<Compiling>, bytes: usize, longest: Duration) -> Option<Self> {
        let bytes = bytes.min(MAX_COMPILED_BYTES);
        let mut queue = compiling.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let own = queue.next;
        queue.next += 1;
        queue.waiting.push_back(own);
        let must_wait = |queue: &mut CompileQueue| {
            queue.waiting.front() != Some(&own)
                || queue.running >= MAX_COMPILING
                || queue.bytes + bytes > MAX_COMPILED_BYTES
        };
        let waited = compiling.changed.wait_timeout_while(queue, longest, must_wait);
        let (mut queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        queue.waiting.retain(|waiting| *waiting != own);
        compiling.changed.notify_all();
        if waited.timed_out() {
            return None;
        }
        queue.running += 1;
        queue.bytes += bytes;
        Some(Self { compiling: Arc::clone(compiling), bytes })
    }
}

impl Drop for CompileSlot {
    fn drop(&mut self) {
        let mut queue = self.compiling.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.running -= 1;
        queue.bytes -= self.bytes;
        self.compiling.changed.notify_all();
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
    let mut lines = problem.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or("invalid");
    // The parser of regular expressions says the cause last.
    let line = match first.contains("regex parse error") {
        true => lines.next_back().map_or(first, |line| line.trim_start_matches("error: ")),
        false => first,
    };
    line.chars().take(MAX_PROBLEM).collect()
}

/// Refuses schemas that could not be compiled within the plan's line for grammars.
fn check_length(bytes: usize) -> Result<(), GrammarError> {
    if bytes <= MAX_GRAMMAR_BYTES {
        return Ok(());
    }
    let problem = format!(
        "the schema has {bytes} bytes without its descriptions: at most {MAX_GRAMMAR_BYTES} fit \
         the memory plan's line for grammars"
    );
    Err(invalid("", problem))
}

/// Length of a schema as JSON without its descriptions, about.
fn bare_length(schema: &Value) -> usize {
    match schema {
        Value::Object(map) => {
            let enforced = map.iter().filter(|(key, _)| !DESCRIPTIONS.contains(&key.as_str()));
            enforced.map(|(key, value)| key.len() + 4 + bare_length(value)).sum()
        }
        Value::Array(list) => list.iter().map(|value| 1 + bare_length(value)).sum(),
        Value::String(text) => text.len() + 2,
        _ => 4,
    }
}

/// The schema with the keywords that the library takes; compiled, if it is to be checked.
fn enforced(
    factory: &ParserFactory,
    schema: &Value,
    rules: SchemaRules,
    is_checked: bool,
) -> Result<Value, GrammarError> {
    let normal = schema::normal(schema, rules)?;
    if is_checked {
        check_length(normal.to_string().len())?;
        let whole = TopLevelGrammar::from_json_schema(json_schema(&normal)?);
        started(factory, whole).map_err(|problem| blame(factory, schema, rules, problem))?;
    }
    Ok(normal)
}

/// The error of a schema that does not compile, with the path of the keyword.
fn blame(
    factory: &ParserFactory,
    schema: &Value,
    rules: SchemaRules,
    problem: String,
) -> GrammarError {
    let mut search = KeywordSearch { factory, root: schema, rules, tries: MAX_TRIES };
    let found = search.descend(FailedSchema { steps: Vec::new(), path: String::new(), problem });
    invalid(found.path, found.problem)
}

/// A schema that does not compile alone.
struct FailedSchema {
    /// Names and indices from the root.
    steps: Vec<String>,
    path: String,
    problem: String,
}

impl FailedSchema {
    /// The schema whose keyword cannot be enforced.
    fn keyword(&self, keyword: &str, problem: &str) -> Self {
        let problem = format!("cannot be enforced: {problem}");
        Self { path: join(&self.path, keyword), problem, steps: self.steps.clone() }
    }
}

/// Search for the smallest part of a schema that does not compile.
struct KeywordSearch<'a> {
    factory: &'a ParserFactory,
    root: &'a Value,
    rules: SchemaRules,
    tries: usize,
}

impl KeywordSearch<'_> {
    fn descend(&mut self, failed: FailedSchema) -> FailedSchema {
        let value = schema::value(self.root, &failed.steps);
        let Some(map) = value.and_then(Value::as_object) else { return failed };
        for part in schema::parts(map) {
            let steps = [&failed.steps[..], &part.entry].concat();
            if let Some(problem) = self.problem(self.root, &steps) {
                let path = join(&failed.path, &part.step);
                return self.descend(FailedSchema { steps, path, problem });
            }
        }
        // Without the keyword the rest compiles; or of several the first one alone does not.
        let keywords = map.keys().map(String::as_str).filter(|key| !NOT_ENFORCED.contains(key));
        let keywords: Vec<_> = keywords.collect();
        for keyword in &keywords {
            if self.compiles(&failed.steps, |key| key != *keyword) {
                return failed.keyword(keyword, &failed.problem);
            }
        }
        for keyword in keywords {
            if !self.compiles(&failed.steps, |key| key == keyword) {
                return failed.keyword(keyword, &failed.problem);
            }
        }
        failed
    }

    /// Whether a part compiles with these keywords only.
    fn compiles(&mut self, steps: &[String], keep: impl Fn(&str) -> bool) -> bool {
        let mut root = self.root.clone();
        let part = schema::value_at(&mut root, steps).and_then(Value::as_object_mut);
        let Some(map) = part.filter(|_| self.tries > 0) else { return true };
        map.retain(|key, _| keep(key) || NOT_ENFORCED.contains(&key.as_str()));
        self.problem(&root, steps).is_none()
    }

    /// Problem of a part alone, with the definitions of the whole.
    fn problem(&mut self, root: &Value, steps: &[String]) -> Option<String> {
        self.tries = self.tries.checked_sub(1)?;
        let part = schema::normal_part(root, steps, self.rules)?;
        let part = json_schema(&part).ok()?;
        started(self.factory, TopLevelGrammar::from_json_schema(part)).err()
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilations_beyond_the_limits_wait_for_others() {
        let (compiling, soon) = (Arc::new(Compiling::default()), Duration::from_millis(20));
        let take = |bytes, time| CompileSlot::take(&compiling, bytes, time);
        let mut slots: Vec<_> = (0..MAX_COMPILING).map(|_| take(10, soon)).collect();
        assert!(slots.iter().all(Option::is_some));
        assert!(take(0, soon).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| take(0, QUEUE_TIME).is_some());
            slots.pop();
            assert!(waiting.join().unwrap());
        });
        // A long schema is compiled alone.
        assert!(take(MAX_COMPILED_BYTES * 4, soon).is_none());
        slots.clear();
        let alone = take(MAX_COMPILED_BYTES * 4, soon);
        assert!(alone.is_some() && take(1, soon).is_none());
        drop(alone);
        assert!(take(1, soon).is_some());
        let queue = compiling.queue.lock().unwrap();
        assert_eq!((queue.running, queue.bytes, queue.waiting.len()), (0, 0, 0));
    }
}
