//! Text wrapped at words, piece by piece as it arrives.

use std::io;

use terminal_size::{Width, terminal_size_of};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Columns before the edge where a word waits for its end. Few words are longer, so others are
/// printed as they come.
const EDGE: usize = 24;

/// Distance of tab stops.
const TAB: usize = 8;

/// Columns of the terminal that stdout is; `None` elsewhere, and where a terminal does not say.
pub(crate) fn stdout_columns() -> Option<usize> {
    terminal_size_of(io::stdout()).map(|(Width(columns), _)| columns.into())
}

/// Columns of the terminal that stderr is, as of stdout.
pub(crate) fn stderr_columns() -> Option<usize> {
    terminal_size_of(io::stderr()).map(|(Width(columns), _)| columns.into())
}

/// A whole text, wrapped at words.
pub(crate) fn wrapped(text: &str, columns: usize) -> String {
    let mut wrapper = Wrapper::new(columns);
    wrapper.push(text) + &wrapper.finish()
}

/// Wraps a text at words: its lines may come in any pieces.
///
/// A word is held back near the edge only. Lines of code blocks and of tables stay as they are, and
/// so do words that are longer than a line.
#[derive(Debug)]
pub(crate) struct Wrapper {
    columns: usize,
    /// Column of the cursor.
    at: usize,
    /// Spaces between the cursor and the word.
    gap: String,
    /// The part of the word that is held back.
    word: String,
    /// Whether the word's start is printed, which decides its place.
    is_placed: bool,
    /// Last character.
    last: char,
    /// First characters of the line, as many as tell what it is.
    start: String,
    /// Whether the line is in a code block.
    is_code: bool,
}

impl Wrapper {
    pub(crate) fn new(columns: usize) -> Self {
        Self {
            columns: columns.max(1),
            at: 0,
            gap: String::new(),
            word: String::new(),
            is_placed: false,
            last: '\n',
            start: String::new(),
            is_code: false,
        }
    }

    /// The terminal has another width.
    pub(crate) fn resize(&mut self, columns: usize) {
        self.columns = columns.max(1);
    }

    /// Takes a piece, and returns the text to print.
    pub(crate) fn push(&mut self, piece: &str) -> String {
        let mut out = String::new();
        for c in piece.chars() {
            self.add(c, &mut out);
        }
        let end = self.at + self.width_of_gap() + self.word.width();
        let stays = end + EDGE <= self.columns;
        let moves = end > self.columns;
        if !self.word.is_empty() && (self.is_placed || stays || moves) {
            self.place(&mut out);
            self.is_placed = true;
        }
        out
    }

    /// Text that is held back.
    pub(crate) fn finish(&mut self) -> String {
        let mut out = String::new();
        self.end_word(&mut out);
        out
    }

    fn add(&mut self, c: char, out: &mut String) {
        let last = std::mem::replace(&mut self.last, c);
        if c == '\n' {
            self.end_word(out);
            out.push('\n');
            (self.at, self.is_code) = (0, self.is_code != self.is_fence());
            self.gap.clear();
            self.start.clear();
            return;
        }
        if self.start.len() < FENCE && !c.is_whitespace() {
            self.start.push(c);
        }
        if self.is_code || self.is_fence() || self.start.starts_with('|') {
            *out += &std::mem::take(&mut self.gap);
            *out += &std::mem::take(&mut self.word);
            out.push(c);
        } else if c == ' ' || c == '\t' {
            self.end_word(out);
            self.gap.push(c);
        } else {
            if may_break(last, c) {
                self.end_word(out);
            }
            self.word.push(c);
        }
    }

    fn is_fence(&self) -> bool {
        ["```", "~~~"].contains(&self.start.as_str())
    }

    fn end_word(&mut self, out: &mut String) {
        if !self.word.is_empty() {
            self.place(out);
        }
        self.is_placed = false;
    }

    /// Prints what there is of the word, on this line or on the next one.
    fn place(&mut self, out: &mut String) {
        let width = self.word.width();
        if !self.is_placed {
            let gap = self.width_of_gap();
            match self.at > 0 && self.at + gap + width > self.columns {
                true => {
                    out.push('\n');
                    self.at = 0;
                }
                false => {
                    *out += &self.gap;
                    self.at += gap;
                }
            }
            self.gap.clear();
        }
        *out += &std::mem::take(&mut self.word);
        self.at += width;
        // The terminal itself goes on in the next line.
        if self.at > self.columns {
            self.at = (self.at - 1) % self.columns + 1;
        }
    }

    fn width_of_gap(&self) -> usize {
        let end = self.gap.chars().fold(self.at, |at, c| match c {
            '\t' => (at / TAB + 1) * TAB,
            _ => at + 1,
        });
        end - self.at
    }
}

/// Characters of a line that begins or ends a code block.
const FENCE: usize = 3;

/// Whether a line may end between two characters without a space: beside emoji, and beside
/// characters of scripts that write no spaces.
fn may_break(before: char, after: char) -> bool {
    let is_wide = |c: char| c.width() == Some(2);
    let joins = |c: char| c.width() == Some(0) || matches!(c, '\u{1f3fb}'..='\u{1f3ff}');
    (is_wide(before) || is_wide(after))
        && before != '\u{200d}'
        && !joins(after)
        && !after.is_ascii_punctuation()
        && !"、。，．・：；？！…ー～）］｝」』】》〉〕％".contains(after)
        && !"（［｛「『【《〈〔([{\"'".contains(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text wrapped whole, which must be the same character by character.
    fn of(text: &str, columns: usize) -> String {
        let whole = wrapped(text, columns);
        let mut wrapper = Wrapper::new(columns);
        let mut pieces: String = text.chars().map(|c| wrapper.push(&c.to_string())).collect();
        pieces += &wrapper.finish();
        assert_eq!(pieces, whole);
        whole
    }

    #[test]
    fn lines_end_at_words() {
        assert_eq!(of("the quick brown fox", 10), "the quick\nbrown fox");
        assert_eq!(of("a line\n\n  and  another one", 12), "a line\n\n  and\nanother one");
        assert_eq!(of("0123456789", 10), "0123456789");
        assert_eq!(of("a\tb c", 9), "a\tb\nc");
        assert_eq!(of("", 10), "");
        // The text of a line that is as long as the terminal is wide stays whole.
        assert_eq!(of("01234 6789\nx", 10), "01234 6789\nx");
    }

    #[test]
    fn long_words_stay_whole() {
        let url = "https://example.org/a/very/long/path";
        assert_eq!(of(&format!("see {url} and more"), 10), format!("see\n{url} and\nmore"));
    }

    #[test]
    fn code_and_tables_stay_as_they_are() {
        let code = "```sh\nfor i in one two three; do\n```";
        assert_eq!(
            of(&format!("{code}\nand the text after"), 10),
            format!("{code}\nand the\ntext after")
        );
        assert_eq!(of("  ~~~\na b c d e f g\n  ~~~\n", 4), "  ~~~\na b c d e f g\n  ~~~\n");
        assert_eq!(of("| a | b | c |\n", 4), "| a | b | c |\n");
        assert_eq!(of("`a b c`", 4), "`a b\nc`");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        assert_eq!(of("狐狸和乌鸦。", 8), "狐狸和乌\n鸦。");
        assert_eq!(of("狐狸和乌「鸦」", 8), "狐狸和乌\n「鸦」");
        assert_eq!(of("ok 🦊🦊", 6), "ok 🦊\n🦊");
        let family = "👨\u{200d}👩\u{200d}👧";
        assert_eq!(wrapped(&format!("ab {family} c"), 5), format!("ab {family}\nc"));
    }

    #[test]
    fn a_word_waits_near_the_edge_only() {
        let mut wrapper = Wrapper::new(40);
        assert_eq!(wrapper.push("The"), "The");
        assert_eq!(wrapper.push(" fox and the"), " fox and the");
        assert_eq!(wrapper.push(" crow"), "");
        assert_eq!(wrapper.push(" were"), " crow");
        assert_eq!(wrapper.push(&"x".repeat(30)), format!("\nwere{}", "x".repeat(30)));
        assert_eq!(wrapper.push("y"), "y");
        assert_eq!(wrapper.finish(), "");
    }
}
