//! Emulation of cooperative matrices of 16 x 16 in plain WGSL, for devices without them.
//!
//! Each thread of a subgroup of 32 holds half a row of the accumulator C, the whole row of A, and
//! the eight columns of B for its half.

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

/// Replaces `coop_mat16x16`, `coopLoad`, `coopStore` and `coopMultiplyAdd` by plain WGSL.
pub(super) fn emulate_matrices(kernel: &str) -> String {
    if !kernel.contains("coop_mat16x16") {
        return kernel.into();
    }
    let mut text = kernel.replace(ENABLE, "").replace("coopMultiplyAdd(", "matrix_multiply(");
    for (role, scalar) in [('A', "f16"), ('B', "f16"), ('C', "f32")] {
        text = text.replace(&format!("coop_mat16x16<{scalar}, {role}>"), &format!("Matrix{role}"));
    }
    let mut helpers = BTreeSet::new();
    while let Some(start) = text.find("coopLoad").or_else(|| text.find("coopStore")) {
        let (call, rest) = parse_call(&text[start..]);
        let replacement = call.emulate(&text, &mut helpers);
        text = format!("{}{replacement}{rest}", &text[..start]);
    }
    let entry = "@builtin(local_invocation_index) index: u32,\n) {\n";
    assert!(text.contains(entry), "the kernel has no local_invocation_index");
    let prologue = format!("{entry}matrix_lane = index % 32u;\n");
    let directives = text.lines().take_while(|line| line.starts_with("enable "));
    let (head, body) = text.split_at(directives.map(|line| line.len() + 1).sum());
    let helpers: String = helpers.into_iter().collect();
    format!("{head}{MATRICES}{helpers}{}", body.replace(entry, &prologue))
}

/// A call of `coopLoad`, `coopLoadT`, `coopStore` or `coopStoreT` on a workgroup array.
struct MatrixCall<'a> {
    stores: bool,
    /// Row-major, otherwise column-major.
    row_major: bool,
    /// Matrix type of a load.
    kind: &'a str,
    /// Stored matrix.
    value: &'a str,
    array: &'a str,
    offset: &'a str,
    stride: &'a str,
}

/// Parses the call at the start of `text`. Returns it and the rest of the text.
fn parse_call(text: &str) -> (MatrixCall<'_>, &str) {
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
    let call = MatrixCall {
        stores: name.starts_with("coopStore"),
        row_major: name.ends_with('T'),
        kind,
        value: value.trim_end_matches(", "),
        array: &place[..bracket],
        offset: &place[bracket + 1..end],
        stride: place[end + 1..].trim_start_matches(", "),
    };
    (call, &text[close + 1..])
}

/// Index of the bracket that closes the one at `open`.
fn closing(text: &str, open: usize) -> usize {
    let mut depth = 0;
    let ends = |(_, c): &(usize, char)| {
        depth += i32::from(matches!(c, '(' | '[')) - i32::from(matches!(c, ')' | ']'));
        depth == 0
    };
    open + text[open..].char_indices().find(ends).unwrap().0
}

impl MatrixCall<'_> {
    /// Returns a call of a helper function with the same effect, and adds the function to
    /// `helpers`.
    fn emulate(&self, text: &str, helpers: &mut BTreeSet<String>) -> String {
        let Self { stores, row_major, kind, value, array, offset, stride } = *self;
        let alias = |name: &str| {
            let line = format!("alias {name} = ");
            let target = text.split_once(&line);
            let target = target.map(|(_, rest)| rest.split(';').next().unwrap_or(""));
            target.unwrap_or(name).to_owned()
        };
        let declared = format!("var<workgroup> {array}: array<");
        let element_type = alias(text.split_once(&declared).unwrap().1.split(',').next().unwrap());
        let vectorized = element_type.starts_with("vec4");
        let scalar = if element_type.contains("f16") { "f16" } else { "f32" };
        let element = |i: &str| match vectorized {
            true => format!("{array}[({i}) / 4u][({i}) % 4u]"),
            false => format!("{array}[{i}]"),
        };
        let width = if vectorized { "4u" } else { "1u" };
        let place = |row: &str, column: &str| match row_major {
            true => element(&format!("(offset + ({row}) * stride) * {width} + {column}")),
            false => element(&format!("(offset + ({column}) * stride) * {width} + {row}")),
        };
        let (row, first) = ("matrix_lane / 2u", "matrix_lane % 2u * 8u");
        let order = if row_major { "rows" } else { "columns" };
        if stores {
            let name = format!("matrix_store_{order}_{array}");
            let target = place(row, &format!("{first} + j"));
            helpers.insert(format!(
                "fn {name}(c: MatrixC, offset: u32, stride: u32) {{
                    for (var j = 0u; j < 8u; j++) {{ {target} = {scalar}(c.sums[j]); }}
                }}\n"
            ));
            return format!("{name}({value}, {offset}, {stride})");
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
            "fn {name}(offset: u32, stride: u32) -> {kind} {{
                var m: {kind};
                for (var k = 0u; k < 16u; k++) {{ {body} }}
                return m;
            }}\n"
        ));
        format!("{name}({offset}, {stride})")
    }
}
