//! Arguments of images.

use clap::{Args, ValueEnum};

use super::{headings::IMAGES, values::parse_size};

/// How images are read.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = IMAGES)]
pub(crate) struct ImageArgs {
    /// Maximum tokens of an image, to which it is scaled [default: 256, with a tower on a GPU 4096]
    ///
    /// Never more than the model's own maximum. On a CPU the tower takes some five times as long as
    /// a prompt of its tokens; a note says where an image lost detail.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) image_max_tokens: Option<u32>,
    /// Memory for the images of prompts that wait or are not computed yet [default: 256MiB]
    ///
    /// Never more than a full context of images takes, and by default enough for one of the maximum
    /// size. Requests of a server wait for it; a prompt whose images need more is refused.
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    pub(crate) image_memory: Option<u64>,
    /// Whether the vision tower stays loaded: passing reads it for images and drops it; on a GPU it
    /// stays. With off the model takes no images, and plans no memory for them
    ///
    /// It is on the device of the text. With --device auto it is on the CPU, if the GPU would
    /// otherwise hold less than 7/8 of its experts.
    #[arg(
        long,
        value_enum,
        default_value = "passing",
        value_name = "passing|resident|off",
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
    /// Nowhere.
    Off,
}
