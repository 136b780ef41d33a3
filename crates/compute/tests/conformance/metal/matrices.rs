//! Matrices of 16 x 16 spelled out, so that kernels that multiply them run where no hardware does.
//!
//! A thread of a subgroup of 32 has half a row of a matrix of sums, and what it needs of the other two: that row, and the columns
//! of its half.

use std::collections::BTreeSet;

const ENABLE: &str = "enable wgpu_cooperative_matrix;\n";

const MATRICES: &str = "
var<private> matrix_lane: u32;
struct MatrixA { row: array<f32, 16> }
struct MatrixB { columns: array<array<f32, 16>, 8> }
struct MatrixC { sums: array<f32, 8> }
fn matrix_multiply(a: MatrixA, b: MatrixB, c: MatrixC) -> MatrixC {
    var out = c;
    for (var j = 0u; j < 8u; j++) {
        for (var k = 0u; k < 16u; k++) { out.sums[j] = fma(a.row[k], b.columns[j][k], out.sums[j]); }
    }
    return out;
}
";

/// The kernel without `coop_mat16x16`, `coopLoad`, `coopStore` and `coopMultiplyAdd`.
pub(super) fn spelled_out(kernel: &str) -> String {
    if !kernel.contains("coop_mat16x16") {
        return kernel.into();
    }
    let mut text = kernel.replace(ENABLE, "").replace("coopMultiplyAdd(", "matrix_multiply(");
    for (role, of) in [('A', "f16"), ('B', "f16"), ('C', "f32")] {
        text = text.replace(&format!("coop_mat16x16<{of}, {role}>"), &format!("Matrix{role}"));
    }
    let mut helpers = BTreeSet::new();
    while let Some(at) = text.find("coopLoad").or_else(|| text.find("coopStore")) {
        let (call, behind) = call_of(&text[at..]);
        let said = call.spelled(&text, &mut helpers);
        text = format!("{}{said}{behind}", &text[..at]);
    }
    let entry = "@builtin(local_invocation_index) index: u32,\n) {\n";
    assert!(text.contains(entry), "a kernel whose threads have no number");
    let begin = format!("{entry}matrix_lane = index % 32u;\n");
    let directives = text.lines().take_while(|line| line.starts_with("enable "));
    let (head, body) = text.split_at(directives.map(|line| line.len() + 1).sum());
    let helpers: String = helpers.into_iter().collect();
    format!("{head}{MATRICES}{helpers}{}", body.replace(entry, &begin))
}

/// A call that brings a matrix from an array or to it.
struct Call<'a> {
    stores: bool,
    /// Whether numbers of a row lie together, or those of a column.
    by_rows: bool,
    /// The name of the matrix's type, where it is brought from the array.
    kind: &'a str,
    /// What is stored.
    value: &'a str,
    array: &'a str,
    at: &'a str,
    pitch: &'a str,
}

/// The call that a text begins with, and what stands behind it.
fn call_of(text: &str) -> (Call<'_>, &str) {
    let open = text.find('(').unwrap();
    let (name, kind) = match text[..open].split_once('<') {
        Some((name, kind)) => (name, kind.trim_end_matches('>')),
        None => (&text[..open], ""),
    };
    let close = closing(text, open);
    let inside = &text[open + 1..close];
    let (value, place) = inside.split_once('&').unwrap();
    let bracket = place.find('[').unwrap();
    let end = closing(place, bracket);
    let call = Call {
        stores: name.starts_with("coopStore"),
        by_rows: name.ends_with('T'),
        kind,
        value: value.trim_end_matches(", "),
        array: &place[..bracket],
        at: &place[bracket + 1..end],
        pitch: place[end + 1..].trim_start_matches(", "),
    };
    (call, &text[close + 1..])
}

/// Where the bracket at `open` closes.
fn closing(text: &str, open: usize) -> usize {
    let mut depth = 0;
    let ends = |(_, c): &(usize, char)| {
        depth += i32::from(matches!(c, '(' | '[')) - i32::from(matches!(c, ')' | ']'));
        depth == 0
    };
    open + text[open..].char_indices().find(ends).unwrap().0
}

impl Call<'_> {
    /// The call of a function that does it, which comes to `helpers`.
    fn spelled(&self, text: &str, helpers: &mut BTreeSet<String>) -> String {
        let Call { stores, by_rows, kind, value, array, at, pitch } = *self;
        let alias = |name: &str| {
            let line = format!("alias {name} = ");
            let of = text.split_once(&line).map(|(_, rest)| rest.split(';').next().unwrap_or(""));
            of.unwrap_or(name).to_owned()
        };
        let declared = format!("var<workgroup> {array}: array<");
        let element = alias(text.split_once(&declared).unwrap().1.split(',').next().unwrap());
        let wide = element.starts_with("vec4");
        let scalar = if element.contains("f16") { "f16" } else { "f32" };
        let number = |i: &str| match wide {
            true => format!("{array}[({i}) / 4u][({i}) % 4u]"),
            false => format!("{array}[{i}]"),
        };
        let width = if wide { "4u" } else { "1u" };
        let place = |row: &str, column: &str| match by_rows {
            true => number(&format!("(at + ({row}) * pitch) * {width} + {column}")),
            false => number(&format!("(at + ({column}) * pitch) * {width} + {row}")),
        };
        let (row, first) = ("matrix_lane / 2u", "matrix_lane % 2u * 8u");
        let order = if by_rows { "rows" } else { "columns" };
        if stores {
            let name = format!("matrix_store_{order}_{array}");
            let to = place(row, &format!("{first} + j"));
            helpers.insert(format!(
                "fn {name}(c: MatrixC, at: u32, pitch: u32) {{
                    for (var j = 0u; j < 8u; j++) {{ {to} = {scalar}(c.sums[j]); }}
                }}\n"
            ));
            return format!("{name}({value}, {at}, {pitch})");
        }
        let kind = alias(kind);
        let name =
            format!("{}_{order}_{array}", kind.replace("Matrix", "matrix_load_").to_lowercase());
        let column = format!("{first} + j");
        let body = match kind.as_str() {
            "MatrixA" => format!("m.row[k] = f32({});", place(row, "k")),
            "MatrixB" => {
                format!(
                    "for (var j = 0u; j < 8u; j++) {{ m.columns[j][k] = f32({}); }}",
                    place("k", &column)
                )
            }
            _ => format!(
                "if (k < 8u) {{ m.sums[k] = f32({}); }}",
                place(row, &format!("{first} + k"))
            ),
        };
        helpers.insert(format!(
            "fn {name}(at: u32, pitch: u32) -> {kind} {{
                var m: {kind};
                for (var k = 0u; k < 16u; k++) {{ {body} }}
                return m;
            }}\n"
        ));
        format!("{name}({at}, {pitch})")
    }
}
