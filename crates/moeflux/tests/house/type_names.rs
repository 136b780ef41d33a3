//! Type names: unique within the sources of a crate, so that a name alone finds its definition.

use std::collections::BTreeMap;

use super::{code, crate_names, sources};

/// Names that are defined several times today: crate and name. This list only shrinks.
const DUPLICATES: [(&str, &str); 0] = [];

/// Names of the structs, enums, unions, traits and type aliases of a file, private ones and those
/// inside functions included, but not the associated types of traits. Expects formatted code.
fn type_names(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    // First lines of the enclosing items, with their indentation.
    let mut outer: Vec<(usize, &str)> = Vec::new();
    for line in code.lines().filter(|line| !line.trim().is_empty()) {
        let item = line.trim_start();
        let indent = line.len() - item.len();
        // These lines continue an item whose head takes several lines.
        if ["where", "{"].contains(&item) {
            outer.retain(|(other, _)| *other <= indent);
            continue;
        }
        outer.retain(|(other, _)| *other < indent);
        let item = without_visibility(item);
        let mut words = item.split(' ').skip_while(|word| *word == "unsafe");
        let (keyword, rest) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let name = &rest[..end];
        let is_associated = keyword == "type"
            && outer.last().is_some_and(|(_, item)| {
                let item = item.trim_start_matches("unsafe ");
                ["impl ", "impl<", "trait "].iter().any(|start| item.starts_with(start))
            });
        if ["struct", "enum", "union", "trait", "type"].contains(&keyword)
            && name.starts_with(char::is_uppercase)
            && !is_associated
        {
            names.push(name.to_owned());
        }
        outer.push((indent, item));
    }
    names
}

/// An item without `pub`, `pub(crate)` or `pub(in path)`.
fn without_visibility(item: &str) -> &str {
    let end = match item.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => item.find(')').map_or(0, |end| end + 1),
        Some(rest) if rest.starts_with(' ') => 3,
        _ => 0,
    };
    item[end..].trim_start()
}

#[test]
fn type_names_are_read_from_code() {
    let code = "\
pub struct A<T> {\n    x: T,\n}\npub(crate) enum B {\n    C,\n}\npub(in crate::x) union D {}\n\
impl Iterator for A {\n    type Item = u8;\n    fn f() {\n        struct E;\n        type F = u8;\n    }\n}\n\
unsafe trait G: Copy {\n    type H;\n}\npub type I = u8;\nlet type_of = 1;\n\
impl<T> J for A<T>\nwhere\n    T: Copy,\n{\n    type K = u8;\n}\nmod m {\n    type L = u8;\n}\n";
    assert_eq!(type_names(code), ["A", "B", "D", "E", "F", "G", "I", "L"]);
}

#[test]
fn type_names_are_unique_within_a_crate() {
    let mut duplicates = Vec::new();
    for name in crate_names() {
        let folder = format!("{name}/src");
        let mut homes: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (file, text) in sources(&folder) {
            if !file.contains("/tests") {
                for name in type_names(&code(&text)) {
                    homes.entry(name).or_default().push(file.clone());
                }
            }
        }
        let several = homes.into_iter().filter(|(_, files)| files.len() > 1);
        let of_crate =
            |(type_name, files): (String, Vec<String>)| (name.clone(), type_name, files.join(", "));
        duplicates.extend(several.map(of_crate));
    }
    let new: Vec<String> = duplicates
        .iter()
        .filter(|(name, type_name, _)| !DUPLICATES.contains(&(&**name, &**type_name)))
        .map(|(name, type_name, files)| format!("{name}: {type_name} in {files}"))
        .collect();
    assert!(new.is_empty(), "type names that are not unique:\n{}", new.join("\n"));
    let gone: Vec<_> = DUPLICATES
        .iter()
        .filter(|(name, listed)| !duplicates.iter().any(|(n, t, _)| n == name && t == listed))
        .collect();
    assert!(gone.is_empty(), "unique by now, remove them from the list: {gone:?}");
}
