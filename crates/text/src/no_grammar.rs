//! Stands for `grammar` in a build without the feature.

/// No grammars.
#[derive(Debug)]
pub(crate) struct NoGrammars;

impl NoGrammars {
    pub(crate) const fn new(_bytes: u64) -> Self {
        Self
    }
}

pub(crate) use NoGrammars as Grammars;
