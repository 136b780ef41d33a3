//! Commands as a user may copy them to a shell.

/// A text as shells take it as one word: in quotes, unless it is plain.
pub(crate) fn word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/.:_-+@%,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    // Shells replace these within double quotes.
    match text.contains(['"', '$', '`', '\\', '!']) {
        false => format!("\"{text}\""),
        true => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_the_quotes_that_they_need() {
        for (text, expected) in [
            ("org/Name-4bit:Q4_K_M", "org/Name-4bit:Q4_K_M"),
            ("Why is it?", r#""Why is it?""#),
            ("What's up", r#""What's up""#),
            ("it's $5!", r"'it'\''s $5!'"),
            ("", r#""""#),
        ] {
            assert_eq!(word(text), expected);
        }
    }
}
