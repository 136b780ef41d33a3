//! Embeddings: similarity of sentences by the mean hidden state of the last layer.
//!
//! `cargo run --release -p moeflux --example hidden_states [FOLDER]`; without a folder, the
//! embedded model.
#![allow(clippy::print_stdout, reason = "the table is for people")]

use std::{env, error::Error, path::Path};

use moeflux::{
    Checkpoint, Engine, EngineOptions, StepControl,
    runtime::{Logits, StepObserver},
};

const SENTENCES: [&str; 4] = [
    "A Fox saw a Crow with a piece of cheese in her beak.",
    "The crow let the cheese fall, and the fox ran off with it.",
    "The King married the princess, and the wedding was splendid.",
    "The prince and his bride became king and queen.",
];

/// Sum of a layer's outputs over all tokens.
struct Sum {
    layer: usize,
    hidden: Vec<f64>,
}

impl StepObserver for Sum {
    fn experts(&mut self, _layer: usize, _k: usize, _ids: &[u32]) {}

    /// `rows` is `(tokens of the step, hidden)`. A long prompt takes several steps.
    fn hidden(&mut self, layer: usize, rows: &[f32]) {
        if layer == self.layer {
            for row in rows.chunks_exact(self.hidden.len()) {
                self.hidden.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
            }
        }
    }
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn main() -> Result<(), Box<dyn Error>> {
    let checkpoint = match env::args().nth(1) {
        Some(folder) => Checkpoint::open(Path::new(&folder))?,
        None => Checkpoint::embedded(&moeflux_tales::FILES)?,
    };
    let engine = Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {})?;
    let (layers, hidden) = (engine.blueprint().layers.len(), engine.blueprint().residual());

    let mut session = engine.session()?;
    let mut embeddings = Vec::new();
    for sentence in SENTENCES {
        let tokens = engine.text()?.encode(sentence)?;
        let mut sum = Sum { layer: layers - 1, hidden: vec![0.0; hidden] };
        let mut control = StepControl::default().observer(&mut sum);
        // `feed` computes every token; `sync` would skip cached ones.
        session.reset()?;
        session.feed(&tokens, Logits::Last, &mut control, &mut |_, _| {})?;
        // Cosine similarity is the same for a sum and a mean.
        embeddings.push(sum.hidden);
    }
    for (sentence, a) in SENTENCES.iter().zip(&embeddings) {
        let row: Vec<String> = embeddings.iter().map(|b| format!("{:6.3}", cosine(a, b))).collect();
        println!("{}  {sentence}", row.join(" "));
    }
    Ok(())
}
