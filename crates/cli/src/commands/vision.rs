//! `vision`: an image as a model sees it.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::Context;
use moeflux::{
    Checkpoint, StepControl,
    base::Readers,
    runtime::{DeviceOptions, ImageRows},
    vision::{ImageData, ImageOptions, ImageSize, PixelValues, Processor, VisionTower},
};
use moeflux_bench::units;
use safetensors::{Dtype, serialize, tensor::TensorView};

use super::images;
use crate::{args::VisionArgs, atomic_file, hub, interrupt, out, progress::Ui};

/// Runs `moeflux vision`.
///
/// # Errors
/// The image, the processor or the tower cannot be read, or the file cannot be written.
pub(crate) fn run(args: &VisionArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let folder = hub::located(&args.model, args.yes, ui)?;
    let processor = Processor::open(&folder)?.with_max_tokens(args.image_max_tokens);
    let image = images::image(&args.image)?;
    let layout = processor.layout(image.size())?;
    let pixels = processor.process(&image)?;
    let rows = match args.processor_only {
        true => None,
        false => Some(rows(args, &folder, &pixels, ui)?),
    };
    if let Some(target) = &args.out {
        let file = tensors(&image, &pixels, rows.as_ref())?;
        atomic_file::write(target, Readers::Umask, &file)?;
        ui.line(format_args!("written to {}", target.display()));
    }
    let [_, patch_rows, patch_columns] = pixels.grid;
    let sides = |ImageSize { width, height }| format!("{width} x {height}");
    out::line(format_args!(
        "{} pixels, scaled to {}; {patch_columns} x {patch_rows} patches, {}",
        sides(image.size()),
        sides(layout.resized),
        units::plural(pixels.tokens.into(), "token"),
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Rows of the model's vision tower.
///
/// # Errors
/// The model has no tower, it cannot be loaded, or the user interrupted it.
fn rows(
    args: &VisionArgs,
    folder: &Path,
    pixels: &PixelValues,
    ui: Ui,
) -> anyhow::Result<ImageRows> {
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let options = DeviceOptions::default()
        .name(args.device.clone())
        .threads(args.threads.map(usize::from))
        .exact(args.exact);
    let mut tower = VisionTower::open(&checkpoint, ImageOptions::default().device(options))?
        .with_context(|| format!("{}: the model has no vision tower", folder.display()))?;
    let armed = interrupt::arm();
    let bar = ui.share(&format!("computing {} patches", pixels.rows));
    let mut progress = |share: f64| bar.share(share);
    let mut control = StepControl::default().cancel(armed.flag()).progress(&mut progress);
    let rows = tower.rows(&[pixels], &mut control)?.pop();
    rows.context("the vision tower computed nothing")
}

/// A safetensors file of an image.
///
/// # Errors
/// The library refuses the tensors.
fn tensors(
    image: &ImageData,
    pixels: &PixelValues,
    rows: Option<&ImageRows>,
) -> anyhow::Result<Vec<u8>> {
    let le_bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    let grid: Vec<u8> = pixels.grid.iter().flat_map(|side| side.to_le_bytes()).collect();
    let rgb_shape = vec![image.size().height as usize, image.size().width as usize, 3];
    let mut floats =
        vec![("pixel_values".to_owned(), [pixels.rows, pixels.width], le_bytes(&pixels.values))];
    if let Some(rows) = rows {
        let shape = [rows.tokens(), rows.width];
        floats.push(("embeds".to_owned(), shape, le_bytes(&rows.values)));
        let deepstack = rows.deepstack.iter().enumerate();
        floats.extend(deepstack.map(|(i, d)| (format!("deepstack.{i}"), shape, le_bytes(d))));
    }
    let mut views = vec![
        ("decoded_rgb".to_owned(), TensorView::new(Dtype::U8, rgb_shape, image.rgb())?),
        ("grid_thw".to_owned(), TensorView::new(Dtype::I32, vec![pixels.grid.len()], &grid)?),
    ];
    for (name, shape, bytes) in &floats {
        views.push((name.clone(), TensorView::new(Dtype::F32, shape.to_vec(), bytes)?));
    }
    Ok(serialize(views, None)?)
}
