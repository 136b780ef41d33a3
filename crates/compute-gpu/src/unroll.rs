//! Loop unrolling of WGSL.
//!
//! An array of a thread is in registers only if every index is a constant. Drivers do not unroll
//! nested loops: NVIDIA's compiler leaves these arrays in memory. So a loop after a line
//! `// @unroll` is unrolled here, if its bounds are constants of the kernel.

use std::collections::HashMap;

const MARK: &str = "// @unroll\n";

/// Values of a kernel's constants by name.
type ConstantValues = HashMap<String, u32>;

/// Unrolls the marked loops of a kernel's text.
pub(super) fn unrolled(text: &str) -> String {
    if !text.contains(MARK) {
        return text.into();
    }
    let mut values = ConstantValues::new();
    // Until no new value is found: a constant may be declared after one that uses it.
    let mut known = usize::MAX;
    while known != values.len() {
        known = values.len();
        for line in text.lines() {
            let declared = line.strip_prefix("const ").and_then(|line| line.strip_suffix(';'));
            if let Some((name, expression)) = declared.and_then(|line| line.split_once(" = "))
                && let Some(value) = ConstExpression(expression).value(&values)
            {
                values.insert(name.into(), value);
            }
        }
    }
    expand(text, &values)
}

fn expand(text: &str, values: &ConstantValues) -> String {
    let Some((before, rest)) = text.split_once(MARK) else { return text.into() };
    let Some((head, body, tail)) = split_loop(rest.trim_start()) else {
        debug_assert!(false, "no loop that can be unrolled: {}", rest.lines().next().unwrap_or(""));
        return format!("{before}{}", expand(rest, values));
    };
    let body = expand(body, values);
    let mut out = String::from(before);
    match bounds(head, values) {
        Some((name, start, end)) => {
            for i in start..end {
                out.push_str(&format!("{{{}}}\n", replace_word(&body, name, &format!("{i}u"))));
            }
        }
        None => {
            debug_assert!(false, "a loop without constant bounds: {head}");
            out.push_str(&format!("{head}{{{body}}}"));
        }
    }
    out + &expand(tail, values)
}

/// Splits text into the head of a loop, its body, and the text after its braces.
fn split_loop(text: &str) -> Option<(&str, &str, &str)> {
    let open = text.find('{')?;
    let mut depth = 0;
    for (i, c) in text.char_indices().skip(open) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if c == '}' && depth == 0 {
            return Some((&text[..open], &text[open + 1..i], &text[i + 1..]));
        }
    }
    None
}

/// Variable of a loop, its first value and its end.
fn bounds<'a>(head: &'a str, values: &ConstantValues) -> Option<(&'a str, u32, u32)> {
    let head = head.trim().strip_prefix("for (var ")?.strip_suffix("++)")?;
    let (first, rest) = head.split_once("; ")?;
    let (name, start) = first.split_once(" = ")?;
    let (end, _) = rest.strip_prefix(name)?.strip_prefix(" < ")?.split_once("; ")?;
    Some((name, ConstExpression(start).value(values)?, ConstExpression(end).value(values)?))
}

/// Replaces a word in a text.
fn replace_word(text: &str, word: &str, replacement: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(word) {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let tail = &rest[start + word.len()..];
        let whole = !rest[..start].ends_with(is_word) && !tail.starts_with(is_word);
        out.push_str(&rest[..start]);
        out.push_str(if whole { replacement } else { word });
        rest = tail;
    }
    out + rest
}

/// Unparsed rest of an integer expression: words, `+`, `-`, `*`, `/`, `%` and parentheses.
struct ConstExpression<'a>(&'a str);

impl ConstExpression<'_> {
    /// Value of the whole expression; `None` if it is not a constant one.
    fn value(mut self, values: &ConstantValues) -> Option<u32> {
        let value = self.sum(values)?;
        self.0.trim().is_empty().then_some(value)
    }

    fn accept(&mut self, sign: char) -> bool {
        let rest = self.0.trim_start().strip_prefix(sign);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn sum(&mut self, values: &ConstantValues) -> Option<u32> {
        let mut sum = self.product(values)?;
        loop {
            sum = match () {
                () if self.accept('+') => sum.checked_add(self.product(values)?)?,
                () if self.accept('-') => sum.checked_sub(self.product(values)?)?,
                () => return Some(sum),
            }
        }
    }

    fn product(&mut self, values: &ConstantValues) -> Option<u32> {
        let mut product = self.word(values)?;
        loop {
            product = match () {
                () if self.accept('*') => product.checked_mul(self.word(values)?)?,
                () if self.accept('/') => product.checked_div(self.word(values)?)?,
                () if self.accept('%') => product.checked_rem(self.word(values)?)?,
                () => return Some(product),
            }
        }
    }

    fn word(&mut self, values: &ConstantValues) -> Option<u32> {
        if self.accept('(') {
            let value = self.sum(values)?;
            return self.accept(')').then_some(value);
        }
        let rest = self.0.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (word, tail) = rest.split_at(end);
        self.0 = tail;
        match word.trim_end_matches('u').parse() {
            Ok(number) => Some(number),
            Err(_) => values.get(word).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::unrolled;

    #[test]
    fn marked_loops_are_unrolled() {
        let text = "const M = (N + 2u) / 4u - 1u * N % 2u;\nconst N = 6u;\n\
            fn f() {\n// @unroll\nfor (var i = 1u; i < M + 1u; i++) {\n\
            // @unroll\nfor (var j = 0u; j < 2u; j++) { a[i] += s.i * ji + j; }\n}\n\
            for (var k = 0u; k < M; k++) {}\n}\n";
        let out: String = unrolled(text).split_whitespace().collect::<Vec<_>>().join(" ");
        let two = |i: u32| {
            (0..2).map(move |j| format!("{{ a[{i}u] += s.i * ji + {j}u; }} ")).collect::<String>()
        };
        let all = format!(
            "fn f() {{ {{ {}}} {{ {}}} for (var k = 0u; k < M; k++) {{}} }}",
            two(1),
            two(2)
        );
        assert!(out.ends_with(&all), "{out}");
    }
}
