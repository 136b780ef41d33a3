//! Notes of a response: parts of a request that were not enforced. They are in a header and in
//! the request's record, never in the answer.

use axum::http::{HeaderName, HeaderValue};

/// Header with the notes.
pub(crate) const NOTES: HeaderName = HeaderName::from_static("x-moeflux-notes");

/// Most notes.
const MAX_NOTES: usize = 8;

/// Longest value of the header in bytes.
const MAX_BYTES: usize = 1024;

/// Text between two notes.
const SEPARATOR: &str = "; ";

/// Value of the header with these notes; `None` if there is nothing to note.
pub(crate) fn header(notes: &[String]) -> Option<HeaderValue> {
    HeaderValue::from_str(&value(notes)?).ok()
}

/// The first notes that fit, in visible ASCII.
fn value(notes: &[String]) -> Option<String> {
    let mut value = String::new();
    for note in notes.iter().take(MAX_NOTES) {
        let readable = |c: char| if c == ' ' || c.is_ascii_graphic() { c } else { '?' };
        let mut note: String = note.chars().map(readable).collect();
        if value.is_empty() {
            note.truncate(MAX_BYTES);
        } else if value.len() + SEPARATOR.len() + note.len() > MAX_BYTES {
            break;
        } else {
            value += SEPARATOR;
        }
        value += &note;
    }
    (!value.is_empty()).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_few_short_notes_in_ascii() {
        assert_eq!(value(&[]), None);
        let notes = ["a.\u{e9}\n is not enforced".to_owned(), "b is not enforced".to_owned()];
        assert_eq!(value(&notes).unwrap(), "a.?? is not enforced; b is not enforced");
        let many: Vec<_> = (0..20).map(|index| format!("n{index}")).collect();
        assert_eq!(value(&many).unwrap(), "n0; n1; n2; n3; n4; n5; n6; n7");
        let long = ["x".repeat(600), "y".repeat(600), "z".to_owned()];
        assert_eq!(value(&long).unwrap(), "x".repeat(600));
        assert_eq!(value(&["x".repeat(3000)]).unwrap().len(), MAX_BYTES);
    }
}
