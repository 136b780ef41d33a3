//! Runs of uses of one expert.

use moeflux_ops::{Error, ExpertUse};

use super::{aligned_vec::grow, pool::RowOrder};

/// Runs of consecutive uses of one expert.
#[derive(Default)]
pub(super) struct ExpertRuns {
    /// End index of every run.
    ends: Vec<usize>,
    /// Output row of every use.
    parts: Vec<usize>,
    /// Marks of output rows that [`RowOrder::new`] needs.
    marks: Vec<bool>,
}

impl ExpertRuns {
    /// Bytes of memory for a number of uses.
    pub(super) const fn memory(uses: usize) -> usize {
        uses * (2 * size_of::<usize>() + size_of::<bool>())
    }

    /// Grows to room for a number of uses.
    pub(super) fn reserve(&mut self, uses: usize) -> Result<(), Error> {
        grow(&mut self.ends, uses)?;
        grow(&mut self.parts, uses)?;
        grow(&mut self.marks, uses)
    }

    /// Fills in the runs of `uses`, whose results go to `parts` output rows. Returns the ends of
    /// the runs and the order of the output rows.
    ///
    /// # Errors
    /// Two uses have the same output row.
    pub(super) fn fill(
        &mut self,
        uses: &[ExpertUse],
        parts: usize,
    ) -> Result<(&[usize], RowOrder<'_>), Error> {
        self.reserve(uses.len())?;
        grow(&mut self.marks, parts)?;
        let (mut count, mut end) = (0, 0);
        for run in uses.chunk_by(|a, b| a.slot == b.slot) {
            end += run.len();
            self.ends[count] = end;
            count += 1;
        }
        self.parts.iter_mut().zip(uses).for_each(|(part, expert_use)| *part = expert_use.out_row);
        let order = RowOrder::new(&self.parts[..uses.len()], &mut self.marks);
        let twice = || Error::Shape("two expert results have the same output row".into());
        Ok((&self.ends[..count], order.ok_or_else(twice)?))
    }
}
