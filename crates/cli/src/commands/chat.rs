//! `chat`: an interactive conversation.

use std::{
    io::{self, BufRead, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow, bail, ensure};
use moeflux::{
    Engine, Finish, GenerateRequest, Message, Session,
    base::{Readers, SessionError, create_private_folder},
    runtime::PromptImages,
    text::{ChatPrompt, MessageImage, Text, Turn},
};
use moeflux_bench::units;
use rustyline::{Config, DefaultEditor, error::ReadlineError};

use super::{
    answer::{self, AnswerCost},
    images::Pictures,
    persist::{self, PromptCache, SavedSession, SessionFile},
};
use crate::{
    args::{CHAT_COMMANDS, ChatArgs},
    atomic_file, folders, interrupt,
    load::{self, Needs},
    out::{self, AnswerPrinter, Closed},
    progress::{Ui, error_line},
};

/// Runs `moeflux chat`.
///
/// # Errors
/// The model cannot be loaded, or stdin or stdout failed. Errors within a turn are printed and the
/// conversation continues; if input is not interactive, they set the exit code.
pub(crate) fn run(args: &ChatArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let cache = PromptCache::open(&args.generation.persist)?;
    let saves = args.generation.persist.session.is_some();
    let images = Some(args.generation.images);
    let needs = Needs { marks: true, images, saves, ..Needs::default() };
    let (engine, download) = load::streamed_engine(&args.generation.engine, needs, ui)?;
    if let Some(download) = download {
        download.finish_in_background(ui)?;
    }
    engine.record_routing(args.generation.trace.trace.as_deref())?;
    let mut chat = Chat::new(args, &engine, cache, ui)?;
    let mut input = LineSource::open(ui)?;
    if input.is_editor() {
        ui.line("/help shows what can be typed, Ctrl-D leaves");
    }
    let mut failed = false;
    while let Some(line) = input.next()? {
        let held = interrupt::hold();
        let turned = line.and_then(|line| chat.turn(&line));
        drop(held);
        match turned {
            Ok(TurnEnd::Line) => {}
            Ok(TurnEnd::Quit) => break,
            Err(error) if error.is::<Closed>() => return Err(error),
            Err(error) => {
                failed = true;
                error_line(format_args!("error: {error:#}"));
            }
        }
        if interrupt::ending().is_some() {
            break;
        }
    }
    if let (Some(file), Some(saved)) = (&chat.file, chat.saved) {
        ui.line(format_args!("session: saved to {}, {saved}", file.path()));
    }
    if let Some(code) = interrupt::ending() {
        return Ok(ExitCode::from(code));
    }
    Ok(if failed && !input.is_editor() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Next action after a turn.
enum TurnEnd {
    Line,
    Quit,
}

/// Source of input lines.
enum LineSource {
    Editor { editor: Box<DefaultEditor>, history: Option<PathBuf>, ui: Ui },
    Lines(io::StdinLock<'static>),
}

impl LineSource {
    fn open(ui: Ui) -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(LineSource::Lines(io::stdin().lock()));
        }
        let config = Config::builder().auto_add_history(true).max_history_size(1000)?.build();
        let mut editor =
            DefaultEditor::with_config(config).context("the terminal cannot be used")?;
        let history = folders::state()
            .filter(|f| create_private_folder(f).is_ok())
            .map(|f| f.join("history"));
        if let Some(history) = &history {
            // The file does not exist at first.
            let _ = editor.load_history(history);
        }
        Ok(LineSource::Editor { editor: Box::new(editor), history, ui })
    }

    fn is_editor(&self) -> bool {
        matches!(self, LineSource::Editor { .. })
    }

    /// Next input line, joined with its continuations after `\`; `None` at the end of input. A line
    /// that is not text is an error of its turn.
    fn next(&mut self) -> anyhow::Result<Option<anyhow::Result<String>>> {
        let mut whole = String::new();
        loop {
            let prompt = if whole.is_empty() { "> " } else { ". " };
            let Some(line) = self.line(prompt)? else {
                return Ok((!whole.is_empty()).then_some(Ok(whole)));
            };
            let Ok(line) = line else { return Ok(Some(line)) };
            match line.strip_suffix('\\') {
                Some(start) => whole = whole + start + "\n",
                None => return Ok(Some(Ok(whole + &line))),
            }
        }
    }

    fn line(&mut self, prompt: &str) -> anyhow::Result<Option<anyhow::Result<String>>> {
        match self {
            LineSource::Editor { editor, history, ui } => loop {
                match editor.readline(prompt) {
                    Ok(line) => {
                        if let Some(history) = history {
                            // A history that cannot be written is ignored.
                            let _ = editor.append_history(history);
                        }
                        return Ok(Some(Ok(line)));
                    }
                    Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                        return Ok(Some(Err(anyhow!("the line is not UTF-8 text: type it again"))));
                    }
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(ReadlineError::Interrupted) => ui.line("Ctrl-D or /quit leaves"),
                    Err(error) => return Err(error).context("the terminal cannot be read"),
                }
            },
            LineSource::Lines(lines) => {
                let mut line = Vec::new();
                let read = lines.read_until(b'\n', &mut line);
                if read.context("standard input cannot be read")? == 0 {
                    return Ok(None);
                }
                let text = super::text::decode(line, "the line");
                Ok(Some(text.map(|text| text.trim_end_matches(['\n', '\r']).to_owned())))
            }
        }
    }
}

/// A conversation, its session and its engine.
struct Chat<'a> {
    args: &'a ChatArgs,
    ui: Ui,
    engine: &'a Engine,
    text: &'a Text,
    request: GenerateRequest,
    session: Session,
    cache: Option<PromptCache>,
    /// With a session file, the conversation is the session's tokens and is not rendered again.
    file: Option<SessionFile>,
    saved: Option<SavedSession>,
    /// Whether the conversation started before `messages`.
    is_restored: bool,
    /// Optional system message, then user and assistant in turn. Messages of a restored session are
    /// unknown.
    messages: Vec<Message>,
    pictures: Pictures,
    /// Images of the next question.
    shown: Vec<MessageImage>,
    /// Images of the session's conversation, which follow-ups of a session file keep.
    seen: PromptImages,
    last: Option<Turn>,
    cost: AnswerCost,
}

impl<'a> Chat<'a> {
    fn new(
        args: &'a ChatArgs,
        engine: &'a Engine,
        cache: Option<PromptCache>,
        ui: Ui,
    ) -> anyhow::Result<Self> {
        let text = engine.text()?;
        let mut session = engine.session()?;
        let file = SessionFile::open(&args.generation.persist, &mut session)?;
        if let Some(restored) = file.as_ref().and_then(SessionFile::restored) {
            ui.line(restored);
        }
        let mut restored = ChatPrompt::default();
        restored.tokens = session.tokens().to_vec();
        let last = (!restored.tokens.is_empty()).then(|| Turn::new(restored, &[]));
        if last.is_some() && args.system.is_some() {
            ui.note("--system has no effect: the session goes on with what it began with");
        }
        let system = args.system.iter().filter(|_| last.is_none());
        ensure!(last.is_none() || args.generation.image.is_empty(), NO_IMAGE_AFTER_RESTORE);
        let mut pictures = Pictures::default();
        let files = args.generation.image.iter();
        let shown = files.map(|file| pictures.add(file, engine, ui)).collect::<Result<_, _>>()?;
        let seen = session.images();
        Ok(Self {
            args,
            ui,
            engine,
            text,
            request: args.generation.answer.request(text, ui)?,
            session,
            cache,
            file,
            saved: None,
            is_restored: last.is_some(),
            messages: system.map(Message::system).collect(),
            pictures,
            shown,
            seen,
            last,
            cost: AnswerCost::default(),
        })
    }

    fn turn(&mut self, line: &str) -> anyhow::Result<TurnEnd> {
        if line.trim().is_empty() {
            return Ok(TurnEnd::Line);
        }
        if let Some(path) = dragged(line) {
            self.show(&path)?;
            return Ok(TurnEnd::Line);
        }
        let Some(command) = line.strip_prefix('/') else {
            self.ask(line)?;
            return Ok(TurnEnd::Line);
        };
        let (command, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let argument = argument.trim();
        match command {
            "help" | "?" => out::line(CHAT_COMMANDS)?,
            "reset" => {
                self.messages.retain(|m| m.role == "system");
                self.last = None;
                self.is_restored = false;
                self.shown.clear();
                self.seen = PromptImages::default();
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
            "image" => self.show(&file(argument)?)?,
            "stats" => self.stats()?,
            "save" => self.save(&file(argument)?)?,
            "load" => self.load(&file(argument)?)?,
            "quit" | "exit" | "bye" => return Ok(TurnEnd::Quit),
            _ => bail!("there is no command /{command}; /help lists them"),
        }
        Ok(TurnEnd::Line)
    }

    /// Reads an image for the next question.
    fn show(&mut self, path: &Path) -> anyhow::Result<()> {
        ensure!(!self.is_restored, NO_IMAGE_AFTER_RESTORE);
        let image = self.pictures.add(path, self.engine, self.ui)?;
        let tokens = units::plural(image.tokens as u64, "token");
        self.shown.push(image);
        self.ui.line(format_args!("{}: {tokens}, for the next question", path.display()));
        Ok(())
    }

    fn ask(&mut self, question: &str) -> anyhow::Result<()> {
        self.messages.push(Message::user(question).images(self.shown.clone()));
        let answered = self.answer();
        // An unanswered question is removed; the next one replaces it.
        match self.messages.last().is_some_and(|m| m.role == "user") {
            true => self.messages.truncate(self.messages.len() - 1),
            false => self.shown.clear(),
        }
        answered
    }

    fn answer(&mut self) -> anyhow::Result<()> {
        let options = self.args.generation.answer.chat_options();
        let (prompt, seen) = match (&self.file, &self.last, self.messages.last()) {
            // Messages of a restored session are not rendered and stay as they are.
            (Some(_), Some(last), Some(question)) if question.images.is_empty() => {
                let turn = self.text.chat_follow_up(&question.content, &options);
                let mut prompt = ChatPrompt::default();
                prompt.tokens = [last.tokens(), &turn.map_err(advise_reset)?].concat();
                (prompt, Some(self.seen.clone()))
            }
            _ => {
                let prompt = self.text.prompt_after(&self.messages, &options, &self.last);
                (prompt.map_err(advise_reset)?, None)
            }
        };
        let context = self.engine.plan().context;
        ensure!(
            prompt.tokens.len() < context,
            "the conversation has {} tokens, more than the context of {context} holds: /reset starts \
             a new one, and --ctx allows longer ones",
            prompt.tokens.len()
        );
        let images = match seen {
            Some(seen) => seen,
            None => self.pictures.of_prompt(&prompt.images, self.engine, self.ui)?,
        };
        let request = self.request.clone().ends(prompt.ends.clone()).images(images);
        let (session, cache) = (&mut self.session, self.cache.as_ref());
        let mut printer = AnswerPrinter::new();
        let (answer, _) = answer::answer(
            session,
            &prompt.tokens,
            &request,
            cache,
            None,
            self.ui,
            &mut |delta| printer.print(delta),
        )?;
        self.cost.add(&answer);
        if answer.tokens.is_empty() {
            self.ui.note("interrupted before the answer started");
            return Ok(());
        }
        let printed = printer.finish(&answer).and_then(|()| match answer.text.ends_with('\n') {
            true => Ok(()),
            false => out::line(""),
        });
        match answer.finish {
            Finish::Context => {
                self.ui.note(format_args!(
                    "the context of {context} tokens is full; /reset starts a new conversation"
                ));
            }
            Finish::Cancelled => {
                self.ui.note("interrupted; the answer so far counts as the answer")
            }
            Finish::EndToken | Finish::StopString | Finish::MaxTokens => {
                if let Some(ending) = answer::ending(&answer, &self.engine.plan()) {
                    self.ui.note(ending);
                }
            }
        }
        self.seen = self.session.images();
        let conversation =
            persist::session_tokens(self.text, &prompt.tokens, &answer, &self.engine.plan())?;
        self.messages.push(Message::assistant(answer.text).reasoning(answer.reasoning));
        let saved =
            self.file.as_ref().map(|file| file.save(&mut self.session, &conversation)).transpose();
        let start = prompt.tokens.len();
        self.last = Some(Turn::new(prompt, &conversation[start..]));
        self.saved = saved?.or(self.saved);
        printed?;
        // An error of the device recurs in the next step.
        let _ = self.engine.correct_plan();
        Ok(())
    }

    fn system(&mut self, text: &str) -> anyhow::Result<()> {
        let now = self.messages.first().filter(|m| m.role == "system");
        if text.is_empty() {
            return out::line(now.map_or("there is no system message", |m| &m.content));
        }
        if let (Some(file), Some(_)) = (&self.file, &self.last) {
            bail!(
                "the session in {} goes on with what it began with: /reset starts a new one",
                file.path()
            );
        }
        if now.is_some() {
            self.messages.remove(0);
        }
        if text != "-" {
            self.messages.insert(0, Message::system(text));
        }
        self.ui.line("the conversation goes on with this; /reset starts a new one");
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
        let mut messages = self.messages.clone();
        messages.iter_mut().for_each(|message| message.images.clear());
        let mut json = serde_json::to_string_pretty(&messages)?;
        json.push('\n');
        atomic_file::write(path, Readers::Owner, json.as_bytes())?;
        let count = units::plural(self.messages.len() as u64, "message");
        self.ui.line(format_args!("{count} saved to {}", path.display()));
        if self.messages.iter().any(|message| !message.images.is_empty()) {
            self.ui.note("its images are not saved with it");
        }
        if self.is_restored {
            self.ui.note("what was said before the session was restored is not there");
        }
        Ok(())
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let json = super::text::read_text(path)?;
        let messages: Vec<Message> = serde_json::from_str(&json)
            .with_context(|| format!("{}: this is not a saved conversation", path.display()))?;
        // /load does not answer a pending question.
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

const NO_IMAGE_AFTER_RESTORE: &str =
    "an image does not go with a session that was restored: /reset starts a new one";

/// Path of a picture that was dragged into the terminal: a line that is nothing else. Terminals
/// quote it or escape its spaces.
fn dragged(line: &str) -> Option<PathBuf> {
    const PICTURES: [&str; 9] = ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "avif"];
    let line = line.trim();
    let quoted = ['\'', '"'].iter().find_map(|q| line.strip_prefix(*q)?.strip_suffix(*q));
    let path = quoted.map_or_else(|| line.replace("\\ ", " "), str::to_owned);
    let path = folders::below_home(Path::new(&path));
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    (PICTURES.contains(&&*ending) && path.is_file()).then_some(path)
}

/// Path argument of a command; `~/` is the home folder.
fn file(argument: &str) -> anyhow::Result<PathBuf> {
    ensure!(!argument.is_empty(), "name a file");
    Ok(folders::below_home(Path::new(argument)))
}

/// Adds the way out of a conversation that is too long.
fn advise_reset(error: moeflux::Error) -> anyhow::Error {
    match error {
        moeflux::Error::Session(SessionError::PromptTooLong { .. }) => {
            anyhow!("{error}, or start a new conversation with /reset")
        }
        other => other.into(),
    }
}
