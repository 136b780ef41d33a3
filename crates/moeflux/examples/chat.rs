//! Chat: each line of stdin is a message, each response goes to stdout.
//!
//! `cargo run --release -p moeflux --example chat [FOLDER]`; without a folder, the embedded model.
//!
//! The whole conversation is rendered again for each response, as chat templates require. The
//! session reuses the common prefix and computes the rest. If the template does not change earlier
//! messages, that is only the new message.
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
        None => Checkpoint::embedded(&moeflux_tales::FILES)?,
    };
    let engine = Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {})?;
    let text = engine.text()?;
    let sampling = text.generation()?.sampling.clone();
    let request = GenerateRequest::default().sampling(sampling);

    let mut session = engine.session()?;
    let mut conversation = Vec::new();
    for line in stdin().lines() {
        conversation.push(Message::user(line?));
        let prompt = text.chat(&conversation, &ChatOptions::default())?;
        let answer =
            generate(&mut session, &prompt, &request, &mut StepControl::default(), &mut |delta| {
                print!("{}", delta.text());
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
        conversation.push(Message::assistant(answer.text).reasoning(answer.reasoning));
    }
    Ok(())
}
