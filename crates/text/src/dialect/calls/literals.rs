//! Literals at the start of text that is held back until it is certain.

/// Maximum bytes of the name of a tool or of a parameter.
pub(super) const MAX_NAME: usize = 256;

/// Relation of held text to some literals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Match {
    /// The text begins with the literal of this index.
    Found(usize),
    /// More text may complete a literal.
    Partial,
    Absent,
}

/// Looks for one of `literals` at the start of `text`. None of them begins another.
pub(super) fn at_start(text: &str, literals: &[&str]) -> Match {
    if let Some(found) = literals.iter().position(|literal| text.starts_with(literal)) {
        return Match::Found(found);
    }
    match literals.iter().any(|literal| literal.starts_with(text)) {
        true => Match::Partial,
        false => Match::Absent,
    }
}

/// As [`at_start`], behind white space.
pub(super) fn behind_space(text: &str, literals: &[&str]) -> Match {
    at_start(text.trim_start(), literals)
}

/// End of a value between tags.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValueEnd {
    /// Tag that ends the value.
    pub(super) close: &'static str,
    /// Tags of which one must follow. Otherwise the value goes on.
    pub(super) follow: &'static [&'static str],
    /// Whether a line end before the tag belongs to it.
    pub(super) has_newline: bool,
}

/// Relation of held text to the end of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueMatch {
    /// The value ended. The next tag begins at this byte.
    Ended(usize),
    Partial,
    /// The first character belongs to the value.
    Absent,
}

impl ValueEnd {
    pub(super) fn at_start(&self, held: &str) -> ValueMatch {
        let text = if self.has_newline { held.strip_prefix('\n').unwrap_or(held) } else { held };
        match at_start(text, &[self.close]) {
            Match::Partial => ValueMatch::Partial,
            Match::Absent => ValueMatch::Absent,
            Match::Found(_) => {
                let after = &text[self.close.len()..];
                match behind_space(after, self.follow) {
                    Match::Partial => ValueMatch::Partial,
                    Match::Absent => ValueMatch::Absent,
                    Match::Found(_) => ValueMatch::Ended(held.len() - after.trim_start().len()),
                }
            }
        }
    }
}

/// Splits the first character off.
pub(super) fn take_first(held: &mut String) -> Option<char> {
    (!held.is_empty()).then(|| held.remove(0))
}

/// Whether a text can be a tool's name.
pub(super) fn is_name(text: &str) -> bool {
    let is_bad = |c: char| c.is_whitespace() || matches!(c, '<' | '>' | '{' | '}' | '"');
    !text.is_empty() && text.len() <= MAX_NAME && !text.contains(is_bad)
}
