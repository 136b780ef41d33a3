//! Generates a response to one prompt, streamed.
//!
//! `cargo run --release -p moeflux --example hello [FOLDER [PROMPT]]`; without a folder, the
//! embedded model.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the answer is for people")]

use std::{
    env,
    error::Error,
    io::{Write, stdout},
    ops::ControlFlow,
    path::Path,
};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, GenerateRequest, Message, StepControl, generate,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let checkpoint = match arguments.next() {
        Some(folder) => Checkpoint::open(Path::new(&folder))?,
        None => Checkpoint::embedded(&moeflux_tales::FILES)?,
    };
    let prompt =
        arguments.next().unwrap_or_else(|| "Tell me the fable of The Fox and the Crow.".into());

    let engine = Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {})?;
    let text = engine.text()?;
    let tokens = text.chat(&[Message::user(prompt)], &ChatOptions::default())?;
    // The model's recommended parameters. `Sampling::greedy()` and others override them.
    let sampling = text.generation()?.sampling.clone();
    let request = GenerateRequest::default().sampling(sampling);

    let mut session = engine.session()?;
    let answer =
        generate(&mut session, &tokens, &request, &mut StepControl::default(), &mut |delta| {
            print!("{}", delta.text());
            // Stops if stdout is closed.
            if stdout().flush().is_ok() {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
    println!();
    eprintln!(
        "{} tokens, {:.1} per second; {:.1} MB read, {:.0} % of the experts were in memory",
        answer.tokens.len(),
        answer.decode.tokens_per_second(),
        session.stats().bytes_read as f64 / 1e6,
        100.0 * session.stats().hit_rate(),
    );
    Ok(())
}
