//! Continuous batching of prompts with a common prefix: each expert is read once per step for all
//! sequences.
//!
//! `cargo run --release -p moeflux --example many_sessions [FOLDER]`; without a folder, the
//! embedded model.
#![allow(clippy::print_stdout, reason = "the answers are for people")]

use std::{collections::HashMap, env, error::Error, path::Path, time::Instant};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, GenerateRequest, MemoryRequest, Message,
    Sampling, StepControl,
    serve::{Event, Scheduler, SchedulerOptions},
};

const SYSTEM: &str =
    "You are an old storyteller who knows the fables of Aesop by heart and tells them well.";
const TITLES: [&str; 4] = [
    "The Fox and the Crow",
    "The Crow and the Pitcher",
    "The Dog and the Shadow",
    "The Hound and the Hare",
];

fn main() -> Result<(), Box<dyn Error>> {
    let checkpoint = match env::args().nth(1) {
        Some(folder) => Checkpoint::open(Path::new(&folder))?,
        None => Checkpoint::embedded(&moeflux_tales::FILES)?,
    };
    // The plan reserves state memory for these sessions; the rest becomes expert slots.
    let memory = MemoryRequest::default().sessions(TITLES.len());
    let options = EngineOptions::default().memory(memory);
    let engine = Engine::open(checkpoint, options, &mut |_, _| {})?;
    let text = engine.text()?;
    let ask =
        |title| [Message::system(SYSTEM), Message::user(format!("Tell me the fable of {title}."))];
    let prompts = TITLES.map(|title| text.chat(&ask(title), &ChatOptions::default()));
    let prompts = prompts.into_iter().collect::<Result<Vec<_>, _>>()?;

    // The common prefix is computed once; the other sessions are forks and share its memory.
    let alike = |i: &usize| prompts.iter().all(|prompt| prompt.get(*i) == prompts[0].get(*i));
    let shared = (0..prompts[0].len() - 1).take_while(alike).count();
    let mut first = engine.session()?;
    first.sync(&prompts[0][..shared], &mut StepControl::default())?;
    let before = first.stats();
    let mut sessions = (1..prompts.len()).map(|_| first.fork()).collect::<Result<Vec<_>, _>>()?;
    sessions.push(first);

    let mut batch = Scheduler::new(&engine, SchedulerOptions::default());
    let request = GenerateRequest::default().sampling(Sampling::greedy()).max_tokens(40);
    let mut answers = HashMap::new();
    for ((title, prompt), session) in TITLES.into_iter().zip(&prompts).zip(sessions) {
        let id = batch.add(session, prompt, &request)?;
        let reused = batch.synced(id).map_or(0, |synced| synced.reused);
        println!("{title}: {reused} of {} tokens reused", prompt.len());
        answers.insert(id, (title, Vec::new()));
    }
    let (since, mut tokens) = (Instant::now(), 0);
    while !batch.is_empty() {
        for event in batch.step(&mut StepControl::default())? {
            match event {
                Event::Token { id, token, .. } => {
                    tokens += 1;
                    answers.entry(id).and_modify(|(_, made)| made.push(token));
                }
                Event::Finished { id, .. } => {
                    let (title, made) = answers.remove(&id).unwrap_or_default();
                    println!("\n{title}: {}", text.tokenizer().decode(&made, true)?);
                }
                Event::Failed { error, .. } => return Err(error.into()),
                _ => {}
            }
        }
    }
    let read = before.plus(&batch.stats()).bytes_read / tokens;
    let speed = tokens as f64 / since.elapsed().as_secs_f64();
    println!("\n{tokens} tokens, {speed:.1} per second, {read} bytes read per token");
    Ok(())
}
