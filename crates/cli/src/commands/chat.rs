//! `chat`: a conversation.

use std::{
    io::{self, BufRead, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail, ensure};
use moeflux::{Engine, Finish, GenerateRequest, Message, Session, Text};
use rustyline::{Config, DefaultEditor, error::ReadlineError};

use super::{
    answer::{self, Cost},
    keep::{self, PrefixCache, Saved, SessionFile},
};
use crate::{
    args::{CHAT_COMMANDS, ChatArgs},
    aside, folders,
    load::{self, Needs},
    out::{self, Closed},
    progress::{Ui, error_line},
    units,
};

/// Runs `moeflux chat`.
///
/// # Errors
/// The model cannot be loaded, or stdin or stdout failed. What goes wrong in one turn is said, and the conversation
/// goes on; when nobody types, the exit code still tells.
pub(crate) fn run(args: &ChatArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let cache = PrefixCache::open(&args.keep)?;
    let engine = load::engine(&args.engine, Needs { marks: true, ..Needs::default() }, ui)?;
    engine.record_routing(args.trace.trace.as_deref())?;
    let mut chat = Chat::new(args, &engine, cache, ui)?;
    let mut input = Input::open(ui)?;
    if input.is_editor() {
        ui.line("/help shows what can be typed, Ctrl-D leaves");
    }
    let mut failed = false;
    while let Some(line) = input.next()? {
        match chat.turn(&line) {
            Ok(Next::Line) => {}
            Ok(Next::Quit) => break,
            Err(error) if error.is::<Closed>() => return Err(error),
            Err(error) => {
                failed = true;
                error_line(format_args!("error: {error:#}"));
            }
        }
    }
    if let (Some(file), Some(saved)) = (&chat.file, chat.saved) {
        ui.line(format_args!("session: saved to {}, {saved}", file.path()));
    }
    Ok(if failed && !input.is_editor() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What comes after a turn.
enum Next {
    Line,
    Quit,
}

/// Where lines come from.
enum Input {
    Editor { editor: Box<DefaultEditor>, history: Option<PathBuf>, ui: Ui },
    Lines(io::StdinLock<'static>),
}

impl Input {
    fn open(ui: Ui) -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Input::Lines(io::stdin().lock()));
        }
        let config = Config::builder().auto_add_history(true).max_history_size(1000)?.build();
        let mut editor =
            DefaultEditor::with_config(config).context("the terminal cannot be used")?;
        let history = folders::state()
            .filter(|f| std::fs::create_dir_all(f).is_ok())
            .map(|f| f.join("history"));
        if let Some(history) = &history {
            // The first time there is none.
            let _ = editor.load_history(history);
        }
        Ok(Input::Editor { editor: Box::new(editor), history, ui })
    }

    fn is_editor(&self) -> bool {
        matches!(self, Input::Editor { .. })
    }

    /// The next line, with those that its `\` at the end asks for; `None` at the end.
    fn next(&mut self) -> anyhow::Result<Option<String>> {
        let mut whole = String::new();
        loop {
            let prompt = if whole.is_empty() { "> " } else { ". " };
            let Some(line) = self.line(prompt)? else {
                return Ok((!whole.is_empty()).then_some(whole));
            };
            match line.strip_suffix('\\') {
                Some(begun) => whole = whole + begun + "\n",
                None => return Ok(Some(whole + &line)),
            }
        }
    }

    fn line(&mut self, prompt: &str) -> anyhow::Result<Option<String>> {
        match self {
            Input::Editor { editor, history, ui } => loop {
                match editor.readline(prompt) {
                    Ok(line) => {
                        if let Some(history) = history {
                            // A history that cannot be kept is no reason to stop.
                            let _ = editor.append_history(history);
                        }
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(ReadlineError::Interrupted) => ui.line("Ctrl-D or /quit leaves"),
                    Err(error) => return Err(error).context("the terminal cannot be read"),
                }
            },
            Input::Lines(lines) => {
                let mut line = String::new();
                if lines.read_line(&mut line).context("standard input cannot be read")? == 0 {
                    return Ok(None);
                }
                line.truncate(line.trim_end_matches(['\n', '\r']).len());
                Ok(Some(line))
            }
        }
    }
}

/// A conversation and what it runs on.
struct Chat<'a> {
    args: &'a ChatArgs,
    ui: Ui,
    engine: &'a Engine,
    text: &'a Text,
    request: GenerateRequest,
    session: Session,
    cache: Option<PrefixCache>,
    /// With it the conversation is the session's tokens, of which nothing is rendered again.
    file: Option<SessionFile>,
    saved: Option<Saved>,
    /// Whether the conversation began before what `messages` has.
    is_restored: bool,
    /// A system message first, if there is one; then user and assistant in turn. Those of a restored session are not known.
    messages: Vec<Message>,
    last: Option<LastTurn>,
    cost: Cost,
}

/// The last answered prompt.
struct LastTurn {
    /// The prompt as the template gives it.
    rendered: Vec<u32>,
    /// The tokens that the model has seen and made: prompt and answer, without an end token.
    tokens: Vec<u32>,
    /// How many of these are the answer's.
    answer: usize,
}

impl<'a> Chat<'a> {
    fn new(
        args: &'a ChatArgs,
        engine: &'a Engine,
        cache: Option<PrefixCache>,
        ui: Ui,
    ) -> anyhow::Result<Self> {
        let text = engine.text()?;
        let mut session = engine.session()?;
        let file = SessionFile::open(&args.keep, &mut session)?;
        if let Some(restored) = file.as_ref().and_then(SessionFile::restored) {
            ui.line(restored);
        }
        let tokens = session.tokens().to_vec();
        let last =
            (!tokens.is_empty()).then_some(LastTurn { rendered: Vec::new(), tokens, answer: 0 });
        if last.is_some() && args.system.is_some() {
            ui.note("--system has no effect: the session goes on with what it began with");
        }
        let system = args.system.iter().filter(|_| last.is_none());
        Ok(Self {
            args,
            ui,
            engine,
            text,
            request: args.answer.request(text),
            session,
            cache,
            file,
            saved: None,
            is_restored: last.is_some(),
            messages: system.map(Message::system).collect(),
            last,
            cost: Cost::default(),
        })
    }

    fn turn(&mut self, line: &str) -> anyhow::Result<Next> {
        if line.trim().is_empty() {
            return Ok(Next::Line);
        }
        let Some(command) = line.strip_prefix('/') else {
            self.ask(line)?;
            return Ok(Next::Line);
        };
        let (command, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let argument = argument.trim();
        match command {
            "help" | "?" => out::line(CHAT_COMMANDS)?,
            "reset" => {
                self.messages.retain(|m| m.role == "system");
                self.last = None;
                self.is_restored = false;
                self.session.reset()?;
                match &self.file {
                    Some(file) => self.ui.line(format_args!(
                        "the conversation is forgotten; {} keeps it until the next answer",
                        file.path()
                    )),
                    None => self.ui.line("the conversation is forgotten"),
                }
            }
            "system" => self.system(argument)?,
            "stats" => self.stats()?,
            "save" => self.save(&file(argument)?)?,
            "load" => self.load(&file(argument)?)?,
            "quit" | "exit" | "bye" => return Ok(Next::Quit),
            _ => bail!("there is no command /{command}; /help lists them"),
        }
        Ok(Next::Line)
    }

    fn ask(&mut self, question: &str) -> anyhow::Result<()> {
        self.messages.push(Message::user(question));
        let asked = self.answer();
        // A question without an answer is taken back, so that the next one is answered instead.
        if self.messages.last().is_some_and(|m| m.role == "user") {
            self.messages.pop();
        }
        asked
    }

    fn answer(&mut self) -> anyhow::Result<()> {
        let options = self.args.answer.chat_options();
        let (rendered, prompt) = match (&self.file, &self.last, self.messages.last()) {
            (Some(_), Some(last), Some(question)) => (
                Vec::new(),
                [&*last.tokens, &self.text.chat_follow_up(&question.content, &options)?].concat(),
            ),
            _ => {
                let rendered = self.text.chat(&self.messages, &options)?;
                let prompt = self.prompt(&rendered)?;
                (rendered, prompt)
            }
        };
        let context = self.engine.plan().context;
        ensure!(
            prompt.len() < context,
            "the conversation has {} tokens, more than the context of {context} holds: /reset begins a new one, and \
             --ctx allows longer ones",
            prompt.len()
        );
        let request =
            GenerateRequest { ends: self.ends(&rendered, prompt.len()), ..self.request.clone() };
        let (session, cache) = (&mut self.session, self.cache.as_ref());
        let (answer, _) =
            answer::answer(session, &prompt, &request, cache, self.ui, &mut |p| out::write(p))?;
        self.cost.add(&answer);
        if answer.tokens.is_empty() {
            self.ui.note("interrupted before the answer began");
            return Ok(());
        }
        let told = if answer.text.ends_with('\n') { Ok(()) } else { out::line("") };
        match answer.finish {
            Finish::Context => {
                self.ui.note(format_args!(
                    "the context of {context} tokens is full; /reset begins a new conversation"
                ));
            }
            Finish::Cancelled => self.ui.note("interrupted; what was said counts as the answer"),
            Finish::EndToken | Finish::StopString | Finish::MaxTokens => {}
        }
        let said = keep::said(self.text, &prompt, &answer, self.engine.plan())?;
        self.messages.push(Message::assistant(answer.text));
        let saved = self.file.as_ref().map(|file| file.save(&mut self.session, &said)).transpose();
        self.last = Some(LastTurn { rendered, answer: said.len() - prompt.len(), tokens: said });
        self.saved = saved?.or(self.saved);
        told
    }

    /// The tokens to feed for a prompt. The template's text of an answer may come out as other tokens than those
    /// that the model made; keeping the model's own lets the session go on where it is.
    fn prompt(&self, rendered: &[u32]) -> anyhow::Result<Vec<u32>> {
        let Some(last) = &self.last else { return Ok(rendered.to_vec()) };
        let Some(tail) = rendered.strip_prefix(last.rendered.as_slice()) else {
            return Ok(rendered.to_vec());
        };
        let Some(end) = tail.iter().position(|t| self.text.end().contains(*t)) else {
            return Ok(rendered.to_vec());
        };
        let (answer, rest) = tail.split_at(end);
        let made = &last.tokens[last.tokens.len() - last.answer..];
        let tokenizer = self.text.tokenizer();
        if tokenizer.decode(answer, false)? != tokenizer.decode(made, false)? {
            return Ok(rendered.to_vec());
        }
        Ok([&last.tokens, rest].concat())
    }

    /// Where prompts to come are likely to part from this one of so many tokens: where the next turn's does, if the template shows a
    /// past answer otherwise than it begins one, as those do that leave thoughts out; and, of a conversation that begins, where
    /// another first question would, after /reset or /load. Models whose states cannot be cut go on from there.
    fn ends(&self, rendered: &[u32], prompt: usize) -> Vec<usize> {
        // What is only known as tokens is not rendered, and goes on as it is.
        let [before @ .., _] = &*self.messages else { return Vec::new() };
        if rendered.is_empty() {
            return Vec::new();
        }
        let (other, past) = (Message::user("~"), Message::assistant("~"));
        let another = [before, std::slice::from_ref(&other)].concat();
        let next = [&self.messages[..], &[past, other]].concat();
        let likely = [(self.last.is_none()).then_some(another), Some(next)];
        let options = self.args.answer.chat_options();
        let parts = likely.into_iter().flatten().filter_map(|messages| {
            // A template that refuses them says so when they are asked for.
            let theirs = self.text.chat(&messages, &options).ok()?;
            let same = rendered.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
            // Prompt and rendering end alike; answers may be other tokens in them.
            prompt.checked_sub(rendered.len() - same)
        });
        let mut ends: Vec<usize> = parts.collect();
        ends.sort_unstable();
        ends
    }

    fn system(&mut self, text: &str) -> anyhow::Result<()> {
        let now = self.messages.first().filter(|m| m.role == "system");
        if text.is_empty() {
            return out::line(now.map_or("there is no system message", |m| &m.content));
        }
        if let (Some(file), Some(_)) = (&self.file, &self.last) {
            bail!(
                "the session in {} goes on with what it began with: /reset begins a new one",
                file.path()
            );
        }
        if now.is_some() {
            self.messages.remove(0);
        }
        if text != "-" {
            self.messages.insert(0, Message::system(text));
        }
        self.ui.line("the conversation goes on with this; /reset begins a new one");
        Ok(())
    }

    fn stats(&self) -> anyhow::Result<()> {
        let plan = self.engine.plan();
        out::line(format_args!(
            "{}; context {} of {} tokens",
            self.cost.line(self.engine),
            self.session.tokens().len(),
            plan.context
        ))
    }

    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let mut json = serde_json::to_string_pretty(&self.messages)?;
        json.push('\n');
        aside::write(path, json.as_bytes())?;
        let count = units::plural(self.messages.len() as u64, "message");
        self.ui.line(format_args!("{count} saved to {}", path.display()));
        if self.is_restored {
            self.ui.note("what was said before the session was restored is not there");
        }
        Ok(())
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let json = super::read_text(path)?;
        let messages: Vec<Message> = serde_json::from_str(&json)
            .with_context(|| format!("{}: this is not a saved conversation", path.display()))?;
        // An answer that is still wanted cannot be asked for by /load.
        ensure!(
            messages.last().is_none_or(|m| m.role != "user"),
            "{}: it ends with a question; the last message must be an answer",
            path.display()
        );
        let count = units::plural(messages.len() as u64, "message");
        self.messages = messages;
        self.last = None;
        self.is_restored = false;
        self.ui.line(format_args!("{count} loaded from {}", path.display()));
        Ok(())
    }
}

/// The file that a command names; `~/` is the user's home.
fn file(argument: &str) -> anyhow::Result<PathBuf> {
    ensure!(!argument.is_empty(), "name a file");
    match (argument.strip_prefix("~/"), std::env::home_dir()) {
        (Some(below), Some(home)) => Ok(home.join(below)),
        _ => Ok(argument.into()),
    }
}
