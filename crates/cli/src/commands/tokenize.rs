//! `tokenize`: the tokens of a text.

use std::process::ExitCode;

use anyhow::Context;

use super::images;
use crate::{args::TokenizeArgs, load, out, progress::Ui};

/// Runs `moeflux tokenize`.
///
/// # Errors
/// The text or the tokenizer cannot be read.
pub(crate) fn run(args: &TokenizeArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let text = match args.text.as_str() {
        "-" => super::text::read_stdin()?,
        text => text.to_owned(),
    };
    let checkpoint = load::checkpoint(&args.model, &[], ui)?;
    let tokenizer = load::text(&checkpoint)?.context("the model has no tokenizer")?;
    let mut ids = match args.plain {
        true => tokenizer.encode_continuation(&text)?,
        false => tokenizer.encode(&text)?,
    };
    let pixels = images::pixels(&args.image, checkpoint.folder())?;
    if !pixels.is_empty() {
        ids = tokenizer.expand_images(&ids, &images::of_message(&pixels))?.tokens;
    }
    if args.ids {
        out::exact(serde_json::to_string(&ids)? + "\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut lines = String::new();
    for id in ids {
        let piece = tokenizer.tokenizer().decode(&[id], false)?;
        lines += &format!("{id:>7}\t{}\n", serde_json::to_string(&piece)?);
    }
    out::exact(lines)?;
    Ok(ExitCode::SUCCESS)
}
