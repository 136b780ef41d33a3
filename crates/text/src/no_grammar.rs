//! Stands for `grammar` in a build without the feature.

/// No grammars.
#[derive(Debug)]
pub(crate) struct Grammars;

impl Grammars {
    pub(crate) const fn new(_bytes: u64) -> Self {
        Self
    }
}
