//! The header is what cbindgen writes from the sources.
#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

/// Sources, in the order of the header.
const SOURCES: [&str; 10] = [
    "status",
    "structs",
    "cancel",
    "open_options",
    "model",
    "text",
    "callbacks",
    "session",
    "request",
    "log",
];

#[test]
fn the_committed_header_is_written_from_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(folder.join(format!("src/{source}.rs")));
    }
    let mut written = Vec::new();
    builder.generate().unwrap().write(&mut written);
    let written = String::from_utf8(written).unwrap();
    let header = folder.join("include/moeflux.h");
    if fs::read_to_string(&header).unwrap_or_default() != written {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("moeflux.h");
        fs::write(&new, written).unwrap();
        let (header, new) = (header.display(), new.display());
        panic!("{header} differs from cbindgen's, which is {new}: copy it");
    }
}
