//! Grammars in GBNF, the notation of llama.cpp, as Lark.
//!
//! A rule that refers to no recursive rule is regular: it becomes a terminal, of which the lexer
//! takes the longest match. So does each run of regular parts in the other rules. A grammar without
//! recursion is one terminal, and exact.

use std::{collections::HashMap, iter::Peekable, str::Chars};

use moeflux_base::GrammarError;

use super::{form::invalid, lark::quoted};

/// Rule with which answers begin.
const ROOT: &str = "root";

/// Most rules. Terminals nest as deep as rules refer to each other.
const MAX_RULES: usize = 2_000;

/// The grammar in Lark.
///
/// # Errors
/// The grammar is not valid: the problem names the line.
pub(super) fn to_lark(gbnf: &str) -> Result<String, GrammarError> {
    let rules = GbnfParser::new(gbnf)?.rules()?;
    Ok(LarkRules::new(&rules).text(&rules))
}

fn at_line(line: usize, problem: &str) -> GrammarError {
    invalid("", format!("line {line}: {problem}"))
}

/// Part of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GbnfToken {
    /// Name of a rule.
    Name(String),
    /// `::=`
    Define,
    Literal(String),
    /// A class of characters, as a regular expression.
    Class(String),
    Open,
    Close,
    Bar,
    /// Repetition of the part before it.
    Repeat(GbnfBounds),
}

/// Bounds of a repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GbnfBounds {
    min: u32,
    /// `None` is no limit.
    max: Option<u32>,
}

/// Body of a rule, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GbnfExpression {
    Literal(String),
    Class(String),
    /// Index of a rule.
    Rule(usize),
    Sequence(Vec<GbnfExpression>),
    Choice(Vec<GbnfExpression>),
    Repeat(Box<GbnfExpression>, GbnfBounds),
}

/// Reader of tokens.
struct GbnfLexer<'a> {
    chars: Peekable<Chars<'a>>,
    line: usize,
}

impl GbnfLexer<'_> {
    fn next_char(&mut self) -> Option<char> {
        let c = self.chars.next();
        self.line += usize::from(c == Some('\n'));
        c
    }

    /// The next character; `None` at the end of the line.
    fn next_in_line(&mut self) -> Option<char> {
        self.chars.next_if(|c| *c != '\n')
    }

    fn error(&self, problem: &str) -> GrammarError {
        at_line(self.line, problem)
    }

    /// The next token; `None` at the end.
    fn token(&mut self) -> Result<Option<GbnfToken>, GrammarError> {
        while let Some(c) = self.chars.peek() {
            match c {
                '#' => while self.chars.next_if(|c| *c != '\n').is_some() {},
                c if c.is_whitespace() => {}
                _ => break,
            }
            self.next_char();
        }
        let Some(c) = self.next_char() else { return Ok(None) };
        let repeat = |min, max| GbnfToken::Repeat(GbnfBounds { min, max });
        Ok(Some(match c {
            '(' => GbnfToken::Open,
            ')' => GbnfToken::Close,
            '|' => GbnfToken::Bar,
            '.' => GbnfToken::Class("(?s:.)".to_owned()),
            '*' => repeat(0, None),
            '+' => repeat(1, None),
            '?' => repeat(0, Some(1)),
            '{' => GbnfToken::Repeat(self.bounds()?),
            '"' => GbnfToken::Literal(self.literal()?),
            '[' => GbnfToken::Class(self.class()?),
            ':' if (self.next_char(), self.next_char()) == (Some(':'), Some('=')) => {
                GbnfToken::Define
            }
            c if is_name(c) => {
                let mut name = String::from(c);
                while let Some(c) = self.chars.next_if(|c| is_name(*c)) {
                    name.push(c);
                }
                GbnfToken::Name(name)
            }
            '<' | '!' => return Err(self.error("tokens in grammars are not supported")),
            c => return Err(self.error(&format!("unexpected {c:?}"))),
        }))
    }

    fn bounds(&mut self) -> Result<GbnfBounds, GrammarError> {
        let mut text = String::new();
        loop {
            match self.next_in_line() {
                Some('}') => break,
                Some(c) if c.is_ascii_digit() || c == ',' => text.push(c),
                Some(' ') => {}
                _ => return Err(self.error("a repetition is {n}, {n,} or {n,m}")),
            }
        }
        let (min, max) = match text.split_once(',') {
            None => (text.as_str(), Some(text.as_str())),
            Some((min, "")) => (min, None),
            Some((min, max)) => (min, Some(max)),
        };
        let number = |text: &str| {
            text.parse::<u32>().map_err(|_| self.error("a repetition is {n}, {n,} or {n,m}"))
        };
        let bounds = GbnfBounds { min: number(min)?, max: max.map(number).transpose()? };
        match bounds.max.is_some_and(|max| max < bounds.min) {
            true => Err(self.error("the bounds of a repetition are in the wrong order")),
            false => Ok(bounds),
        }
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        let mut text = String::new();
        loop {
            match self.next_in_line() {
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
                None => return Err(self.error("a string has no end")),
            }
        }
    }

    /// A class behind its first bracket.
    fn class(&mut self) -> Result<String, GrammarError> {
        let mut regex = String::from("[");
        if self.chars.next_if_eq(&'^').is_some() {
            regex.push('^');
        }
        let empty = regex.len();
        loop {
            let first = match self.next_in_line() {
                Some(']') if regex.len() == empty => return Err(self.error("a class is empty")),
                Some(']') => return Ok(regex + "]"),
                Some('\\') => self.escape()?,
                Some(c) => c,
                None => return Err(self.error("a class has no end")),
            };
            regex += &class_char(first);
            let mut ahead = self.chars.clone();
            if ahead.next() != Some('-') || matches!(ahead.next(), Some(']') | None) {
                continue;
            }
            self.next_char();
            let last = match self.next_in_line() {
                Some('\\') => self.escape()?,
                Some(c) => c,
                None => return Err(self.error("a class has no end")),
            };
            if last < first {
                return Err(self.error(&format!("the range {first:?} to {last:?} is empty")));
            }
            regex += &format!("-{}", class_char(last));
        }
    }

    /// A character behind its backslash.
    fn escape(&mut self) -> Result<char, GrammarError> {
        let digits = match self.next_in_line() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.error("an escape is unknown")),
        };
        let hex: String = (0..digits).map_while(|_| self.next_in_line()).collect();
        let code = u32::from_str_radix(&hex, 16).ok().filter(|_| !hex.starts_with('+'));
        code.and_then(char::from_u32).ok_or_else(|| self.error("an escape is no character"))
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_')
}

/// A character in a class of a regular expression between slashes.
fn class_char(c: char) -> String {
    match c {
        '<' | '>' => c.to_string(),
        c if c.is_ascii_punctuation() => format!("\\{c}"),
        c if c.is_control() => format!("\\x{{{:x}}}", u32::from(c)),
        c => c.to_string(),
    }
}

/// A token with its line.
struct GbnfPlace {
    token: GbnfToken,
    line: usize,
}

/// Parser of rules.
struct GbnfParser {
    tokens: Vec<GbnfPlace>,
    position: usize,
    /// Rules by name.
    names: HashMap<String, usize>,
    /// Lines of the first reference to each rule.
    lines: Vec<usize>,
    rules: Vec<Option<GbnfExpression>>,
}

impl GbnfParser {
    fn new(text: &str) -> Result<Self, GrammarError> {
        let mut lexer = GbnfLexer { chars: text.chars().peekable(), line: 1 };
        let mut tokens = Vec::new();
        while let Some(token) = lexer.token()? {
            tokens.push(GbnfPlace { token, line: lexer.line });
        }
        let (names, lines, rules) = (HashMap::new(), Vec::new(), Vec::new());
        Ok(Self { tokens, position: 0, names, lines, rules })
    }

    /// All rules, of which the first one is the root.
    fn rules(mut self) -> Result<Vec<GbnfExpression>, GrammarError> {
        self.rule_index(ROOT);
        while self.position < self.tokens.len() {
            let Some(GbnfToken::Name(name)) = self.peek(0).cloned() else {
                return Err(self.error("expected a rule: name ::= ..."));
            };
            if self.peek(1) != Some(&GbnfToken::Define) {
                return Err(self.error("expected ::= behind the name of a rule"));
            }
            let index = self.rule_index(&name);
            if self.rules[index].is_some() {
                return Err(self.error(&format!("the rule {name:?} is defined twice")));
            }
            self.position += 2;
            let body = self.choice()?;
            self.rules[index] = Some(body);
        }
        if self.rules.len() > MAX_RULES {
            let count = self.rules.len();
            return Err(invalid("", format!("the grammar has {count} rules: at most {MAX_RULES}")));
        }
        let missing = self.rules.iter().position(Option::is_none);
        if let Some(missing) = missing {
            let name = self.names.iter().find(|(_, index)| **index == missing);
            let name = name.map_or(ROOT, |(name, _)| name);
            let problem = format!("the rule {name:?} is not defined");
            return Err(at_line(self.lines[missing], &problem));
        }
        Ok(self.rules.into_iter().flatten().collect())
    }

    fn peek(&self, ahead: usize) -> Option<&GbnfToken> {
        self.tokens.get(self.position + ahead).map(|place| &place.token)
    }

    /// Line of the next token, or of the last one.
    fn line(&self) -> usize {
        self.tokens.get(self.position).or(self.tokens.last()).map_or(1, |place| place.line)
    }

    fn error(&self, problem: &str) -> GrammarError {
        at_line(self.line(), problem)
    }

    fn rule_index(&mut self, name: &str) -> usize {
        if let Some(index) = self.names.get(name) {
            return *index;
        }
        let index = self.rules.len();
        self.names.insert(name.to_owned(), index);
        self.lines.push(self.line());
        self.rules.push(None);
        index
    }

    fn choice(&mut self) -> Result<GbnfExpression, GrammarError> {
        let mut choices = vec![self.sequence()?];
        while self.peek(0) == Some(&GbnfToken::Bar) {
            self.position += 1;
            choices.push(self.sequence()?);
        }
        Ok(match choices.pop() {
            Some(only) if choices.is_empty() => only,
            last => GbnfExpression::Choice(choices.into_iter().chain(last).collect()),
        })
    }

    fn sequence(&mut self) -> Result<GbnfExpression, GrammarError> {
        let mut parts = Vec::new();
        loop {
            let part = match self.peek(0) {
                Some(GbnfToken::Literal(text)) => GbnfExpression::Literal(text.clone()),
                Some(GbnfToken::Class(regex)) => GbnfExpression::Class(regex.clone()),
                // A name before `::=` begins the next rule.
                Some(GbnfToken::Name(name)) if self.peek(1) != Some(&GbnfToken::Define) => {
                    let name = name.clone();
                    GbnfExpression::Rule(self.rule_index(&name))
                }
                Some(GbnfToken::Open) => {
                    self.position += 1;
                    let inner = self.choice()?;
                    if self.peek(0) != Some(&GbnfToken::Close) {
                        return Err(self.error("expected )"));
                    }
                    inner
                }
                Some(GbnfToken::Repeat(bounds)) => {
                    let bounds = *bounds;
                    let Some(repeated) = parts.pop() else {
                        return Err(self.error("there is nothing to repeat"));
                    };
                    GbnfExpression::Repeat(Box::new(repeated), bounds)
                }
                Some(GbnfToken::Define) => return Err(self.error("unexpected ::=")),
                _ => return Ok(GbnfExpression::Sequence(parts)),
            };
            self.position += 1;
            parts.push(part);
        }
    }
}

/// Writer of rules and terminals.
struct LarkRules {
    /// Whether each rule is a terminal.
    regular: Vec<bool>,
    text: String,
    terminals: usize,
}

impl LarkRules {
    fn new(rules: &[GbnfExpression]) -> Self {
        Self { regular: regular_rules(rules), text: String::new(), terminals: 0 }
    }

    fn text(mut self, rules: &[GbnfExpression]) -> String {
        for (index, body) in rules.iter().enumerate() {
            let line = match self.regular[index] {
                true => format!("R{index}: {}\n", self.terminal_body(body)),
                false => format!("r{index}: {}\n", self.rule_body(body)),
            };
            self.text += &line;
        }
        format!("start: {}\n{}", self.name(0), self.text)
    }

    fn name(&self, rule: usize) -> String {
        if self.regular[rule] { format!("R{rule}") } else { format!("r{rule}") }
    }

    fn is_regular(&self, expression: &GbnfExpression) -> bool {
        let mut is_regular = true;
        for_each_rule(expression, &mut |rule| is_regular &= self.regular[rule]);
        is_regular
    }

    /// A regular expression in the body of a terminal.
    fn terminal_body(&self, expression: &GbnfExpression) -> String {
        let all = |parts: &[GbnfExpression], separator: &str| {
            let parts: Vec<String> = parts.iter().map(|part| self.terminal_body(part)).collect();
            parts.join(separator)
        };
        match expression {
            GbnfExpression::Literal(text) => quoted(text),
            GbnfExpression::Class(regex) => format!("/{regex}/"),
            GbnfExpression::Rule(rule) => self.name(*rule),
            GbnfExpression::Sequence(parts) if parts.is_empty() => quoted(""),
            GbnfExpression::Sequence(parts) => format!("({})", all(parts, " ")),
            GbnfExpression::Choice(parts) => format!("({})", all(parts, " | ")),
            GbnfExpression::Repeat(inner, bounds) => repeated(&self.terminal_body(inner), *bounds),
        }
    }

    /// An expression in the body of a rule. Its regular parts are terminals.
    fn rule_body(&mut self, expression: &GbnfExpression) -> String {
        if self.is_regular(expression) {
            return self.terminal(expression);
        }
        match expression {
            GbnfExpression::Sequence(parts) => {
                let runs = parts.chunk_by(|a, b| self.is_regular(a) && self.is_regular(b));
                let runs: Vec<&[GbnfExpression]> = runs.collect();
                let parts = runs.into_iter().map(|run| match run {
                    [part] => self.rule_body(part),
                    run => self.terminal(&GbnfExpression::Sequence(run.to_vec())),
                });
                format!("({})", parts.collect::<Vec<_>>().join(" "))
            }
            GbnfExpression::Choice(parts) => {
                let (regular, others): (Vec<_>, Vec<_>) =
                    parts.iter().cloned().partition(|part| self.is_regular(part));
                let regular = (!regular.is_empty()).then_some(GbnfExpression::Choice(regular));
                let parts = regular.into_iter().chain(others).map(|part| self.rule_body(&part));
                format!("({})", parts.collect::<Vec<_>>().join(" | "))
            }
            GbnfExpression::Repeat(inner, bounds) => repeated(&self.rule_body(inner), *bounds),
            GbnfExpression::Rule(rule) => self.name(*rule),
            regular => self.terminal(regular),
        }
    }

    /// Name of a terminal for a regular expression.
    fn terminal(&mut self, expression: &GbnfExpression) -> String {
        if let GbnfExpression::Rule(rule) = expression {
            return self.name(*rule);
        }
        let name = format!("T{}", self.terminals);
        self.terminals += 1;
        self.text += &format!("{name}: {}\n", self.terminal_body(expression));
        name
    }
}

fn repeated(inner: &str, GbnfBounds { min, max }: GbnfBounds) -> String {
    match (min, max) {
        (0, None) => format!("({inner})*"),
        (1, None) => format!("({inner})+"),
        (min, None) => format!("({inner}){{{min},}}"),
        (min, Some(max)) => format!("({inner}){{{min},{max}}}"),
    }
}

/// Calls `on` with each rule that an expression refers to.
fn for_each_rule(expression: &GbnfExpression, on: &mut dyn FnMut(usize)) {
    match expression {
        GbnfExpression::Literal(_) | GbnfExpression::Class(_) => {}
        GbnfExpression::Rule(rule) => on(*rule),
        GbnfExpression::Sequence(parts) | GbnfExpression::Choice(parts) => {
            parts.iter().for_each(|part| for_each_rule(part, on));
        }
        GbnfExpression::Repeat(inner, _) => for_each_rule(inner, on),
    }
}

/// Whether each rule refers to no recursive one: in topological order, without recursion.
fn regular_rules(rules: &[GbnfExpression]) -> Vec<bool> {
    let mut users = vec![Vec::new(); rules.len()];
    let mut open = vec![0_usize; rules.len()];
    for (index, body) in rules.iter().enumerate() {
        for_each_rule(body, &mut |rule| {
            users[rule].push(index);
            open[index] += 1;
        });
    }
    let mut regular: Vec<bool> = open.iter().map(|open| *open == 0).collect();
    let mut ready: Vec<usize> = (0..rules.len()).filter(|index| regular[*index]).collect();
    while let Some(rule) = ready.pop() {
        for user in &users[rule] {
            open[*user] -= 1;
            if open[*user] == 0 {
                regular[*user] = true;
                ready.push(*user);
            }
        }
    }
    regular
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_without_recursion_are_terminals() {
        let gbnf = "root ::= item (\",\" item)* # list\nitem ::= [a-c\\]-] | \"x\\n\"{2,}\n";
        let lark = to_lark(gbnf).unwrap();
        let expected = concat!(
            "start: R0\n",
            "R0: (R1 ((\",\" R1))*)\n",
            "R1: ((/[a-c\\]\\-]/) | ((\"x\\n\"){2,}))\n",
        );
        assert_eq!(lark, expected);
    }

    #[test]
    fn recursive_rules_stay_rules_with_terminals_in_them() {
        let lark = to_lark("root ::= \"(\" ws root? ws \")\"\nws ::= [ \\t]*").unwrap();
        let expected = concat!(
            "start: r0\n",
            "T0: (\"(\" R1)\n",
            "T1: (R1 \")\")\n",
            "r0: (T0 (r0){0,1} T1)\n",
            "R1: ((/[ \\x{9}]/)*)\n",
        );
        assert_eq!(lark, expected);
    }

    #[test]
    fn problems_name_their_line() {
        for (gbnf, problem) in [
            ("", "line 1: the rule \"root\" is not defined"),
            ("root ::= this is (not valid GBNF", "line 1: expected )"),
            ("root ::= a\n\na ::= b\n", "line 3: the rule \"b\" is not defined"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule \"root\" is defined twice"),
            ("# text\nroot ::= \"a", "line 2: a string has no end"),
            ("root ::= [b-a]", "line 1: the range 'b' to 'a' is empty"),
            ("root ::= []", "line 1: a class is empty"),
            ("root ::= \"a\"{3,2}", "line 1: the bounds of a repetition are in the wrong order"),
            ("root ::= \"a\"{x}", "line 1: a repetition is {n}, {n,} or {n,m}"),
            ("root ::= *", "line 1: there is nothing to repeat"),
            ("root ::= \"\\q\"", "line 1: an escape is unknown"),
            ("root ::= \"\\ud800\"", "line 1: an escape is no character"),
            ("root ::= <think>", "line 1: tokens in grammars are not supported"),
            ("root := \"a\"", "line 1: unexpected ':'"),
            ("root \"a\"", "line 1: expected ::= behind the name of a rule"),
        ] {
            let error = to_lark(gbnf).unwrap_err();
            assert_eq!(error, invalid("", problem), "{gbnf}");
        }
    }
}
