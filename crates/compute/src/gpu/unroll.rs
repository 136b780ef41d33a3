//! Loops of kernels that are written out.
//!
//! What a thread keeps in an array lies in registers only where every index is a constant, and drivers' compilers do not
//! unroll loops in loops: NVIDIA's leaves such arrays in memory. So a loop behind a line `// @unroll` is written out, where its
//! bounds are constants of the kernel.

use std::collections::HashMap;

const MARK: &str = "// @unroll\n";

/// Values of a kernel's constants.
type Values = HashMap<String, u32>;

/// A kernel's text with its marked loops written out.
pub(super) fn unrolled(text: &str) -> String {
    if !text.contains(MARK) {
        return text.into();
    }
    let mut values = Values::new();
    // Until no new value is found: constants may be defined after those that use them.
    let mut known = usize::MAX;
    while known != values.len() {
        known = values.len();
        for line in text.lines() {
            let declared = line.strip_prefix("const ").and_then(|line| line.strip_suffix(';'));
            if let Some((name, expression)) = declared.and_then(|line| line.split_once(" = "))
                && let Some(value) = Expression(expression).value(&values)
            {
                values.insert(name.into(), value);
            }
        }
    }
    expand(text, &values)
}

fn expand(text: &str, values: &Values) -> String {
    let Some((before, rest)) = text.split_once(MARK) else { return text.into() };
    let Some((head, body, behind)) = parts(rest.trim_start()) else {
        debug_assert!(
            false,
            "no loop that can be written out: {}",
            rest.lines().next().unwrap_or("")
        );
        return format!("{before}{}", expand(rest, values));
    };
    let body = expand(body, values);
    let mut out = String::from(before);
    match bounds(head, values) {
        Some((name, from, to)) => {
            for i in from..to {
                out.push_str(&format!("{{{}}}\n", replaced(&body, name, &format!("{i}u"))));
            }
        }
        None => {
            debug_assert!(false, "a loop without constant bounds: {head}");
            out.push_str(&format!("{head}{{{body}}}"));
        }
    }
    out + &expand(behind, values)
}

/// What stands in front of a loop's braces, between and behind them.
fn parts(text: &str) -> Option<(&str, &str, &str)> {
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

/// The variable of a loop, its first value and that behind its last one.
fn bounds<'a>(head: &'a str, values: &Values) -> Option<(&'a str, u32, u32)> {
    let head = head.trim().strip_prefix("for (var ")?.strip_suffix("++)")?;
    let (first, rest) = head.split_once("; ")?;
    let (name, from) = first.split_once(" = ")?;
    let (to, _) = rest.strip_prefix(name)?.strip_prefix(" < ")?.split_once("; ")?;
    Some((name, Expression(from).value(values)?, Expression(to).value(values)?))
}

/// A text in which a word stands for another.
fn replaced(text: &str, name: &str, by: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let behind = &rest[at + name.len()..];
        let whole = !rest[..at].ends_with(is_word) && !behind.starts_with(is_word);
        out.push_str(&rest[..at]);
        out.push_str(if whole { by } else { name });
        rest = behind;
    }
    out + rest
}

/// What is left of an expression of whole numbers, in which `+`, `-`, `*`, `/`, `%` and parentheses stand between words.
struct Expression<'a>(&'a str);

impl Expression<'_> {
    /// Its value, if all of it has one.
    fn value(mut self, values: &Values) -> Option<u32> {
        let value = self.sum(values)?;
        self.0.trim().is_empty().then_some(value)
    }

    fn take(&mut self, sign: char) -> bool {
        let rest = self.0.trim_start().strip_prefix(sign);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn sum(&mut self, values: &Values) -> Option<u32> {
        let mut sum = self.product(values)?;
        loop {
            sum = match () {
                () if self.take('+') => sum.checked_add(self.product(values)?)?,
                () if self.take('-') => sum.checked_sub(self.product(values)?)?,
                () => return Some(sum),
            }
        }
    }

    fn product(&mut self, values: &Values) -> Option<u32> {
        let mut product = self.word(values)?;
        loop {
            product = match () {
                () if self.take('*') => product.checked_mul(self.word(values)?)?,
                () if self.take('/') => product.checked_div(self.word(values)?)?,
                () if self.take('%') => product.checked_rem(self.word(values)?)?,
                () => return Some(product),
            }
        }
    }

    fn word(&mut self, values: &Values) -> Option<u32> {
        if self.take('(') {
            let value = self.sum(values)?;
            return self.take(')').then_some(value);
        }
        let rest = self.0.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        self.0 = behind;
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
    fn marked_loops_are_written_out() {
        let text = "const M = (N + 2u) / 4u - 1u * N % 2u;\nconst N = 6u;\n\
            fn f() {\n// @unroll\nfor (var i = 1u; i < M + 1u; i++) {\n\
            // @unroll\nfor (var j = 0u; j < 2u; j++) { a[i] += s.i * ji + j; }\n}\nfor (var k = 0u; k < M; k++) {}\n}\n";
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
