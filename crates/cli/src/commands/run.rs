//! `run`: answers one prompt.

use std::{
    io::{self, IsTerminal},
    path::Path,
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, ensure};
use moeflux::{
    Engine, Finish, MemoryPlan, Message, Sampling, Session,
    runtime::PromptImages,
    text::{AnswerForm, Constraint},
};
use serde::Serialize;

use super::{
    answer::{self, AnswerCost, AnswerStatistics},
    images::Pictures,
    persist::{self, PrefixCacheReport, PromptCache, SessionFile, SessionReport},
};
use crate::{
    args::{FormArgs, RunArgs},
    hub::{DownloadCost, ModelDownload},
    interrupt,
    load::{self, Needs},
    out,
    progress::Ui,
    shell,
    wrong_use::WrongUse,
};

/// JSON output of `--json`.
#[derive(Serialize)]
struct RunReport<'a> {
    text: &'a str,
    /// Thoughts before the text; empty without.
    reasoning: &'a str,
    /// Whether the answer ended in its thoughts, before its text began.
    unfinished_reasoning: bool,
    tokens: &'a [u32],
    finish: Finish,
    /// Loading of the model, before the prompt.
    load_seconds: f64,
    prompt_tokens: usize,
    /// Prompt tokens that were not computed.
    reused_tokens: usize,
    /// Present with `--session`.
    session: Option<SessionReport>,
    /// Present with `--prefix-cache`.
    prefix_cache: Option<PrefixCacheReport>,
    statistics: AnswerStatistics,
    sampling: &'a Sampling,
    device: &'a str,
    device_choice: &'a str,
    /// Present if the model was downloaded meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    download: Option<DownloadCost>,
    /// How experts were read.
    reader: &'a str,
    plan: &'a MemoryPlan,
}

/// Runs `moeflux run`.
///
/// # Errors
/// There is no prompt, or the model cannot be loaded or run.
pub(crate) fn run(args: &RunArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let prompt = prompt(&args.prompt)?;
    let cache = PromptCache::open(&args.generation.persist)?;
    // Only a stop string makes the session go back, to the end of the prompt.
    let saves = args.generation.persist.session.is_some();
    let marks = saves && !args.generation.answer.stop.is_empty();
    let form = args.form.read()?;
    let given = &args.generation;
    let images = (!given.image.is_empty()).then_some(given.images);
    let needs = Needs { marks, grammars: form.is_some(), images, saves, ..Needs::default() };
    let since = Instant::now();
    let (engine, mut download) = load::streamed_engine(&args.generation.engine, needs, ui)?;
    let load_seconds = since.elapsed().as_secs_f64();
    engine.record_routing(args.generation.trace.trace.as_deref())?;
    let (text, plan, device) = (engine.text()?, engine.plan(), engine.device());
    let mut session = engine.session()?;
    let file = SessionFile::open(&args.generation.persist, &mut session)?;
    let AskedPrompt { tokens, images } = ask(args, &session, &prompt, &engine, ui)?;
    let mut request = args.generation.answer.request(text, ui)?.images(images);
    let constraint = Constraint::default().form(form);
    if let Some(grammar) = text.grammar(&constraint)? {
        request.masks.push(grammar.mask(text, &tokens)?);
    }
    let held = interrupt::hold();
    let mut printer = out::AnswerPrinter::new();
    let answered = answer::answer(
        &mut session,
        &tokens,
        &request,
        cache.as_ref(),
        download.as_mut(),
        ui,
        &mut |delta| match args.json {
            true => Ok(()),
            false => printer.print(delta),
        },
    );
    let (answer, prefilled) = ModelDownload::cause(download.as_ref(), answered)?;
    if answer.finish == Finish::Cancelled && answer.tokens.is_empty() {
        if let Some(file) = &file {
            ui.note(format_args!(
                "interrupted before the answer started: {} is as it was",
                file.path()
            ));
        }
        return Ok(ExitCode::from(interrupt::exit_code()));
    }
    let needs_newline = !args.json && !answer.text.ends_with('\n');
    let thoughts = if args.json { Ok(()) } else { printer.finish(&answer) };
    let printed = thoughts.and_then(|()| if needs_newline { out::line("") } else { Ok(()) });
    let history = persist::session_tokens(text, &tokens, &answer, &plan)?;
    let saved = file.as_ref().map(|file| file.save(&mut session, &history)).transpose();
    drop(held);
    if printed.is_err() {
        return saved.and(printed).map(|()| ExitCode::SUCCESS);
    }
    let is_saved = saved.as_ref().ok().copied().flatten();
    let cost = AnswerCost::new(&answer);
    if args.json {
        out::json(&RunReport {
            text: &answer.text,
            reasoning: &answer.reasoning,
            unfinished_reasoning: answer.unfinished_reasoning,
            tokens: &answer.tokens,
            finish: answer.finish,
            load_seconds,
            prompt_tokens: answer.prompt_tokens,
            reused_tokens: answer.reused,
            session: file.as_ref().map(|file| file.report(&answer, is_saved)),
            prefix_cache: prefilled,
            statistics: AnswerStatistics::of(&cost),
            sampling: &request.sampling,
            device: &device.name,
            device_choice: &device.reason,
            download: download.as_ref().map(ModelDownload::cost),
            reader: engine.reads(),
            plan: &plan,
        })?;
    }
    if let Some(ending) = answer::ending(&answer, &plan) {
        ui.note(ending);
    }
    if answer.finish == Finish::Cancelled && is_saved.is_some() {
        ui.note("the session has the answer as far as it came");
    }
    let lines = [
        file.map(|file| file.line(&answer, is_saved)),
        cache.zip(prefilled).map(|(cache, prefilled)| cache.line(&prefilled)),
    ];
    let lines: Vec<String> = lines.into_iter().flatten().collect();
    if !lines.is_empty() {
        ui.line(lines.join("; "));
    }
    let downloaded = download.as_ref().map(|download| format!("; {}", download.cost()));
    ui.line(format_args!("{}{}", cost.line(&engine), downloaded.unwrap_or_default()));
    let is_interrupted = answer.finish == Finish::Cancelled || interrupt::ending().is_some();
    if let Some(download) = download.filter(|_| !is_interrupted) {
        download.finish(ui)?;
    }
    saved.map(|_| interrupt::ending().map_or(ExitCode::SUCCESS, ExitCode::from))
}

impl FormArgs {
    /// The form, if one is given.
    ///
    /// # Errors
    /// A file cannot be read, or is no JSON.
    fn read(&self) -> anyhow::Result<Option<AnswerForm>> {
        let read = |path: &Path| {
            let text = std::fs::read_to_string(path);
            text.with_context(|| format!("{}: cannot be read", path.display()))
        };
        if let Some(path) = &self.json_schema {
            let schema = serde_json::from_str(&read(path)?);
            let schema = schema.with_context(|| format!("{}: is no JSON", path.display()))?;
            return Ok(Some(AnswerForm::Json(schema)));
        }
        if let Some(path) = &self.lark {
            return Ok(Some(AnswerForm::Lark(read(path)?)));
        }
        Ok(self.regex.clone().map(AnswerForm::Regex))
    }
}

/// Tokens to feed, with the images among them.
struct AskedPrompt {
    tokens: Vec<u32>,
    images: PromptImages,
}

/// The tokens of the session, then the prompt.
///
/// # Errors
/// The template fails, the context is too short for both, or images do not go with the prompt.
fn ask(
    args: &RunArgs,
    session: &Session,
    prompt: &str,
    engine: &Engine,
    ui: Ui,
) -> anyhow::Result<AskedPrompt> {
    let (text, plan) = (engine.text()?, engine.plan());
    let options = args.generation.answer.chat_options();
    let history = session.tokens();
    let mut images = session.images();
    let files = &args.generation.image;
    if !files.is_empty() && (args.raw || !history.is_empty()) {
        let problem = match args.raw {
            true => "--image goes with the model's chat template: leave --raw out",
            false => "--image goes with the first question of a session: start a new one",
        };
        return Err(WrongUse(problem.to_owned()).into());
    }
    let more = match (args.raw, history.is_empty()) {
        (true, true) => text.encode(prompt)?,
        // Special tokens around a text belong only at its start.
        (true, false) => text.encode_continuation(prompt)?,
        (false, true) => {
            let system = args.system.iter().map(Message::system);
            let mut pictures = Pictures::default();
            let given = files.iter().map(|file| pictures.add(file, engine, ui));
            let question = Message::user(prompt).images(given.collect::<Result<_, _>>()?);
            let messages: Vec<_> = system.chain([question]).collect();
            let asked = text.prompt(&messages, &options)?;
            images = pictures.of_prompt(&asked.images, engine, ui)?;
            asked.tokens
        }
        (false, false) => {
            if args.system.is_some() {
                ui.note("--system has no effect: the session goes on with what it began with");
            }
            text.chat_follow_up(prompt, &options)?
        }
    };
    let (has, context) = (history.len(), plan.context);
    ensure!(
        has == 0 || has + more.len() <= context,
        "the session has {has} tokens and the prompt {}, more than the context of {context} holds: give --ctx if the model \
         allows more, or start a new session",
        more.len()
    );
    Ok(AskedPrompt { tokens: [history, &more].concat(), images })
}

/// Prompt from the arguments or from stdin.
fn prompt(words: &[String]) -> anyhow::Result<String> {
    let prompt = match joined(words)? {
        Some(prompt) if prompt != STDIN => prompt,
        None if io::stdin().is_terminal() => {
            let problem = "there is no prompt: give one, or pipe it to standard input";
            return Err(WrongUse(problem.to_owned()).into());
        }
        _ => {
            let mut text = super::text::read_stdin()?;
            if text.ends_with('\n') {
                text.pop();
                text.truncate(text.strip_suffix('\r').unwrap_or(&text).len());
            }
            text
        }
    };
    ensure!(!prompt.is_empty(), "the prompt is empty: there is nothing to answer");
    Ok(prompt)
}

/// Argument that stands for standard input.
const STDIN: &str = "-";

/// The prompt that words on the command line are together.
///
/// # Errors
/// The first of several words may be a model, or one of them stands for standard input; the message
/// has the commands to choose from.
fn joined(words: &[String]) -> Result<Option<String>, WrongUse> {
    let [first, rest @ ..] = words else { return Ok(None) };
    let prompt = words.join(" ");
    if rest.is_empty() {
        return Ok(Some(prompt));
    }
    let whole = shell::word(&prompt);
    if words.iter().any(|word| word == STDIN) {
        return Err(WrongUse(format!(
            "`-` stands for standard input, and no other words go with it: write `moeflux run -`, \
             or `moeflux run {whole}` if it belongs to the prompt"
        )));
    }
    let path = Path::new(first);
    if path.components().count() > 1 || path.exists() {
        let (model, rest) = (shell::word(first), shell::word(&rest.join(" ")));
        return Err(WrongUse(format!(
            "{first} may be a model or belong to the prompt: write `moeflux run --model {model} \
             {rest}`, or `moeflux run {whole}`"
        )));
    }
    Ok(Some(prompt))
}
