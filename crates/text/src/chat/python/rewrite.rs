//! Changes to a template's source, where the library's operators differ from Jinja2's and have no
//! hook.

use std::ops::Range;

use super::filters::{FORMAT_OPERATOR, LOOP_ITEMS};

/// The source with these changes:
/// - `{% generation %}` tags are no-ops. In `transformers` they mark the assistant's part for
///   training and have no effect on rendering.
/// - `for x in ITEMS` becomes `for x in (ITEMS)|_loop_items`: loops over a text know its length.
/// - A unary `+` becomes `- -`, which has the same precedence and is as strict.
/// - `'...' % VALUES` becomes `'...' |_format_operator(VALUES)`, and so does `x % (a, b)`.
pub(in crate::chat) fn rewritten(source: &str) -> String {
    let mut edits = Vec::new();
    let mut position = 0;
    while let Some(tag) = next_tag(source, position) {
        position = tag.end;
        if !source[tag.clone()].starts_with("{#") {
            edit_tag(source, tag, &mut edits);
        }
    }
    // Insertions come before a replacement at the same place.
    edits.sort_by_key(|edit: &Edit| (edit.range.start, edit.range.end));
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    for Edit { range, text } in edits {
        out.push_str(&source[copied..range.start]);
        out.push_str(&text);
        copied = range.end;
    }
    out + &source[copied..]
}

/// Replacement of a range of bytes of the source.
struct Edit {
    range: Range<usize>,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LexemeKind {
    Word,
    Text,
    Open,
    Close,
    Operator,
}

/// A word of an expression, with its range in the source.
struct Lexeme {
    kind: LexemeKind,
    range: Range<usize>,
}

/// The next comment, expression or statement, with its delimiters. The contents of `raw` blocks
/// have none.
fn next_tag(source: &str, position: usize) -> Option<Range<usize>> {
    let start = position
        + source[position..]
            .find("{{")
            .into_iter()
            .chain(source[position..].find("{%"))
            .chain(source[position..].find("{#"))
            .min()?;
    if source[start..].starts_with("{#") {
        return Some(start..start + source[start..].find("#}")? + 2);
    }
    let close = if source[start..].starts_with("{%") { "%}" } else { "}}" };
    let (mut depth, mut at) = (0usize, start + 2);
    loop {
        let rest = &source[at..];
        if depth == 0 && rest.starts_with(close) {
            break;
        }
        let c = rest.chars().next()?;
        match c {
            '\'' | '"' => {
                at += text_len(rest)?;
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += c.len_utf8();
    }
    let end = at + 2;
    if word(&source[start..end]) == "raw" {
        // Jumps to the end tag, which may have any whitespace.
        let mut from = end;
        while let Some(found) = source[from..].find("{%") {
            let tag = from + found;
            let close = tag + source[tag..].find("%}")? + 2;
            if word(&source[tag..close]) == "endraw" {
                return Some(tag..close);
            }
            from = tag + 2;
        }
        return None;
    }
    Some(start..end)
}

/// Length of the quoted text at the start of `rest`, with its quotes.
fn text_len(rest: &str) -> Option<usize> {
    let quote = rest.chars().next()?;
    let mut is_escaped = false;
    for (i, c) in rest.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return Some(i + c.len_utf8()),
            _ => {}
        }
    }
    None
}

/// The only word of a statement such as `{%- raw -%}`.
fn word(tag: &str) -> &str {
    let inner = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or_default();
    inner.trim_matches(|c: char| c.is_whitespace() || "-+".contains(c))
}

fn lexemes(source: &str, tag: &Range<usize>) -> Vec<Lexeme> {
    let mut lexemes = Vec::new();
    let (mut at, end) = (tag.start + 2, tag.end - 2);
    while let Some(c) = source[at..end].chars().next() {
        let rest = &source[at..end];
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let (kind, len) = match c {
            '\'' | '"' => (LexemeKind::Text, text_len(rest).unwrap_or(rest.len())),
            '(' | '[' | '{' => (LexemeKind::Open, 1),
            ')' | ']' | '}' => (LexemeKind::Close, 1),
            c if is_word(c) => {
                let len = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                (LexemeKind::Word, len + exponent_len(&rest[..len], &rest[len..]))
            }
            c => (LexemeKind::Operator, c.len_utf8()),
        };
        if !c.is_whitespace() {
            lexemes.push(Lexeme { kind, range: at..at + len });
        }
        at += len;
    }
    lexemes
}

/// Length of a signed exponent after a number that ends in `e`.
fn exponent_len(number: &str, rest: &str) -> usize {
    let is_float = number.starts_with(|c: char| c.is_ascii_digit()) && number.ends_with(['e', 'E']);
    let digits = rest.strip_prefix(['-', '+']).filter(|_| is_float).map_or(0, |digits| {
        digits.len() - digits.trim_start_matches(|c: char| c.is_ascii_digit()).len()
    });
    if digits > 0 { 1 + digits } else { 0 }
}

fn edit_tag(source: &str, tag: Range<usize>, edits: &mut Vec<Edit>) {
    let name = word(&source[tag.clone()]);
    let renamed = [("generation", "if true"), ("endgeneration", "endif")];
    if let Some((_, replacement)) = renamed.iter().find(|(generation, _)| *generation == name) {
        let start = tag.start + source[tag].find(name).unwrap_or(0);
        let text = (*replacement).to_owned();
        edits.push(Edit { range: start..start + name.len(), text });
        return;
    }
    let lexemes = lexemes(source, &tag);
    let text = |i: usize| lexemes.get(i).map_or("", |lexeme| &source[lexeme.range.clone()]);
    for i in 0..lexemes.len() {
        if text(i) == "+" && is_unary(&lexemes, &text, i, tag.start + 2) {
            edits.push(Edit { range: lexemes[i].range.clone(), text: "- -".to_owned() });
        }
        let is_format = text(i) == "%" && is_format(&lexemes, &text, i);
        if let Some(end) = is_format.then(|| operand_end(&lexemes, &text, i + 1)).flatten() {
            let range = lexemes[i].range.clone();
            edits.push(Edit { range, text: format!("|{FORMAT_OPERATOR}(") });
            let after = lexemes[end - 1].range.end;
            edits.push(Edit { range: after..after, text: ")".to_owned() });
        }
    }
    // Behind the formats: where both end, the loop's bracket is the outer one.
    let first = lexemes.iter().position(|lexeme| lexeme.kind == LexemeKind::Word);
    if first.is_some_and(|first| text(first) == "for") && source[tag].starts_with("{%") {
        edit_loop(&lexemes, &text, edits);
    }
}

/// Puts the items of a `for` statement through a filter.
fn edit_loop<'a>(lexemes: &[Lexeme], text: &dyn Fn(usize) -> &'a str, edits: &mut Vec<Edit>) {
    let mut depth = 0usize;
    let mut start = None;
    let mut end = lexemes.len();
    for (i, lexeme) in lexemes.iter().enumerate() {
        match lexeme.kind {
            LexemeKind::Open => depth += 1,
            LexemeKind::Close => depth = depth.saturating_sub(1),
            LexemeKind::Word if depth == 0 => match (start, text(i)) {
                (None, "in") => start = Some(i + 1),
                (Some(_), "if") => {
                    end = i;
                    break;
                }
                (Some(_), "recursive") if i + 1 == lexemes.len() => end = i,
                _ => {}
            },
            // The sign of whitespace control before the closing delimiter.
            LexemeKind::Operator if i + 1 == lexemes.len() && "-+".contains(text(i)) => {
                end = end.min(i);
                if i > 0 && text(i - 1) == "recursive" {
                    end = end.min(i - 1);
                }
            }
            _ => {}
        }
    }
    let Some(start) = start.filter(|start| *start < end) else { return };
    let items = lexemes[start].range.start..lexemes[end - 1].range.end;
    edits.push(Edit { range: items.start..items.start, text: "(".to_owned() });
    edits.push(Edit { range: items.end..items.end, text: format!(")|{LOOP_ITEMS}") });
}

/// Words after which an operand follows.
const BEFORE_OPERAND: [&str; 10] =
    ["and", "or", "not", "in", "is", "if", "elif", "else", "do", "print"];

/// Whether the sign at `i` is unary. A sign at the delimiters, of which the first one ends at
/// `start`, controls whitespace.
fn is_unary<'a>(
    lexemes: &[Lexeme],
    text: &dyn Fn(usize) -> &'a str,
    i: usize,
    start: usize,
) -> bool {
    if lexemes[i].range.start == start || i + 1 == lexemes.len() {
        return false;
    }
    let Some(left) = i.checked_sub(1) else { return true };
    match lexemes[left].kind {
        LexemeKind::Open | LexemeKind::Operator => true,
        LexemeKind::Close | LexemeKind::Text => false,
        LexemeKind::Word => {
            let is_attribute = left > 0 && text(left - 1) == ".";
            BEFORE_OPERAND.contains(&text(left)) && !is_attribute
        }
    }
}

/// Whether the `%` at `i` certainly formats a text: its left side is a quoted text, or its right
/// side a tuple.
fn is_format<'a>(lexemes: &[Lexeme], text: &dyn Fn(usize) -> &'a str, i: usize) -> bool {
    let left = i.checked_sub(1).map(|left| lexemes[left].kind);
    let is_tuple = || {
        let Some(end) = group_end(lexemes, i + 1).filter(|_| text(i + 1) == "(") else {
            return false;
        };
        let mut depth = 0usize;
        (i + 1..end).any(|j| {
            match lexemes[j].kind {
                LexemeKind::Open => depth += 1,
                LexemeKind::Close => depth -= 1,
                _ => {}
            }
            depth == 1 && text(j) == ","
        })
    };
    left == Some(LexemeKind::Text)
        || matches!(left, Some(LexemeKind::Word | LexemeKind::Close)) && is_tuple()
}

/// End of the bracket that opens at `start`.
fn group_end(lexemes: &[Lexeme], start: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (i, lexeme) in lexemes.iter().enumerate().skip(start) {
        match lexeme.kind {
            LexemeKind::Open => depth += 1,
            LexemeKind::Close => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

/// End of the operand at `start`: a value with its attributes, subscripts, calls and filters.
fn operand_end<'a>(
    lexemes: &[Lexeme],
    text: &dyn Fn(usize) -> &'a str,
    start: usize,
) -> Option<usize> {
    let mut end = if ["-", "+"].contains(&text(start)) { start + 1 } else { start };
    end = match lexemes.get(end)?.kind {
        LexemeKind::Open => group_end(lexemes, end)?,
        LexemeKind::Word | LexemeKind::Text => end + 1,
        _ => return None,
    };
    loop {
        end = match text(end) {
            "." | "|" if lexemes.get(end + 1).is_some_and(|l| l.kind == LexemeKind::Word) => {
                end + 2
            }
            "(" | "[" => group_end(lexemes, end)?,
            _ => return Some(end),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::rewritten;

    #[test]
    fn only_loops_formats_signs_and_generation_tags_change() {
        for (source, expected) in [
            ("a {{ b % 2 }} {% if x % (2) == 0 %}", "a {{ b % 2 }} {% if x % (2) == 0 %}"),
            ("{%- for a, b in c.items() -%}", "{%- for a, b in (c.items())|_loop_items -%}"),
            (
                "{% for m in ms[::-1] if m.x in (1, 2) recursive %}",
                "{% for m in (ms[::-1])|_loop_items if m.x in (1, 2) recursive %}",
            ),
            ("{% for m in ms recursive -%}", "{% for m in (ms)|_loop_items recursive -%}"),
            ("{% for x in y % z %}", "{% for x in (y % z)|_loop_items %}"),
            ("{{ '%d' % x.y[1]|f(2) ~ 'z' }}", "{{ '%d' |_format_operator( x.y[1]|f(2)) ~ 'z' }}"),
            ("{{ f % (a, 'b)') + c }}", "{{ f |_format_operator( (a, 'b)')) + c }}"),
            (
                "{# for x in y #}{{ '{% for x in y %}' }}",
                "{# for x in y #}{{ '{% for x in y %}' }}",
            ),
            (
                "{% raw %}{% for x in y %}{%- endraw %}{% for x in y %}",
                "{% raw %}{% for x in y %}{%- endraw %}{% for x in (y)|_loop_items %}",
            ),
            ("{%- generation %}{% endgeneration -%}", "{%- if true %}{% endif -%}"),
            (
                "{{ {'a': {'b': 1}} }}{% for x in y %}",
                "{{ {'a': {'b': 1}} }}{% for x in (y)|_loop_items %}",
            ),
            (
                "{% for x in 'a' % 'b' %}",
                "{% for x in ('a' |_format_operator( 'b'))|_loop_items %}",
            ),
            (
                "{{ a + +b['+ +'] }}{%+ if x +%} + {{ +2 }}",
                "{{ a + - -b['+ +'] }}{%+ if x +%} + {{ - -2 }}",
            ),
            ("{{+ a.if + 1e+5 ~ 'x'+y }}", "{{+ a.if + 1e+5 ~ 'x'+y }}"),
            ("{% for x in +y %}", "{% for x in (- -y)|_loop_items %}"),
            ("{{ '%g' % 1e-5 - 1 }}", "{{ '%g' |_format_operator( 1e-5) - 1 }}"),
            ("{{ 'unclosed }}", "{{ 'unclosed }}"),
            ("{% for é in ü", "{% for é in ü"),
        ] {
            assert_eq!(rewritten(source), expected);
        }
    }
}
