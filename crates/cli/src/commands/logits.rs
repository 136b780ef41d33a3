//! `logits`: differential testing against another run or engine.

use std::{
    cell::RefCell,
    env,
    hash::{BuildHasher, Hasher, RandomState},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, ensure};
use moeflux::{
    Checkpoint, StepControl,
    model::blueprint::Blueprint,
    runtime::{Logits, StepObserver},
    session::Prompt,
    text::PlacedImage,
    vision::PixelValues,
};
use moeflux_bench::{describe, logits_diff, tensor_file::TensorFile, units};

use super::images::{self, Pictures};
use crate::{
    args::{ImageArgs, LogitsArgs, TowerPlace},
    interrupt,
    load::{self, Needs},
    out,
    progress::Ui,
    tensor_writer::{PlannedTensor, TensorWriter},
    wrong_use::WrongUse,
};

/// Runs `moeflux logits`.
///
/// # Errors
/// The tokens cannot be read or fed, or a file cannot be written or read.
pub(crate) fn run(args: &LogitsArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let other = args.compare.as_deref().map(TensorFile::open).transpose()?;
    let Some(tokens) = &args.tokens else {
        let (Some(out), Some(other)) = (&args.out, other) else {
            return Err(WrongUse(
                "without --tokens, --out and --compare name two files to compare".into(),
            )
            .into());
        };
        return compare(&TensorFile::open(out)?, &other, args.tolerance);
    };
    let text = super::text::read_text(tokens)?;
    let tokens: Vec<u32> = serde_json::from_str(&text)
        .with_context(|| format!("{}: this is not a JSON array of token ids", tokens.display()))?;
    ensure!(!tokens.is_empty(), "there are no tokens: the array is empty");
    let prefill = args.prefill.unwrap_or(tokens.len());
    if prefill > tokens.len() {
        let given = units::plural(tokens.len() as u64, "token");
        return Err(
            WrongUse(format!("--prefill {prefill} asks for more than the {given} given")).into()
        );
    }
    let checkpoint = load::checkpoint(&args.engine.model, &args.engine.reads.mirror, ui)?;
    let pixels = images::pixels(&args.image, checkpoint.folder())?;
    let ExpandedPrompt { tokens, prefill, images } = match &pixels[..] {
        [] => ExpandedPrompt { tokens, prefill, images: Vec::new() },
        pixels => ExpandedPrompt::new(&checkpoint, &tokens, prefill, pixels)?,
    };

    // Without --out, the file exists only for the comparison.
    let target = args.out.clone().unwrap_or_else(scratch_file);
    let writer = TensorWriter::create(&target)?;
    let most = pixels.iter().map(|image| image.tokens).max();
    let vision = TowerPlace::Passing;
    let needs = Needs {
        positions: Some(tokens.len()),
        images: most.map(|most| ImageArgs {
            image_max_tokens: Some(most),
            // All images of the prompt, which is no longer than the context.
            image_memory: Some(u64::MAX),
            vision,
        }),
        ..Needs::default()
    };
    let engine = load::engine_from(checkpoint, &args.engine, needs, ui)?;
    let mut pictures = Pictures::default();
    for file in &args.image {
        pictures.add(file, &engine, ui)?;
    }
    let images = pictures.of_prompt(&images, &engine, ui)?;
    let recorder = Recorder::new(writer, engine.blueprint(), tokens.len(), args)?;
    if !images.is_empty() {
        recorder.record("tokens", 0, tokens.iter().map(|id| id.to_le_bytes()));
        let axis = |axis: usize| (0..tokens.len()).map(move |index| (index, axis));
        let ids = (0..3).flat_map(axis).map(|(index, axis)| images.position_ids(index)[axis]);
        recorder.record("position_ids", 0, ids.map(u32::to_le_bytes));
    }
    let hidden = engine.blueprint().residual();
    let mut session = engine.session()?;
    let armed = interrupt::arm();
    {
        let bar = ui.share(&format!("computing {}", units::plural(tokens.len() as u64, "token")));
        let steps = [&tokens[..prefill]]
            .into_iter()
            .filter(|s| !s.is_empty())
            .chain(tokens[prefill..].chunks(1));
        let mut first = 0;
        for step in steps {
            let mut tracer =
                StepRecorder { recorder: &recorder, hidden, first: Vec::new(), base: first };
            let mut progress = |share: f64| {
                bar.share((first as f64 + share * step.len() as f64) / tokens.len() as f64);
            };
            let mut control = StepControl::default().cancel(armed.flag()).progress(&mut progress);
            control.observer = args.trace.then_some(&mut tracer as &mut dyn StepObserver);
            let step_prompt = Prompt::new(step, &images);
            let fed = session.feed(step_prompt, Logits::All, &mut control, &mut |row, logits| {
                recorder.record("logits", first + row, logits.iter().map(|x| x.to_le_bytes()));
            });
            recorder.check()?;
            fed?;
            first += step.len();
        }
    }
    let on = describe::device(engine.device(), session.stats().dispatches);
    drop(armed);
    drop(session);
    // The comparison needs no model; free its memory.
    drop(engine);
    let writer = recorder.writer.into_inner();
    let rows = units::plural(tokens.len() as u64, "row");
    let (kept, written) = match &args.out {
        Some(out) => {
            writer.finish()?;
            ui.line(format_args!("{rows} of logits written to {}; {on}", out.display()));
            (None, out.clone())
        }
        None => {
            let written = writer.path().to_owned();
            (Some(writer), written)
        }
    };
    let code = match &other {
        Some(other) => compare(&TensorFile::open(&written)?, other, args.tolerance)?,
        None => ExitCode::SUCCESS,
    };
    if kept.is_some() {
        ui.line(format_args!("{rows} of logits computed; {on}"));
    }
    drop(kept);
    Ok(code)
}

/// Tokens with the placeholders of all rows of their images.
struct ExpandedPrompt {
    tokens: Vec<u32>,
    /// Number of the first tokens that are prefilled.
    prefill: usize,
    images: Vec<PlacedImage>,
}

impl ExpandedPrompt {
    /// Tokens of which `prefill` are prefilled, with these images.
    ///
    /// # Errors
    /// The model takes no images, or there are not as many placeholders.
    fn new(
        checkpoint: &Checkpoint,
        tokens: &[u32],
        prefill: usize,
        images: &[PixelValues],
    ) -> anyhow::Result<Self> {
        let text = load::text(checkpoint)?.context("the model has no tokenizer")?;
        let images = images::of_message(images);
        let (first, rest) = tokens.split_at(prefill);
        let of_first = first.iter().filter(|token| Some(**token) == text.image_token()).count();
        let (now, later) = images.split_at(of_first.min(images.len()));
        let first = text.expand_images(first, now)?;
        let rest = text.expand_images(rest, later)?;
        let prefill = first.tokens.len();
        let moved = |image: PlacedImage| PlacedImage { place: prefill + image.place, ..image };
        let placed = first.images.into_iter().chain(rest.images.into_iter().map(moved));
        Ok(Self { images: placed.collect(), tokens: [first.tokens, rest.tokens].concat(), prefill })
    }
}

/// Prints a comparison; the exit code is 1 if the files differ.
fn compare(a: &TensorFile, b: &TensorFile, tolerance: f32) -> anyhow::Result<ExitCode> {
    let diff = logits_diff::compare(a, b, tolerance)?;
    out::write(&diff.text)?;
    Ok(if diff.differs { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// File in the folder for temporary files, which others may write to: its name cannot be guessed.
fn scratch_file() -> PathBuf {
    let random = RandomState::new().build_hasher().finish();
    env::temp_dir().join(format!("moeflux-logits-{random:016x}.safetensors"))
}

/// Writes rows to the file as they arrive. The engine's callbacks return nothing, so the first
/// error is stored and later rows are dropped.
struct Recorder {
    writer: RefCell<TensorWriter>,
    failed: RefCell<Option<anyhow::Error>>,
}

impl Recorder {
    fn new(
        mut writer: TensorWriter,
        blueprint: &Blueprint,
        rows: usize,
        args: &LogitsArgs,
    ) -> anyhow::Result<Self> {
        let shaped = |name, dtype, shape| PlannedTensor { name, dtype, shape };
        let planned = |name, dtype, width| shaped(name, dtype, vec![rows, width]);
        let mut tensors = vec![planned("logits".to_owned(), "F32", blueprint.vocab)];
        if !args.image.is_empty() {
            tensors.push(shaped("tokens".to_owned(), "I32", vec![rows]));
            tensors.push(shaped("position_ids".to_owned(), "I32", vec![3, rows]));
        }
        if args.trace {
            for (layer, layer_blueprint) in blueprint.layers.iter().enumerate() {
                if let Some(moe) = layer_blueprint.moe() {
                    tensors.push(planned(format!("experts.{layer}"), "I32", moe.router.top_k));
                }
                tensors.push(planned(format!("hidden.{layer}"), "F32", blueprint.residual()));
            }
        }
        writer.header(&tensors)?;
        Ok(Self { writer: RefCell::new(writer), failed: RefCell::new(None) })
    }

    fn record(&self, name: &str, row: usize, words: impl Iterator<Item = [u8; 4]>) {
        if self.failed.borrow().is_none()
            && let Err(error) = self.writer.borrow_mut().rows(name, row, words)
        {
            *self.failed.borrow_mut() = Some(error);
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        self.failed.borrow_mut().take().map_or(Ok(()), Err)
    }
}

/// Observes one step. The engine may split it into chunks, so each layer counts its rows.
struct StepRecorder<'a> {
    recorder: &'a Recorder,
    /// Elements of a row of the residual.
    hidden: usize,
    /// Rows recorded so far by each layer: experts, hidden.
    first: Vec<[usize; 2]>,
    /// Rows of earlier steps.
    base: usize,
}

impl StepRecorder<'_> {
    /// Row in the file for the next `rows` rows of `layer`.
    fn advance(&mut self, layer: usize, which: usize, rows: usize) -> usize {
        if self.first.len() <= layer {
            self.first.resize(layer + 1, [0; 2]);
        }
        let seen = &mut self.first[layer][which];
        *seen += rows;
        self.base + *seen - rows
    }
}

impl StepObserver for StepRecorder<'_> {
    fn experts(&mut self, layer: usize, k: usize, ids: &[u32]) {
        let row = self.advance(layer, 0, ids.len() / k.max(1));
        self.recorder.record(
            &format!("experts.{layer}"),
            row,
            ids.iter().map(|id| id.to_le_bytes()),
        );
    }

    fn hidden(&mut self, layer: usize, rows: &[f32]) {
        let row = self.advance(layer, 1, rows.len() / self.hidden.max(1));
        self.recorder.record(&format!("hidden.{layer}"), row, rows.iter().map(|x| x.to_le_bytes()));
    }
}
