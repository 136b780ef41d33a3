//! Prose in comments and documents: line width, and phrases that read twice.

use std::fs;

use super::{crates, files};

/// Maximum columns of a comment, with indentation and comment marker, and of a line of a document.
const MAX_COLUMNS: usize = 100;

/// Phrases for which the field has shorter or more precise words. Matched as whole words, case
/// ignored, across line breaks.
const BANNED: [&str; 16] = [
    "so many",
    "those that",
    "that one",
    "of its own accord",
    "by itself",
    "somebody",
    "nobody",
    "of its own",
    "under way",
    "gives way",
    "give way",
    "has nothing to say",
    "meets",
    "meet",
    "lies",
    "lie",
];

/// Words that must not start a statement: a noun names the thing instead. Questions are fine.
const BANNED_STARTS: [&str; 1] = ["what"];

/// Passages in which a banned phrase has another sense.
const ALLOWED: [&str; 1] = ["so that one"];

/// One paragraph: each word with its line number.
type Paragraph<'a> = Vec<(usize, &'a str)>;

/// Lines of prose of a file, without markers: line number, width of the whole line, text. `None`
/// for a line that ends a paragraph.
type ProseLine<'a> = Option<(usize, usize, &'a str)>;

/// Comments of Rust or WGSL code, without tables and code blocks.
fn comments(text: &str) -> Vec<ProseLine<'_>> {
    let mut lines = Vec::new();
    let mut in_block = false;
    let mut marker = "";
    for (i, line) in text.lines().enumerate() {
        let comment = line.trim_start();
        let Some(found) = ["///", "//!", "//"].into_iter().find(|m| comment.starts_with(m)) else {
            (in_block, marker) = (false, "");
            lines.push(None);
            continue;
        };
        if found != marker {
            (in_block, marker) = (false, found);
            lines.push(None);
        }
        let prose = comment[found.len()..].trim();
        if prose.starts_with("```") {
            in_block = !in_block;
            lines.push(None);
        } else if in_block || prose.is_empty() || prose.starts_with(['|', '#']) {
            lines.push(None);
        } else {
            if prose.starts_with("- ") {
                lines.push(None);
            }
            lines.push(Some((i + 1, line.chars().count(), prose)));
        }
    }
    lines
}

/// Prose of a Markdown document, without tables, headings and code blocks.
fn document(text: &str) -> Vec<ProseLine<'_>> {
    let mut lines = Vec::new();
    let (mut in_block, mut after_blank) = (false, true);
    for (i, line) in text.lines().enumerate() {
        let prose = line.trim();
        let indented = after_blank && line.starts_with("    ");
        after_blank = prose.is_empty() || indented;
        if prose.starts_with("```") {
            in_block = !in_block;
            lines.push(None);
        } else if in_block || indented || prose.is_empty() || prose.starts_with(['|', '#', '<']) {
            lines.push(None);
        } else {
            if ["- ", "* "].iter().any(|bullet| prose.starts_with(bullet)) {
                lines.push(None);
            }
            lines.push(Some((i + 1, line.chars().count(), prose)));
        }
    }
    lines
}

/// Words of a paragraph in lower case, without punctuation at their ends; `.` marks the end of a
/// sentence, `?` that of a question. Code in backticks becomes one word that matches nothing.
fn words<'a>(paragraph: &Paragraph<'a>) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    let mut in_code = false;
    for (line, word) in paragraph {
        let was_code = in_code;
        in_code ^= word.matches('`').count() % 2 == 1;
        let code = was_code || word.contains('`');
        let core = word.trim_matches(|c: char| !c.is_alphanumeric());
        words.push((*line, if code { "`".to_owned() } else { core.to_lowercase() }));
        let end = word.trim_end_matches(['"', ')', '*', '_', '`']);
        if end.ends_with(['.', ':', ';', '!']) && !in_code {
            words.push((*line, ".".to_owned()));
        } else if end.ends_with('?') && !in_code {
            words.push((*line, "?".to_owned()));
        }
    }
    words
}

/// Violations of a file, as `file:line: problem`.
fn violations(name: &str, text: &str) -> Vec<String> {
    let lines = if name.ends_with(".md") { document(text) } else { comments(text) };
    let mut found = Vec::new();
    let mut paragraph: Paragraph<'_> = Vec::new();
    for line in lines.into_iter().chain([None]) {
        if let Some((number, columns, prose)) = line {
            // A single word cannot be wrapped: a path or an address.
            let words =
                prose.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric));
            if columns > MAX_COLUMNS && words.clone().count() > 1 {
                found.push(format!("{name}:{number}: {columns} columns"));
            }
            paragraph.extend(prose.split_whitespace().map(|word| (number, word)));
            continue;
        }
        let words = words(&paragraph);
        paragraph.clear();
        let is_at = |i: usize, phrase: &str| {
            let phrase = phrase.split(' ');
            phrase.clone().zip(words.get(i..).unwrap_or_default()).all(|(a, (_, b))| a == b)
                && i + phrase.count() <= words.len()
        };
        let is_allowed = |i: usize| {
            let mut starts = i.saturating_sub(2)..=i;
            starts.any(|start| ALLOWED.iter().any(|passage| is_at(start, passage)))
        };
        for (i, (line, _)) in words.iter().enumerate() {
            let banned = BANNED.iter().find(|phrase| is_at(i, phrase) && !is_allowed(i));
            found.extend(banned.map(|phrase| format!("{name}:{line}: {phrase:?}")));
            let starts = i == 0 || [".", "?"].contains(&words[i - 1].1.as_str());
            let end = words[i..].iter().find(|(_, word)| [".", "?"].contains(&word.as_str()));
            let is_question = end.is_some_and(|(_, word)| word == "?");
            let banned = BANNED_STARTS.iter().find(|word| starts && !is_question && is_at(i, word));
            found.extend(banned.map(|word| format!("{name}:{line}: starts with {word:?}")));
        }
    }
    found
}

#[test]
fn violations_are_found_in_comments_and_documents() {
    let long = "x ".repeat(50);
    let code = format!(
        "//! What a file is. It is so\n//! many. Say `by itself`, so that one may. What for?\n\
         fn f() {{}} // {long}\n/// {long}\n/// | {long} |\n/// ```\n/// lies\n/// ```\n\
         const S: &str = \"nobody\"; // as is\n        // Weights that LIE here.\n"
    );
    assert_eq!(
        violations("a.rs", &code),
        [
            "a.rs:1: starts with \"what\"",
            "a.rs:1: \"so many\"",
            "a.rs:4: 104 columns",
            "a.rs:10: \"lie\"",
        ]
    );
    let document = format!(
        "# What lies here\n\nTiles meet\n- that\n- one\n\n    nobody\n\n| nobody |\n\n```\nnobody\n```\n\
         - https://example.org/{}\n- {long}\n",
        "x".repeat(100)
    );
    assert_eq!(violations("a.md", &document), ["a.md:3: \"meet\"", "a.md:15: 102 columns"]);
}

#[test]
fn comments_and_documents_say_it_in_the_fields_words() {
    let mut all = files(".", &["rs", "wgsl"]);
    all.extend(files("../docs", &["md"]));
    for name in ["../README.md", "../ARCHITECTURE.md"] {
        all.push((name.to_owned(), fs::read_to_string(crates().join(name)).unwrap()));
    }
    all.sort();
    let found: Vec<String> = all.iter().flat_map(|(name, text)| violations(name, text)).collect();
    assert!(found.is_empty(), "{} violations:\n{}", found.len(), found.join("\n"));
}
