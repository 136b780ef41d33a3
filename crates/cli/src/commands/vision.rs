//! `vision`: an image as a model sees it.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    process::ExitCode,
};

use anyhow::Context;
use moeflux::{
    base::Readers,
    vision::{ImageData, ImageLimits, ImageSize, Processor},
};
use moeflux_bench::units;
use safetensors::{Dtype, serialize, tensor::TensorView};

use crate::{args::VisionArgs, atomic_file, hub, out, progress::Ui};

/// Runs `moeflux vision`.
///
/// # Errors
/// The image or the processor cannot be read, or the file cannot be written.
pub(crate) fn run(args: &VisionArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let folder = hub::located(&args.model, args.yes, ui)?;
    let processor = Processor::open(&folder)?.with_max_tokens(args.image_max_tokens);
    let image = image(&args.image)?;
    let layout = processor.layout(image.size())?;
    let pixels = processor.process(&image)?;
    let size = image.size();
    if let Some(target) = &args.out {
        let shape = [size.height as usize, size.width as usize, 3];
        let rows = [pixels.rows, pixels.width];
        let values: Vec<u8> = pixels.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let grid: Vec<u8> = pixels.grid.iter().flat_map(|side| side.to_le_bytes()).collect();
        let file = serialize(
            [
                ("decoded_rgb", TensorView::new(Dtype::U8, shape.to_vec(), image.rgb())?),
                ("grid_thw", TensorView::new(Dtype::I32, vec![pixels.grid.len()], &grid)?),
                ("pixel_values", TensorView::new(Dtype::F32, rows.to_vec(), &values)?),
            ],
            None,
        )?;
        atomic_file::write(target, Readers::Umask, &file)?;
        ui.line(format_args!("written to {}", target.display()));
    }
    let [_, patch_rows, patch_columns] = pixels.grid;
    let sides = |ImageSize { width, height }| format!("{width} x {height}");
    out::line(format_args!(
        "{} pixels, scaled to {}; {patch_columns} x {patch_rows} patches, {}",
        sides(size),
        sides(layout.resized),
        units::plural(pixels.tokens.into(), "token"),
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Image of a file.
///
/// # Errors
/// The file cannot be read, or is no image.
fn image(path: &Path) -> anyhow::Result<ImageData> {
    let limits = ImageLimits::default();
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // A byte more shows that the file is too large.
        File::open(path)?.take(limits.max_bytes as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().with_context(|| format!("{}: cannot read the image", path.display()))?;
    ImageData::decode(&bytes, &limits).with_context(|| path.display().to_string())
}
