//! Custom sampler: the first word must start with a given letter, the rest is sampled by min-p. A
//! mark rewinds the session, so that the prompt is computed once for all letters.
//!
//! `cargo run --release -p moeflux --example custom_sampler [FOLDER]`; without a folder, the
//! embedded model.
#![allow(clippy::print_stdout, reason = "the texts are for people")]

use std::{env, error::Error, path::Path};

use moeflux::{Checkpoint, Engine, EngineOptions, StepControl};

const PROMPT: &str = "Once upon a time there was a";

/// Samples from the tokens that are at least `min_p` times as probable as the most probable one;
/// `u` is uniform in [0, 1).
fn min_p(logits: &[f32], least: f64, u: f64) -> u32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight =
        |logit: &f32| Some(f64::from(logit - max).exp()).filter(|w| *w >= least).unwrap_or(0.0);
    let mut left = u * logits.iter().map(weight).sum::<f64>();
    let drawn = logits.iter().map(weight).position(|weight| {
        left -= weight;
        left < 0.0
    });
    drawn.unwrap_or(0) as u32
}

fn main() -> Result<(), Box<dyn Error>> {
    let checkpoint = match env::args().nth(1) {
        Some(folder) => Checkpoint::open(Path::new(&folder))?,
        None => Checkpoint::embedded(&moeflux_tales::FILES)?,
    };
    let engine = Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {})?;
    let text = engine.text()?;

    let mut session = engine.session()?;
    session.sync(&text.encode(PROMPT)?, &mut StepControl::default())?;
    let mark = session.mark()?;
    for letter in ['f', 'l', 'p'] {
        session.rewind(&mark)?;
        let mut best = None;
        for (id, logit) in (0..).zip(session.logits()) {
            let is_best = best.is_none_or(|(_, other)| *logit > other);
            if is_best
                && text
                    .tokenizer()
                    .decode(&[id], true)?
                    .strip_prefix(' ')
                    .is_some_and(|t| t.starts_with(letter))
            {
                best = Some((id, *logit));
            }
        }
        let (mut token, _) = best.ok_or("no token begins with this letter")?;
        let mut decoder = text.decoder();
        let mut told = decoder.push(token)?.to_owned();
        let mut random = 42_u64;
        for _ in 0..16 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            token = min_p(session.decode(token)?, 0.2, (random >> 40) as f64 / (1 << 24) as f64);
            if text.end().contains(token) {
                break;
            }
            told += decoder.push(token)?;
        }
        println!("{PROMPT}{told} ...");
    }
    Ok(())
}
