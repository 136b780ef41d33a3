//! A conversation: each line of stdin is a message, each answer goes to stdout.
//!
//! `cargo run --release -p moeflux --example chat [FOLDER]`; without a folder, the small model in the box.
//!
//! The whole conversation is rendered anew for each answer, as chat templates want it. The session finds out what it has of
//! it and computes the rest: where the template leaves earlier messages as they were, that is the new message only.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the answers are for people")]

use std::{
    env,
    error::Error,
    io::{Write, stdin, stdout},
    ops::ControlFlow,
    path::Path,
};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, GenerateRequest, Message, StepControl, generate,
};

fn main() -> Result<(), Box<dyn Error>> {
    let checkpoint = match env::args().nth(1) {
        Some(folder) => Checkpoint::open(Path::new(&folder))?,
        None => Checkpoint::embedded()?,
    };
    let engine = Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {})?;
    let text = engine.text()?;
    let sampling = text.generation().sampling.clone();
    let request = GenerateRequest { sampling, ..GenerateRequest::default() };

    let mut session = engine.session()?;
    let mut conversation = Vec::new();
    for line in stdin().lines() {
        conversation.push(Message::user(line?));
        let prompt = text.chat(&conversation, &ChatOptions::default())?;
        let answer =
            generate(&mut session, &prompt, &request, &mut StepControl::default(), &mut |piece| {
                print!("{piece}");
                if stdout().flush().is_ok() {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            })?;
        println!();
        eprintln!(
            "[{} tokens, of the prompt's {} reused {}]",
            answer.tokens.len(),
            prompt.len(),
            answer.reused
        );
        conversation.push(Message::assistant(answer.text));
    }
    Ok(())
}
