//! Arguments of images.

use clap::{Args, ValueEnum};

use super::headings::IMAGES;

/// How images are read.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = IMAGES)]
pub(crate) struct ImageArgs {
    /// Maximum tokens of an image, to which it is scaled [default: 256, with a tower on a GPU 4096]
    ///
    /// Never more than the model's own maximum. With --device auto the CPU computes the tower. It
    /// takes some five times as long as a prompt of its tokens; a note says where an image lost
    /// detail.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) image_max_tokens: Option<u32>,
    /// Whether the vision tower stays loaded: passing reads it for images and drops it; on a GPU it
    /// stays
    #[arg(
        long,
        value_enum,
        default_value = "passing",
        value_name = "passing|resident",
        hide_possible_values = true
    )]
    pub(crate) vision: TowerPlace,
}

/// Place of a vision tower's weights between images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TowerPlace {
    /// On disk.
    Passing,
    /// In memory.
    Resident,
}
