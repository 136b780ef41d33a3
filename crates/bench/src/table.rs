//! Text tables with aligned columns.

use std::fmt;

/// Maximum width of a table's lines in columns of text: the width of the usual terminal.
const WIDTH: usize = 80;
/// Spaces between two columns.
const GAP: usize = 2;
/// Width down to which names are broken or shortened.
const LEAST: usize = 8;

/// Text table: the first `left` columns are aligned left, the others right.
///
/// A table that is wider than 80 columns has its head in several lines, then its left columns too.
/// Words that are too long there are shortened in their middle.
#[derive(Clone, Debug)]
pub struct Table {
    left: usize,
    head: bool,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Empty table whose first `left` columns are aligned left.
    pub fn new(left: usize) -> Self {
        Self { left, head: false, rows: Vec::new() }
    }

    /// Names the columns, before any row.
    pub fn head(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.head = true;
        self.row(cells);
    }

    /// Appends a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Widths of the columns, within [`WIDTH`] as far as figures allow.
    fn widths(&self) -> Vec<usize> {
        let (head, body) = self.rows.split_at(usize::from(self.head));
        let widest = |rows: &[Vec<String>], i: usize, width: &dyn Fn(&str) -> usize| {
            rows.iter().filter_map(|row| row.get(i)).map(|cell| width(cell)).max().unwrap_or(0)
        };
        let word = |cell: &str| cell.split(' ').map(length).max().unwrap_or(0);
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut widths: Vec<_> = (0..columns).map(|i| widest(&self.rows, i, &length)).collect();
        let broken_head = |i| widest(body, i, &length).max(widest(head, i, &word));
        let broken_name = |i| if i < self.left { LEAST } else { broken_head(i) };
        let least: [&dyn Fn(usize) -> usize; 2] = [&broken_head, &broken_name];
        for least in least {
            let least: Vec<usize> = (0..columns).map(least).collect();
            while widths.iter().sum::<usize>() + GAP * columns.saturating_sub(1) > WIDTH {
                let wide = (0..columns).filter(|i| widths[*i] > least[*i]);
                let Some(widest) = wide.max_by_key(|i| widths[*i]) else { break };
                widths[widest] -= 1;
            }
        }
        widths
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        for (i, row) in self.rows.iter().enumerate() {
            let cells: Vec<_> =
                row.iter().zip(&widths).map(|(c, width)| broken(c, *width)).collect();
            let height = cells.iter().map(Vec::len).max().unwrap_or(0);
            for n in 0..height {
                let mut line = String::new();
                for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                    // Heads stand on the row below them.
                    let above = if self.head && i == 0 { height - cell.len() } else { 0 };
                    let part = n.checked_sub(above).and_then(|n| cell.get(n)).map_or("", |p| p);
                    let gap = if column > 0 { GAP } else { 0 };
                    line += &" ".repeat(gap);
                    line += &match column < self.left {
                        true => format!("{part:<width$}"),
                        false => format!("{part:>width$}"),
                    };
                }
                writeln!(f, "{}", line.trim_end())?;
            }
        }
        Ok(())
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Lines of a cell, broken at spaces.
fn broken(cell: &str, width: usize) -> Vec<String> {
    if length(cell) <= width {
        return vec![cell.to_owned()];
    }
    let mut lines: Vec<String> = Vec::new();
    for word in cell.split_whitespace().map(|word| shortened(word, width)) {
        match lines.last_mut().filter(|line| length(line) + 1 + length(&word) <= width) {
            Some(line) => {
                line.push(' ');
                line.push_str(&word);
            }
            None => lines.push(word),
        }
    }
    lines
}

/// A word without its middle if it is too long: names differ at their ends.
fn shortened(word: &str, width: usize) -> String {
    const CUT: &str = "...";
    let (length, kept) = (length(word), width.saturating_sub(CUT.len()));
    if length <= width || kept < 2 {
        return word.to_owned();
    }
    let (start, end) = (kept.div_ceil(2), kept / 2);
    let start: String = word.chars().take(start).collect();
    let end: String = word.chars().skip(length - end).collect();
    format!("{start}{CUT}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_fits_has_a_line_a_row() {
        let mut table = Table::new(1);
        table.head(["", "read per token", "hit rate"]);
        table.row(["decode", "1.2 MB", "95 %"]);
        assert_eq!(
            table.to_string(),
            "        read per token  hit rate\ndecode          1.2 MB      95 %\n"
        );
    }

    #[test]
    fn a_wide_table_breaks_its_head_then_its_names() {
        let mut table = Table::new(2);
        table.head(["model", "answers to", "read per token", "tokens"]);
        let name = format!("an-organization/{}-4bit", "x".repeat(60));
        table.row([&name, "the first of them", "1.2 MB", "7"]);
        let lines = [
            "                                                                    read",
            "                                                                     per",
            "model                                          answers to          token  tokens",
            "an-organization/xxxxx...xxxxxxxxxxxxxxxx-4bit  the first of them  1.2 MB       7",
        ];
        assert_eq!(table.to_string().lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn names_beside_a_text_are_broken_at_spaces() {
        let mut table = Table::new(2);
        table.row(["memory", &"so much is left ".repeat(6)]);
        table.row(["disk", "fast"]);
        let shown = table.to_string();
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines.len() == 3 && lines[0].starts_with("memory  so much"), "{shown}");
        assert!(
            lines[1].starts_with("        ") && lines.iter().all(|l| l.len() <= WIDTH),
            "{shown}"
        );
        assert_eq!(lines[2], "disk    fast");
    }
}
