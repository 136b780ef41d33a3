//! Choice of drafters.

use std::str::FromStr;

use moeflux_base::Error;
use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

use crate::runtime::draft_head::MAX_DRAFTS;

/// Whether and how an answer's next tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftMode {
    /// Not at all.
    #[default]
    Off,
    /// By all drafters, where measurements say that the answer gets faster. On the fast path of a
    /// card steps with drafts have four rows at most, which have the bits of single rows; the same
    /// holds for `Mtp` and `Lookup`.
    Auto,
    /// By the model's head for multi-token prediction, where measurements say that the answer gets
    /// faster.
    Mtp,
    /// By what followed the last tokens before, where measurements say that the answer gets faster.
    Lookup,
    /// By all drafters, with this number of drafts in each step, whatever they cost. On the fast
    /// path of a card, answers may then differ from those without drafts by rounding.
    Always(usize),
}

/// Text that is no [`DraftMode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, off, mtp, lookup, or a number of drafts from 1 to {MAX_DRAFTS}")]
pub struct DraftModeError;

impl FromStr for DraftMode {
    type Err = DraftModeError;

    fn from_str(text: &str) -> Result<Self, DraftModeError> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            "mtp" => Ok(Self::Mtp),
            "lookup" => Ok(Self::Lookup),
            number => match number.parse() {
                Ok(drafts) if (1..=MAX_DRAFTS).contains(&drafts) => Ok(Self::Always(drafts)),
                _ => Err(DraftModeError),
            },
        }
    }
}

impl DraftMode {
    /// Maximum number of drafts of a session in a step.
    pub fn max(self) -> usize {
        match self {
            Self::Off => 0,
            Self::Auto | Self::Mtp | Self::Lookup => MAX_DRAFTS,
            Self::Always(drafts) => drafts.min(MAX_DRAFTS),
        }
    }

    /// Attaches the head to a model, if the mode uses it.
    ///
    /// # Errors
    /// The mode is [`DraftMode::Mtp`], and the model has no head.
    pub(crate) fn attach_head(
        self,
        checkpoint: &Checkpoint,
        blueprint: &mut Blueprint,
    ) -> Result<(), Error> {
        if self.uses_head() {
            blueprint.attach_drafter();
        }
        if self == Self::Mtp && blueprint.attached_drafter().is_none() {
            let problem = "expected a head for multi-token prediction, got none that can be run: \
                           exports to MLX leave it out; take the original checkpoint, or a folder \
                           with the head (--drafter DIR)";
            return Err(Error::Checkpoint {
                path: checkpoint.folder().into(),
                problem: problem.into(),
            });
        }
        Ok(())
    }

    /// Whether the model's head drafts.
    pub(crate) const fn uses_head(self) -> bool {
        matches!(self, Self::Auto | Self::Mtp | Self::Always(_))
    }

    /// Whether tokens that followed the last ones before are drafts.
    pub(crate) const fn uses_lookup(self) -> bool {
        matches!(self, Self::Auto | Self::Lookup | Self::Always(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_names() {
        let mode = |text: &str| text.parse::<DraftMode>();
        assert_eq!(mode("auto"), Ok(DraftMode::Auto));
        assert_eq!(mode("mtp"), Ok(DraftMode::Mtp));
        assert_eq!(mode("off").map(DraftMode::max), Ok(0));
        assert_eq!(mode("3"), Ok(DraftMode::Always(3)));
        for wrong in ["0", "4", "-1", "on", "", "99999999999999999999"] {
            assert_eq!(mode(wrong), Err(DraftModeError), "{wrong}");
        }
    }
}
