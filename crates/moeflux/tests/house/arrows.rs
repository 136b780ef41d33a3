//! Imports inside a crate: doors only declare, and files and folders import each other in one
//! direction.
//!
//! A door is a `mod.rs` or a `lib.rs`. A room is a file or a folder beside others in one folder.

use std::collections::{BTreeMap, BTreeSet};

use super::{code, crate_names, sources};

/// Imports that close a circle of rooms: the folder, the importing room and the imported one. This
/// list only shrinks.
const CIRCLES: [&str; 100] = [
    "cli: interrupt -> commands",
    "compute-cpu/simd: activations -> dispatch",
    "compute-cpu/simd: activations -> kernels",
    "compute-cpu/simd: activations -> unpack_affine",
    "compute-cpu/simd: avx512 -> table",
    "compute-cpu/simd: float_types -> vector",
    "compute-cpu/simd: isa -> avx512",
    "compute-cpu/simd: isa -> table",
    "compute-cpu/simd: kernels -> table",
    "compute-cpu/simd: unpack_affine -> dispatch",
    "compute-cpu/simd: unpack_mx -> dispatch",
    "compute-cpu/simd: unpack_plain -> dispatch",
    "compute-cpu/simd: vector -> unpack_affine",
    "compute-gpu/ops/attention: attention -> rows",
    "compute-gpu/ops/attention: attention_decode -> attention",
    "compute-gpu/ops/gemv: gemv -> experts",
    "compute-gpu/ops: gemm -> gemv",
    "compute-gpu/ops: matmul -> head_matmul",
    "compute-gpu/ops: qk_norm_rope -> attention",
    "compute-gpu/recorder: recorder -> late",
    "compute-gpu/recorder: recorder -> profile",
    "compute-gpu/recorder: recorder -> step",
    "compute-gpu/recorder: upload -> recorder",
    "compute-gpu/store: store -> buffers",
    "compute-gpu/store: store -> slots",
    "compute-gpu/store: store -> states",
    "compute-gpu/store: weights -> store",
    "compute-gpu: device -> ahead",
    "compute/group: states -> card_group",
    "engine/experts/io/queue: read_queue -> timeout",
    "engine/experts/io/queue: read_source -> read_queue",
    "engine/experts/io/queue: split -> read_queue",
    "engine/runtime/layer: compressor -> mla",
    "engine/runtime/layer: loader -> step",
    "engine/runtime/layer: moe -> layer",
    "engine/runtime/layer: scratch -> compressed",
    "engine/runtime/layer: scratch -> delta_net",
    "engine/runtime/layer: scratch -> gqa",
    "engine/runtime/layer: scratch -> mamba2",
    "engine/runtime/layer: scratch -> mla",
    "engine/runtime/layer: scratch -> mlp",
    "engine/runtime/layer: scratch -> moe",
    "engine/runtime/layer: scratch -> ngram_memory",
    "engine/runtime/layer: scratch -> short_conv",
    "engine/runtime/layer: scratch -> step",
    "engine/runtime/layer: scratch -> streams",
    "engine/runtime/layer: step -> layer",
    "engine/runtime/layer: streams -> layer",
    "engine/runtime: host_experts -> plan",
    "engine/runtime: layer -> spans",
    "engine/runtime: memory_request -> plan",
    "engine/runtime: plan -> plan_basis",
    "engine/runtime: plan -> prefix_share",
    "engine/runtime: plan -> slot_counts",
    "engine/serve: core -> worker",
    "engine/session: steps -> session",
    "engine/session: timeline -> engine",
    "hub: client -> waits",
    "hub: selection -> model_name",
    "model/blueprint: compressed -> parts",
    "model/blueprint: layer -> weight_list",
    "model/blueprint: streams -> layer",
    "model/checkpoint/gguf: metadata -> header",
    "model/checkpoint/gguf: text -> scored_merges",
    "model/checkpoint: arriving -> folder",
    "model/checkpoint: compressed_tensors -> matrix_request",
    "model/checkpoint: data_file -> arriving",
    "model/checkpoint: folder -> tensors",
    "model/checkpoint: foreign -> data_file",
    "model/checkpoint: foreign -> gguf",
    "model/checkpoint: foreign -> packed",
    "model/checkpoint: input_major -> matrix_request",
    "model/checkpoint: packed -> folder",
    "model/checkpoint: rope_scaling -> folder",
    "model/checkpoint: source -> row_table",
    "ops/device: layer_split -> device",
    "ops/device: record_ahead -> device",
    "ops/format: affine -> format",
    "ops/format: block_scaled -> format",
    "ops/format: blocks -> format",
    "ops/format: plain -> format",
    "ops/format: scaled_blocks -> format",
    "ops: format -> matrix",
    "synth/values: values -> blocks",
    "synth/values: values -> mxfp4",
    "text/chat/python: printf -> filters",
    "text/dialect/calls: syntax -> finder",
    "text/dialect: calls -> machine",
    "text/grammar/schema: write -> schema",
    "text/grammar: ahead -> mask",
    "text/grammar: calls -> parameters",
    "text/grammar: compiled_cache -> grammar",
    "text/grammar: lark -> compile",
    "text/grammar: lark -> gbnf",
    "text/grammar: mask -> grammar",
    "text/tokenizer: decoder -> tokenizer",
    "text/tokenizer: pieces -> tokenizer",
    "text/tokenizer: tokenizer -> literal_text",
    "text: chat -> dialect",
    "text: text -> grammar",
];

/// Names of modules from the crate's root to a file.
type Module = Vec<String>;

/// A path of imports as it is written, with groups expanded.
#[derive(Debug, PartialEq)]
struct ImportPath {
    segments: Vec<String>,
    /// Modules inside the file that enclose the path.
    inline: usize,
}

/// Reads the paths that begin with `crate`, `super` or `self`.
struct PathReader<'a> {
    tokens: Vec<&'a str>,
    next: usize,
    paths: Vec<ImportPath>,
}

impl<'a> PathReader<'a> {
    fn read(code: &'a str) -> Vec<ImportPath> {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let mut tokens = Vec::new();
        let mut rest = code;
        while let Some(first) = rest.chars().next() {
            let end = match first {
                c if is_name(c) => rest.find(|c| !is_name(c)).unwrap_or(rest.len()),
                ':' if rest.starts_with("::") => 2,
                c => c.len_utf8(),
            };
            if !first.is_whitespace() {
                tokens.push(&rest[..end]);
            }
            rest = &rest[end..];
        }
        let mut reader = Self { tokens, next: 0, paths: Vec::new() };
        reader.read_all();
        reader.paths
    }

    fn token(&self, at: usize) -> &'a str {
        self.tokens.get(at).copied().unwrap_or_default()
    }

    fn read_all(&mut self) {
        // Depths of braces at which modules inside the file begin.
        let (mut depth, mut modules) = (0, Vec::new());
        while self.next < self.tokens.len() {
            let token = self.token(self.next);
            let before = self.next.checked_sub(1).map_or("", |at| self.token(at));
            let is_root = ["crate", "super", "self"].contains(&token)
                && self.token(self.next + 1) == "::"
                && !["::", ".", "$", "in"].contains(&before);
            if is_root {
                self.read_tree(&[], modules.len());
                continue;
            }
            match token {
                "{" => {
                    depth += 1;
                    let name = self.next.saturating_sub(1);
                    let keyword = [1, 2].map(|n| self.token(name.saturating_sub(n)));
                    if keyword[0] == "mod" || keyword == ["$", "mod"] {
                        modules.push(depth);
                    }
                }
                "}" => {
                    modules.pop_if(|begin| *begin == depth);
                    depth -= 1;
                }
                _ => {}
            }
            self.next += 1;
        }
    }

    /// Reads a path, or a tree of paths with groups in braces, after its first segments.
    fn read_tree(&mut self, first: &[String], inline: usize) {
        let mut segments = first.to_vec();
        loop {
            let token = self.token(self.next);
            self.next += 1;
            if token == "{" {
                while !["}", ""].contains(&self.token(self.next)) {
                    self.read_tree(&segments, inline);
                    if self.token(self.next) == "as" {
                        self.next += 2;
                    }
                    if self.token(self.next) == "," {
                        self.next += 1;
                    }
                }
                self.next += 1;
                return;
            }
            // `a::{self}` is the module `a`.
            if token != "self" || segments.is_empty() {
                segments.push(token.to_owned());
            }
            if self.token(self.next) != "::" {
                self.paths.push(ImportPath { segments, inline });
                return;
            }
            self.next += 1;
        }
    }
}

/// A source file of a crate, and the modules that it imports from.
struct Room {
    file: String,
    module: Module,
    is_door: bool,
    paths: Vec<ImportPath>,
}

/// The source files of a crate without its tests.
fn rooms(name: &str) -> Vec<Room> {
    let folder = format!("{name}/src");
    let files = sources(&folder).into_iter().filter(|(file, _)| !file.contains("/tests"));
    let rooms = files.map(|(file, text)| {
        let path = file[folder.len() + 1..].trim_end_matches(".rs");
        let mut module: Module = path.split('/').map(str::to_owned).collect();
        let is_door = ["mod", "lib", "main"].contains(&module[module.len() - 1].as_str());
        if is_door {
            module.pop();
        }
        Room { is_door, module, paths: PathReader::read(&code(&text)), file }
    });
    rooms.collect()
}

impl Room {
    /// Names from the crate's root to an imported item.
    fn absolute(&self, path: &ImportPath) -> Option<Module> {
        let supers = path.segments.iter().take_while(|s| *s == "super").count();
        let (base, rest) = match path.segments[0].as_str() {
            "crate" => (&[][..], &path.segments[1..]),
            "super" => {
                let up = supers.checked_sub(path.inline)?;
                (&self.module[..self.module.len().checked_sub(up)?], &path.segments[supers..])
            }
            _ => (&self.module[..], &path.segments[1..]),
        };
        Some([base, rest].concat())
    }
}

/// Imports of all files but doors: the file, the path, and the module that the path names or whose
/// item it names.
fn imports(rooms: &[Room]) -> Vec<(&Room, &ImportPath, Module)> {
    let modules: BTreeSet<&[String]> = rooms.iter().map(|room| &room.module[..]).collect();
    let files = rooms.iter().filter(|room| !room.is_door);
    let paths = files.flat_map(|room| room.paths.iter().map(move |path| (room, path)));
    let imports = paths.filter_map(|(room, path)| {
        let mut module = room.absolute(path)?;
        while !modules.contains(&module[..]) {
            module.pop()?;
        }
        Some((room, path, module))
    });
    imports.collect()
}

/// Rooms that a room reaches by arrows.
fn reached<'a>(arrows: &BTreeSet<(&'a str, &'a str)>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(room) = next.pop() {
        let targets = arrows.iter().filter(|(a, _)| *a == room).map(|(_, b)| *b);
        next.extend(targets.filter(|b| seen.insert(*b)));
    }
    seen
}

#[test]
fn paths_are_read_with_their_groups() {
    let code = "use crate::{a::{self, B as C}, d};\nmod m {\n    use super::super::e::*;\n}\n\
                pub(in crate::f) fn g() { self::h::i(); self.j::<u8>(); $crate::k::l() }";
    let paths: Vec<_> = PathReader::read(code)
        .into_iter()
        .map(|path| (path.segments.join(" "), path.inline))
        .collect();
    let expected =
        [("crate a", 0), ("crate a B", 0), ("crate d", 0), ("super super e *", 1), ("self h i", 0)];
    assert_eq!(paths, expected.map(|(path, inline)| (path.to_owned(), inline)));
}

#[test]
fn doors_only_declare() {
    for name in &crate_names() {
        for (file, text) in sources(&format!("{name}/src")) {
            if !["/mod.rs", "/lib.rs"].iter().any(|door| file.ends_with(door))
                || file.contains("/tests/")
            {
                continue;
            }
            let code = code(&text);
            let mut statements = code.as_str();
            while let Some(start) = statements.find(|c: char| !c.is_whitespace()) {
                statements = &statements[start..];
                let end = if statements.starts_with('#') { "]\n" } else { ";" };
                let (statement, rest) = statements.split_once(end).unwrap_or((statements, ""));
                statements = rest;
                let words = statement.replace(')', ") ");
                let is_public = words.starts_with("pub");
                let keyword = words.split_whitespace().find(|w| ["mod", "use"].contains(w));
                let declares = match keyword {
                    Some("mod") => !statement.contains('{'),
                    Some(_) => is_public,
                    None => statement.starts_with('#'),
                };
                assert!(
                    declares,
                    "{file}: expected `mod` and `pub use` only, got {statement:?}: define it in a \
                     file of its name"
                );
            }
        }
    }
}

#[test]
fn names_are_imported_from_their_files() {
    let mut through = Vec::new();
    for name in &crate_names() {
        let rooms = rooms(name);
        for (room, path, door) in imports(&rooms) {
            if door != room.module && room.module.starts_with(&door) {
                through.push(format!("{}: {}", room.file, path.segments.join("::")));
            }
        }
    }
    assert!(through.is_empty(), "imports through the door of a folder above:\n{through:#?}");
}

#[test]
fn no_rooms_import_each_other() {
    let mut listed: BTreeSet<&str> = CIRCLES.into();
    let mut circles = Vec::new();
    for name in &crate_names() {
        let rooms = rooms(name);
        let mut folders: BTreeMap<String, BTreeSet<(&str, String)>> = BTreeMap::new();
        for (room, _, other) in imports(&rooms) {
            let common = room.module.iter().zip(&other).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (room.module.get(common), other.get(common)) {
                let folder = [&[name.to_owned()], &room.module[..common]].concat().join("/");
                folders.entry(folder).or_default().insert((from, to.clone()));
            }
        }
        for (folder, arrows) in &folders {
            let text = |(from, to): &(&str, &str)| format!("{folder}: {from} -> {to}");
            let all: BTreeSet<(&str, &str)> =
                arrows.iter().map(|(a, b)| (*a, b.as_str())).collect();
            let (known, rest): (BTreeSet<_>, BTreeSet<_>) =
                all.into_iter().partition(|arrow| CIRCLES.contains(&text(arrow).as_str()));
            for arrow in &known {
                if reached(&rest, arrow.1).contains(arrow.0) {
                    listed.remove(text(arrow).as_str());
                }
            }
            let closes = |(from, to): &&(&str, &str)| reached(&rest, to).contains(from);
            circles.extend(rest.iter().filter(closes).map(text));
        }
    }
    assert!(circles.is_empty(), "rooms that import each other:\n{}", circles.join("\n"));
    assert!(listed.is_empty(), "in no circle by now, remove them from the list: {listed:#?}");
}
