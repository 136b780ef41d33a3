//! Patterns of strings, as the compiler of grammars takes them, and tests of single strings.

use std::collections::{BTreeMap, HashMap};

use llguidance::{
    derivre::{Regex, RegexBuilder},
    regex_to_lark,
};

/// Most work to compile a pattern that is tested on strings.
const MATCH_FUEL: u64 = 20_000;

/// Patterns with look-around that others have the same strings as: those of emails in zod, of
/// decimal numbers in pydantic, and of durations in zod.
const SAME: [(&str, &str); 3] = [
    (
        concat!(
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\",
            r".)+[A-Za-z]{2,}$"
        ),
        concat!(
            r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-",
            r"9\-]*\.)+[A-Za-z]{2,}$"
        ),
    ),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?(?:\d+\.?\d*|\.\d+)$"),
    (
        concat!(
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,",
            r"]\d+)?S)?)?)$"
        ),
        concat!(
            r"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:T(?:\d+H(?:\d+M)?(?:\d",
            r"+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S))?|T(?:\d+H(?:\d+M)?",
            r"(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S))$"
        ),
    ),
];

/// Patterns that together allow the strings of this one, without look-around.
///
/// # Errors
/// It has a part that cannot be enforced, as text.
pub(super) fn plain(pattern: &str) -> Result<Vec<String>, String> {
    if let Some((_, same)) = SAME.iter().find(|(own, _)| *own == pattern) {
        return Ok(vec![(*same).to_owned()]);
    }
    let (mut parts, mut rest) = (Vec::new(), pattern.to_owned());
    // A look-ahead at the start is one more pattern.
    while let Some(ahead) = rest.strip_prefix("^(?=") {
        let Some(end) = group_end(ahead) else { break };
        if ahead[..end].contains("(?") && feature(&ahead[..end]).is_some() {
            break;
        }
        parts.push(format!("^(?:{})", &ahead[..end]));
        rest = format!("^{}", &ahead[end + 1..]);
    }
    if let Some(feature) = feature(&rest) {
        return Err(feature);
    }
    parts.push(rest);
    Ok(parts)
}

/// Index of the parenthesis that closes a group.
fn group_end(text: &str) -> Option<usize> {
    let (mut depth, mut in_class, mut is_escaped) = (0_usize, false, false);
    for (index, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '[' if !in_class => in_class = true,
            ']' if in_class => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class && depth == 0 => return Some(index),
            ')' if !in_class => depth -= 1,
            _ => {}
        }
    }
    None
}

/// A part of a pattern that no grammar has, in words.
fn feature(pattern: &str) -> Option<String> {
    let (mut in_class, mut rest) = (false, pattern);
    while let Some(c) = rest.chars().next() {
        if c == '\\' {
            let escaped = rest[1..].chars().next()?;
            match escaped {
                '1'..='9' | 'k' if !in_class => {
                    return Some(format!("the pattern has a back-reference, \\{escaped}"));
                }
                'b' | 'B' if !in_class => {
                    return Some(format!("the pattern has a boundary of words, \\{escaped}"));
                }
                _ => {}
            }
            rest = &rest[1 + escaped.len_utf8()..];
            continue;
        }
        match c {
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => {
                for (start, name) in [
                    ("(?=", "look-ahead"),
                    ("(?!", "look-ahead"),
                    ("(?<=", "look-behind"),
                    ("(?<!", "look-behind"),
                ] {
                    if rest.starts_with(start) {
                        return Some(format!("the pattern has a {name}, {start}…)"));
                    }
                }
            }
            _ => {}
        }
        rest = &rest[c.len_utf8()..];
    }
    None
}

/// Pattern of all strings but these.
pub(super) fn all_but(strings: &[&str]) -> String {
    let mut root = Letters::default();
    for text in strings {
        let mut letters = &mut root;
        for c in text.chars() {
            letters = letters.next.entry(c).or_default();
        }
        letters.is_end = true;
    }
    format!("^(?:{})$", root.others())
}

/// Strings by their letters.
#[derive(Default)]
struct Letters {
    next: BTreeMap<char, Letters>,
    is_end: bool,
}

impl Letters {
    /// Regular expression of the rests that are none of the strings.
    fn others(&self) -> String {
        let mut options = Vec::new();
        if !self.is_end {
            options.push(String::new());
        }
        if self.next.is_empty() {
            options.push("(?s:.)(?s:.*)".to_owned());
            return format!("(?:{})", options.join("|"));
        }
        let letters: String = self.next.keys().map(|c| code(*c)).collect();
        options.push(format!("[^{letters}](?s:.*)"));
        for (c, rest) in &self.next {
            options.push(format!("{}{}", code(*c), rest.others()));
        }
        format!("(?:{})", options.join("|"))
    }
}

/// A character as an escape.
fn code(c: char) -> String {
    format!("\\x{{{:X}}}", u32::from(c))
}

/// Pattern of one string.
pub(super) fn exactly(text: &str) -> String {
    format!("^{}$", text.chars().map(code).collect::<String>())
}

/// Pattern of strings of these lengths.
pub(super) fn of_length(shortest: u64, longest: Option<u64>) -> String {
    let longest = longest.map(|longest| longest.to_string()).unwrap_or_default();
    format!("^(?s:.{{{shortest},{longest}}})$")
}

/// Compiled patterns.
#[derive(Default)]
pub(super) struct PatternTests(HashMap<String, Option<Vec<Regex>>>);

impl PatternTests {
    /// Whether a string matches a pattern; `None` if that is not known.
    pub(super) fn matches(&mut self, pattern: &str, text: &str) -> Option<bool> {
        let compiled = self.0.entry(pattern.to_owned()).or_insert_with(|| {
            let regex = |part: &String| {
                let mut builder = RegexBuilder::new();
                let regex = builder.mk_regex_for_serach(&regex_to_lark(part, "dw")).ok()?;
                builder.to_regex_limited(regex, MATCH_FUEL).ok()
            };
            plain(pattern).ok()?.iter().map(regex).collect()
        });
        compiled.as_mut().map(|all| all.iter_mut().all(|regex| regex.is_match(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_grammar_has_is_named() {
        for (pattern, expected) in [
            ("^(?!a)b", "look-ahead"),
            ("a(?=b)", "look-ahead"),
            ("(?<=a)b", "look-behind"),
            ("(?<!a)b", "look-behind"),
            (r"(a)\1", "back-reference"),
            (r"(?<x>a)\k<x>", "back-reference"),
            (r"\bword", "boundary of words"),
        ] {
            let problem = plain(pattern).unwrap_err();
            assert!(problem.contains(expected), "{pattern}: {problem}");
        }
        for pattern in ["[(?=]", r"\(?=a", "(?<name>a)", "(?:a)", r"[\b]", r"\\b"] {
            assert_eq!(plain(pattern).unwrap(), [pattern]);
        }
    }

    #[test]
    fn a_look_ahead_at_the_start_is_one_more_pattern() {
        let parts = plain(r"^(?=.{1,253}\.?$)[a-z](?:\.[a-z])*$").unwrap();
        assert_eq!(parts, [r"^(?:.{1,253}\.?$)", r"^[a-z](?:\.[a-z])*$"]);
    }

    #[test]
    fn patterns_of_libraries_have_the_same_strings_without_look_around() {
        let mut tests = PatternTests::default();
        let mut check = |index: usize, strings: [&[&str]; 2]| {
            for (texts, expected) in strings.into_iter().zip([true, false]) {
                for text in texts {
                    assert_eq!(tests.matches(SAME[index].0, text), Some(expected), "{text}");
                }
            }
        };
        check(
            0,
            [
                &["a@b.co", "a.b@c.d.org", "a'b+c-d_e@x-y.com", "a.'b@x.io"],
                &[".a@b.co", "a..b@c.co", "a.@b.co", "a'@b.co", "a@b", "@b.co", "a@-b.co"],
            ],
        );
        check(
            1,
            [
                &["1", "-1.", "+.5", "0012.50", "-0"],
                &["", "-", "+", ".", "-.", "1e5", "--1", "1.2.3"],
            ],
        );
        check(
            2,
            [
                &["P1W", "P1Y2M3D", "PT5S", "P1DT2H", "PT1,5S", "P1YT1M", "P2M", "P1Y3D"],
                &["P", "PT", "P1DT", "P1W2D", "1D", "P1.5D", "PT1H2"],
            ],
        );
    }

    #[test]
    fn all_strings_but_some() {
        let mut tests = PatternTests::default();
        let pattern = all_but(&["fox", "fo", "crow", "", "a/b\"", "é"]);
        for text in ["fox", "fo", "crow", "", "a/b\"", "é"] {
            assert_eq!(tests.matches(&pattern, text), Some(false), "{text}");
        }
        for text in ["f", "foxy", "cro", "x", "fOx", "a/b", "è", "\n"] {
            assert_eq!(tests.matches(&pattern, text), Some(true), "{text}");
        }
    }
}
