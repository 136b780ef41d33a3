use std::mem;

use crate::base::error::Error;

/// Finds stop strings in a text that comes in pieces.
///
/// The text ends before the stop string that is complete first; of several that are complete at the same place, before
/// the longest. How the text is cut into pieces makes no difference.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// The end of the text so far that may be the beginning of a stop string.
    held: String,
    out: String,
    stopped: bool,
}

/// What [`StopStrings::push`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopResult<'a> {
    /// Text that belongs to the answer for sure.
    pub emit: &'a str,
    /// Whether a stop string was found; nothing comes after it.
    pub stopped: bool,
}

impl StopStrings {
    /// A matcher for `stops`; with none, all text passes at once.
    ///
    /// # Errors
    /// [`Error::Input`] when one is empty.
    pub fn new(stops: Vec<String>) -> Result<StopStrings, Error> {
        if stops.iter().any(String::is_empty) {
            return Err(Error::Input(
                "a stop string is empty: leave it out, or give it some text".into(),
            ));
        }
        Ok(StopStrings { stops, ..StopStrings::default() })
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str) -> StopResult<'_> {
        self.out.clear();
        if !self.stopped {
            self.held.push_str(text);
            let found = self.stops.iter().filter_map(|stop| {
                let start = self.held.find(stop.as_str())?;
                Some((start + stop.len(), start))
            });
            if let Some((_, start)) = found.min() {
                self.stopped = true;
                self.out.push_str(&self.held[..start]);
                self.held.clear();
            } else {
                let safe = self.held.len() - self.doubtful();
                self.out.push_str(&self.held[..safe]);
                self.held.drain(..safe);
            }
        }
        StopResult { emit: &self.out, stopped: self.stopped }
    }

    /// The rest of the text, which stayed the mere beginning of a stop string; starts over.
    pub fn finish(&mut self) -> &str {
        self.stopped = false;
        self.out = mem::take(&mut self.held);
        &self.out
    }

    /// The length of the longest end of `held` that a stop string begins with.
    fn doubtful(&self) -> usize {
        let longest = self.stops.iter().map(|stop| stop.len() - 1).max().unwrap_or(0);
        let ends = self.held.char_indices().rev().map(|(at, _)| &self.held[at..]);
        let ends = ends.take_while(|end| end.len() <= longest);
        ends.filter(|end| self.stops.iter().any(|stop| stop.starts_with(end)))
            .map(str::len)
            .max()
            .unwrap_or(0)
    }
}
