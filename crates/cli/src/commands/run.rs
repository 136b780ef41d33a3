//! `run`: one answer.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use anyhow::ensure;
use moeflux::{Finish, MemoryPlan, Message, Sampling};
use serde::Serialize;

use super::answer::{self, Cost, Statistics};
use crate::{WrongUse, args::RunArgs, interrupt, load, out, progress::Ui};

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    text: &'a str,
    tokens: &'a [u32],
    finish: Finish,
    prompt_tokens: usize,
    statistics: Statistics,
    sampling: &'a Sampling,
    device: &'a str,
    device_choice: &'a str,
    plan: &'a MemoryPlan,
}

/// Runs `moeflux run`.
///
/// # Errors
/// There is no prompt, or the model cannot be loaded or run.
pub(crate) fn run(args: &RunArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let prompt = prompt(args.prompt.as_deref())?;
    let engine = load::engine(&args.engine, None, ui)?;
    engine.record_routing(args.trace.trace.as_deref())?;
    let (text, plan, device) = (engine.text()?, engine.plan(), engine.device());
    let tokens = match args.raw {
        true => text.encode(&prompt)?,
        false => {
            let system = args.system.iter().map(Message::system);
            let messages: Vec<_> = system.chain([Message::user(prompt)]).collect();
            text.chat(&messages, &args.answer.chat_options())?
        }
    };
    let request = args.answer.request(text);
    let mut session = engine.session()?;
    let answer = answer::answer(&mut session, &tokens, &request, ui, &mut |piece| match args.json {
        true => Ok(()),
        false => out::write(piece),
    })?;
    if answer.finish == Finish::Cancelled && answer.tokens.is_empty() {
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    let cost = Cost::of(&answer);
    if args.json {
        out::json(&Report {
            text: &answer.text,
            tokens: &answer.tokens,
            finish: answer.finish,
            prompt_tokens: answer.prompt_tokens,
            statistics: Statistics::of(&cost),
            sampling: &request.sampling,
            device: &device.name,
            device_choice: &device.reason,
            plan,
        })?;
    } else if !answer.text.ends_with('\n') {
        out::line("")?;
    }
    if let Some(ending) = answer::ending(&answer, plan) {
        ui.note(ending);
    }
    ui.line(cost.line(&engine));
    Ok(ExitCode::SUCCESS)
}

/// The prompt from the argument or from stdin.
fn prompt(given: Option<&str>) -> anyhow::Result<String> {
    let prompt = match given {
        Some(prompt) if prompt != "-" => prompt.to_owned(),
        None if io::stdin().is_terminal() => {
            let problem = "there is no prompt: give one, or pipe it to standard input";
            return Err(WrongUse(problem.to_owned()).into());
        }
        _ => {
            let mut text = super::read_stdin()?;
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
