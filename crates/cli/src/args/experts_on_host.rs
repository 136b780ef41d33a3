//! `--experts-on-host`: a way to compute experts in host memory, and the file of its division.

use std::{path::PathBuf, str::FromStr, sync::Arc};

use moeflux::{
    Error,
    experts::{ExpertPlan, ExpertsOnHost, PlacementOptions, UseCountsFolder},
};

use crate::{folders, progress::Ui};

/// Value of `--experts-on-host`: `read`, `compute`, `auto` or `auto:FILE`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostExpertsArg {
    pub(crate) how: ExpertsOnHost,
    /// File with the division between card and processor.
    pub(crate) file: Option<PathBuf>,
}

impl FromStr for HostExpertsArg {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.strip_prefix("auto:") {
            Some(file) if !file.is_empty() => Ok(Self {
                how: ExpertsOnHost::Auto,
                file: Some(folders::below_home(file.as_ref())),
            }),
            _ => Ok(Self { how: text.parse()?, file: None }),
        }
    }
}

impl HostExpertsArg {
    /// Options of placement, with the recorded division if there is one.
    ///
    /// # Errors
    /// The file has no valid division.
    pub(crate) fn placement(given: Option<&Self>) -> Result<PlacementOptions, Error> {
        let file = given.and_then(|given| given.file.as_deref());
        let recorded = file.map(ExpertPlan::read).transpose()?.flatten();
        let folder = folders::use_counts().map(UseCountsFolder::new);
        let options = PlacementOptions::default().use_counts(folder).is_fixed(file.is_some());
        Ok(options.recorded(recorded.map(Arc::new)))
    }

    /// Writes a new division to its file, unless it is there already.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn record(
        given: Option<&Self>,
        used: &PlacementOptions,
        plan: Option<&ExpertPlan>,
        ui: Ui,
    ) -> Result<(), Error> {
        let file = given.and_then(|given| given.file.as_deref());
        let Some(file) = file.filter(|_| used.recorded.is_none()) else { return Ok(()) };
        match plan {
            Some(plan) => {
                plan.write(file)?;
                ui.note(format_args!(
                    "the division of experts {} is recorded in {}",
                    plan.number(),
                    file.display()
                ));
            }
            None => ui.note(format_args!(
                "{} is not written: card and processor divide no experts here",
                file.display()
            )),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_goes_with_auto_only() {
        let parse = |text: &str| text.parse::<HostExpertsArg>();
        let auto = parse("auto:a/plan.json").unwrap();
        assert_eq!((auto.how, auto.file), (ExpertsOnHost::Auto, Some("a/plan.json".into())));
        for how in ExpertsOnHost::ALL {
            assert_eq!(parse(how.name()).unwrap(), HostExpertsArg { how, file: None });
        }
        for wrong in ["auto:", "read:a.json", "compute:a.json", "Auto"] {
            assert!(parse(wrong).unwrap_err().to_string().contains("read, compute, auto"));
        }
    }
}
