//! JSON-Schema-Test-Suite through the grammars of answers: sampled answers of every schema that is
//! accepted must validate, and every schema that is refused must name its keyword.
//!
//! usage: moeflux-schema-suite FOLDER [--refused]
//!
//! FOLDER is the suite's folder `tests`; `--refused` prints every refusal. Objects keep the
//! specification's meaning: they may have properties that they do not list.

use std::{error::Error, fs, path::Path, process::ExitCode};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest, Sampling,
    base::GrammarError,
    runtime::DeviceOptions,
    text::{AnswerForm, Constraint, Grammar, Sampler, Text},
};
use serde_json::Value;

/// Folders of the suite with the keywords that models are asked for, and their dialects.
const DRAFTS: [(&str, &str); 3] = [
    ("draft2020-12", "https://json-schema.org/draft/2020-12/schema"),
    ("draft2019-09", "https://json-schema.org/draft/2019-09/schema"),
    ("draft7", "http://json-schema.org/draft-07/schema#"),
];

/// Answers to each schema.
const ANSWERS: u64 = 8;

/// Most tokens of an answer. Longer ones are not complete, and are not checked.
const MAX_TOKENS: usize = 400;

/// Logit of end tokens, and of tokens that close a string, an object or an array: random text would
/// not end otherwise. It grows by `GROWTH` with each token.
const CLOSING: f32 = 3.0;
const GROWTH: f32 = 0.05;

/// Results of one draft.
#[derive(Default)]
struct Summary {
    schemas: usize,
    accepted: usize,
    refused: usize,
    /// Complete answers.
    answers: usize,
    /// Answers that do not validate, and refusals without a keyword.
    problems: Vec<String>,
}

/// The model's text side, and its tokens that close a part of JSON.
struct Tester<'a> {
    text: &'a Text,
    closing: Vec<bool>,
    /// Whether refusals are printed.
    prints: bool,
}

impl<'a> Tester<'a> {
    fn new(text: &'a Text, prints: bool) -> Result<Self, Box<dyn Error>> {
        let mut closing = Vec::new();
        for token in 0..text.tokenizer().vocab_size() as u32 {
            let spelled = text.tokenizer().decode(&[token], false)?;
            let closes = ["\"", "}", "]", "\"}", "\"]"].contains(&spelled.trim());
            closing.push(closes || text.end().contains(token));
        }
        Ok(Self { text, closing, prints })
    }

    /// A random answer; `None` if it does not end.
    fn answer(&self, grammar: &Grammar, seed: u64) -> Result<Option<String>, Box<dyn Error>> {
        let mut masks = [grammar.mask(self.text, &[])?.start()?];
        let mut sampler = Sampler::new(Sampling::default().seed(seed), self.closing.len())?;
        let mut tokens = Vec::new();
        while tokens.len() < MAX_TOKENS {
            let bias = CLOSING + GROWTH * tokens.len() as f32;
            let logits = self.closing.iter().map(|closes| if *closes { bias } else { 0.0 });
            let token = sampler.sample_masked(&logits.collect::<Vec<_>>(), &mut masks)?;
            if self.text.end().contains(token) {
                return Ok(Some(self.text.tokenizer().decode(&tokens, false)?));
            }
            tokens.push(token);
        }
        Ok(None)
    }

    /// Tests a schema; `name` is its place in the suite.
    fn check(&self, schema: &Value, name: &str, summary: &mut Summary) {
        summary.schemas += 1;
        let form = AnswerForm::Json(schema.clone());
        let constraint = Constraint::default().form(form).raw(true).open_objects(true);
        match self.text.grammar(&constraint) {
            Ok(Some(grammar)) => {
                summary.accepted += 1;
                self.check_answers(&grammar, schema, name, summary);
            }
            Ok(None) => summary.problems.push(format!("{name}: no grammar")),
            Err(error) => {
                summary.refused += 1;
                if self.prints {
                    println!("{name}: {error}");
                }
                if !names_keyword(&error, schema) {
                    summary.problems.push(format!("{name}: refused without a keyword: {error}"));
                }
            }
        }
    }

    fn check_answers(&self, grammar: &Grammar, schema: &Value, name: &str, summary: &mut Summary) {
        let validator = match jsonschema::validator_for(schema) {
            Ok(validator) => validator,
            Err(error) => {
                return summary.problems.push(format!("{name}: accepted, but invalid: {error}"));
            }
        };
        for seed in 0..ANSWERS {
            let answer = match self.answer(grammar, seed) {
                Ok(Some(answer)) => answer,
                Ok(None) => continue,
                Err(error) => return summary.problems.push(format!("{name}: {error}")),
            };
            summary.answers += 1;
            let is_valid = serde_json::from_str::<Value>(&answer)
                .is_ok_and(|value| validator.is_valid(&value));
            if !is_valid {
                return summary.problems.push(format!("{name}: {schema} has the answer {answer}"));
            }
        }
    }
}

/// Whether a refusal names a keyword of the schema. `false` has none.
fn names_keyword(error: &moeflux::Error, schema: &Value) -> bool {
    let moeflux::Error::Grammar(GrammarError::Invalid { path, .. }) = error else { return false };
    let last = path.rsplit('.').next().unwrap_or_default();
    let keyword = last.split('[').next().unwrap_or_default();
    *schema == Value::Bool(false) || !keyword.is_empty() && has_key(schema, keyword)
}

fn has_key(value: &Value, key: &str) -> bool {
    match value {
        Value::Object(map) => {
            map.contains_key(key) || map.values().any(|value| has_key(value, key))
        }
        Value::Array(list) => list.iter().any(|value| has_key(value, key)),
        _ => false,
    }
}

fn draft(folder: &Path, dialect: &str, tester: &Tester<'_>) -> Result<Summary, Box<dyn Error>> {
    let mut summary = Summary::default();
    let mut files: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    files.sort_by_key(fs::DirEntry::path);
    for file in files.iter().map(fs::DirEntry::path).filter(|path| path.is_file()) {
        let groups: Vec<Value> = serde_json::from_slice(&fs::read(&file)?)?;
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for group in groups {
            let name = format!("{stem}: {}", group["description"].as_str().unwrap_or_default());
            let mut schema = group["schema"].clone();
            if let Value::Object(map) = &mut schema {
                map.entry("$schema").or_insert_with(|| dialect.into());
            }
            tester.check(&schema, &name, &mut summary);
        }
    }
    Ok(summary)
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let folder =
        std::env::args_os().nth(1).ok_or("usage: moeflux-schema-suite FOLDER [--refused]")?;
    let memory = MemoryRequest::default().grammars(true);
    let device = DeviceOptions::default().name("cpu").threads(1);
    let options = EngineOptions::default().memory(memory).device(device);
    let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES)?;
    let engine = Engine::open(checkpoint, options, &mut |_, _| {})?;
    let prints = std::env::args_os().nth(2).is_some_and(|option| option == "--refused");
    let tester = Tester::new(engine.text()?, prints)?;
    let mut has_problems = false;
    for (name, dialect) in DRAFTS {
        let Summary { schemas, accepted, refused, answers, problems } =
            draft(&Path::new(&folder).join(name), dialect, &tester)?;
        println!(
            "{name}: {schemas} schemas, {accepted} accepted with {answers} complete answers, \
             {refused} refused, {} problems",
            problems.len()
        );
        problems.iter().for_each(|problem| println!("  {problem}"));
        has_problems |= !problems.is_empty();
    }
    Ok(if has_problems { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
