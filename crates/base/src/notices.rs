//! Troubles of a running program that no request fails of, such as a full disk: each is said once.

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time after which a trouble that was over is said again.
const PAUSE: Duration = Duration::from_secs(3600);

/// Function that takes the text of a notice.
type WriteNotice = dyn Fn(&str) + Send + Sync;

/// Receiver of notices. Clones share what was said. The default drops all.
#[derive(Clone, Default)]
pub struct Notices(Option<Arc<NoticeWriter>>);

struct NoticeWriter {
    write: Box<WriteNotice>,
    /// Troubles by the file or folder that has them.
    said: Mutex<HashMap<PathBuf, SaidTrouble>>,
}

struct SaidTrouble {
    since: Instant,
    is_over: bool,
}

impl Notices {
    /// Gives each notice to `write`, as one line without its end.
    pub fn new(write: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(NoticeWriter { write: Box::new(write), said: Mutex::default() })))
    }

    /// Says a trouble with `path`, unless one was said since it was last well.
    pub fn trouble(&self, path: &Path, text: impl fmt::Display) {
        let Some(writer) = &self.0 else { return };
        let mut said = writer.said.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = |said: &SaidTrouble| said.is_over && said.since.elapsed() >= PAUSE;
        if said.get(path).is_none_or(is_new) {
            said.insert(path.into(), SaidTrouble { since: Instant::now(), is_over: false });
            drop(said);
            (writer.write)(&text.to_string());
        }
    }

    /// Takes note that all is well with `path`. A later trouble is said again, an hour after the
    /// last one at the earliest.
    pub fn well(&self, path: &Path) {
        let Some(writer) = &self.0 else { return };
        let mut said = writer.said.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(trouble) = said.get_mut(path) {
            trouble.is_over = true;
        }
    }

    /// Says something that happened, each time.
    pub fn say(&self, text: impl fmt::Display) {
        if let Some(writer) = &self.0 {
            (writer.write)(&text.to_string());
        }
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Notices({})", if self.0.is_some() { "on" } else { "off" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_is_said_once_for_each_path() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        let notices = Notices::new(move |text| written.lock().unwrap().push(text.to_owned()));
        for _ in 0..3 {
            notices.clone().trouble(Path::new("a"), "a is full");
            notices.trouble(Path::new("b"), "b is full");
            notices.well(Path::new("a"));
        }
        assert_eq!(*lines.lock().unwrap(), ["a is full", "b is full"]);
        Notices::default().trouble(Path::new("a"), "without a listener");
    }
}
